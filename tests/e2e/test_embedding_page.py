# SPDX-License-Identifier: Apache-2.0
"""docs/how_to/embed.md, run as it stands there."""

import re
from pathlib import Path
from typing import Any

import speccompile
from speccompile.common import chat_prompts

PAGE = (Path(__file__).parents[2] / "docs/how_to/embed.md").read_text()


def test_the_page_runs(pair, monkeypatch, capsys):
    """The example pair knows no conversations: a template that joins them stands in the place of its own."""
    seen: list[Any] = []

    class Template:
        def render(self, messages: Any, *rest: Any) -> str:
            seen.append([*messages])
            return "def prime():"

    def template_of(folder: Path, where: str) -> Template:
        assert folder == pair / "tokenizer"
        return Template()

    monkeypatch.setattr(chat_prompts, "find_template", template_of)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        code = re.sub(r"bundles/(pycode|chat)", str(pair), block)
        assert code != block
        exec(compile(code, "docs/how_to/embed.md", "exec"), names)
    out = capsys.readouterr().out
    engine = speccompile.load(pair, verify=False)
    params = speccompile.SamplingParams(max_new_tokens=32)
    texts = [engine.generate(prompt, params)[0].text for prompt in ("def add(a, b):", "class LRUCache:")]
    assert out.endswith(f"{texts}\n")
    answer = {"role": "assistant", "content": engine.generate(engine.encode("def prime():"), params)[0].text}
    assert seen[0] == [{"role": "user", "content": "Name a prime."}]
    assert seen[1] == [*seen[0], answer, {"role": "user", "content": "Another one."}]
