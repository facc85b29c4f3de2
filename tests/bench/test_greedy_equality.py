# SPDX-License-Identifier: Apache-2.0
"""What counts as transformers' greedy text; a tiny pair is built in the way of the table of pairs."""

import json
from types import SimpleNamespace

import pytest
import torch

from bench.greedy_equality import gaps_of, is_ended_well
from bench.pairs import main
from bench.pairs.rows import Pair, _mlp

NEXT = {1: 2, 2: 3, 3: 1}  # the token after a token


def model(ids):
    logits = torch.zeros(1, ids.shape[1], 5)
    for i, token in enumerate(ids[0].tolist()):
        logits[0, i, NEXT.get(token, 0)] = 1.0
        logits[0, i, 4] = 0.75
    return SimpleNamespace(logits=logits)


def test_a_token_is_compared_with_the_logits_before_it():
    assert gaps_of(model, [3, 1], [2, 3, 1, 2]) == {}
    assert gaps_of(model, [3, 1], [2, 4, 0, 3]) == {1: 0.25, 3: 1.0}
    assert gaps_of(model, [3], [2]) == {0: 1.0}


def test_a_text_ends_at_its_first_end_or_at_the_most_tokens():
    assert is_ended_well([5, 6, 7], {9}, 3)
    assert is_ended_well([5, 9], {9}, 3)
    assert not is_ended_well([5, 6], {9}, 3)
    assert not is_ended_well([5, 9, 6], {9}, 3)


pytestmark = pytest.mark.export

TINY = {"model_type": "llama", "vocab_size": 9000, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 1024}  # fmt: skip


def test_a_tiny_pair_is_built_and_a_refusal_has_the_errors_words(tmp_path):
    pair = Pair("tiny", "Tiny", "Tiny", "MLP", TINY, "mlp", _mlp(32, 16, 2, 9000))
    record = main.build_pair(pair, "onnxruntime", tmp_path)
    assert record["outcome"] == "built" and record["reason"] == ""
    assert record["peak_bytes"] > record["bundle_bytes"] > 4 * 4096 * 32  # a table of the cut vocabulary in float32
    folder = tmp_path / "tiny-onnxruntime"
    assert not (folder / "bundle").exists()
    assert json.loads((folder / "target/config.json").read_text())["vocab_size"] == 4096

    refused = main.build_pair(Pair("wrong", "Tiny", "Tiny", "none", TINY, "no_method"), "onnxruntime", tmp_path)
    assert refused["outcome"] == "refused" and "(speculator.method): got 'no_method'" in refused["reason"]
