# SPDX-License-Identifier: Apache-2.0
"""Which tokenizers count as the same, and the source of the special tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from speccompile.bundle.tokenizers import read_tokenizer
from speccompile.checkpoints.checkpoint import special_tokens


def save(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    data = {
        "added_tokens": [{"id": 3, "content": "<s>", "special": True}],
        "normalizer": None,
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
    }
    (folder / "tokenizer.json").write_text(json.dumps({**data, **changes}))
    return folder


def test_the_model_part_and_the_added_tokens_count(tmp_path):
    plain = read_tokenizer(save(tmp_path / "plain"))
    assert plain is not None and plain.num_tokens == 4 and plain.kind == "BPE"
    # Neither padding, truncation nor the order of keys changes what an id means.
    same = save(
        tmp_path / "same",
        truncation={"max_length": 3},
        model={"merges": [["a", "b"]], "type": "BPE", "vocab": {"ab": 2, "a": 0, "b": 1}},
    )
    assert read_tokenizer(same) == plain
    others = (
        {"model": {"type": "BPE", "vocab": {"a": 1, "b": 0, "ab": 2}, "merges": [["a", "b"]]}},
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": []}},
        {"added_tokens": [{"id": 3, "content": "<t>"}]},
        {"added_tokens": []},
    )
    for number, changes in enumerate(others):
        assert read_tokenizer(save(tmp_path / f"other-{number}", **changes)) != plain


def test_a_unigram_model_counts_its_pieces(tmp_path):
    model = {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}
    facts = read_tokenizer(save(tmp_path / "u", model=model, added_tokens=[]))
    assert facts is not None and facts.num_tokens == 2 and facts.kind == "Unigram"


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 1, "bos_token_id": 0}, None, ([1], 0)),
        ({"eos_token_id": 1}, {"eos_token_id": [2, 3]}, ([2, 3], None)),
        ({"eos_token_id": 1, "bos_token_id": 0}, {"eos_token_id": None}, ([1], 0)),
        ({}, {}, ([], None)),
        ({"eos_token_id": 0}, {}, ([0], None)),
    ],
)
def test_special_tokens(tmp_path, config, generation, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert special_tokens(tmp_path) == expected
