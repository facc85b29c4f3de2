# SPDX-License-Identifier: Apache-2.0
"""The example prompts and the example pair are what the README and the benchmarks say."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
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
