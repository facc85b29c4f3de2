# SPDX-License-Identifier: Apache-2.0
"""The method of docs/tutorials/add_a_method.md, run as the page says: same text, fewer steps."""

import re
from pathlib import Path

import speccompile

PAGE = (Path(__file__).parents[2] / "docs/tutorials/add_a_method.md").read_text()
PROMPT = "x = [0, 0, 0, 0,"


def test_the_method_of_the_page_gives_the_same_text_in_fewer_steps(pair, tmp_path, monkeypatch):
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    [group, point] = re.findall(r"^\[project.entry-points.\"(.*)\"\]\n(.*)$", PAGE, re.MULTILINE)[0]
    info = tmp_path / "repeat_drafts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: repeat-drafts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{point.replace(chr(34), '')}\n")
    (tmp_path / "repeat_drafts.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    params = speccompile.SamplingParams(max_new_tokens=32)
    results = []
    for method in ("none", "repeat"):
        with speccompile.load(pair, method=method, verify=False) as engine:
            results += engine.generate(PROMPT, params)
    plain, repeated = results
    assert repeated.text == plain.text
    assert repeated.stats["num_steps"] < plain.stats["num_steps"] / 4
