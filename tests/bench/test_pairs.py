# SPDX-License-Identifier: Apache-2.0
"""A tiny pair goes the way of the table of pairs: configs and recipe written, built in a process of its own."""

import json

import pytest

from bench.pairs import main
from bench.pairs.rows import Pair, _mlp

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
