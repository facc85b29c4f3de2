# SPDX-License-Identifier: Apache-2.0
"""docs/reference/pairs.md says what bench/pairs/pairs.json records; the rows of pairs are complete and well formed."""

import json
from collections import Counter

import pytest

from bench.pairs import main, page
from bench.pairs.rows import (
    CHOSEN,
    EXPERTS,
    MASK,
    MAX_DRAFT_VOCAB,
    MAX_EXPERTS,
    MAX_VOCAB,
    PAIRS,
    SPECULATOR,
    TARGET,
    VOCAB,
)
from speccompile.core import registry

# The families and kinds that are counted: as many pairs of each as published kinds of speculator.
COUNTS = {
    "Qwen3": 6, "Qwen3.5, 3.6, 3.8": 4, "Qwen3.8-Flash-Next": 1, "Qwen3-MoE": 3, "Gemma 4": 4, "Gemma 3": 1,
    "gpt-oss": 3, "Llama 3": 4, "Llama 4": 1, "Muse-Glimmer": 2, "GLM-4.5, 4.6, 4.7": 1, "MiniMax-M2": 1,
    "Hunyuan": 1, "DeepSeek-V3": 1, "Kimi K2": 2, "Nemotron 3": 3, "Ministral 3": 1, "Granite 3": 1,
    "Granite code": 1, "Phi-3, 4": 1, "LFM2": 1,
}  # fmt: skip
REDUCED = {*VOCAB, *EXPERTS, *CHOSEN, *MASK, "draft_vocab_size", "n_group", "topk_group"}
RESULT = main.read_result()


def numbers(config, prefix=""):
    for name, value in config.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def test_every_counted_pair_has_a_row_and_no_other():
    assert Counter(pair.family for pair in PAIRS) == COUNTS
    assert len({pair.name for pair in PAIRS}) == len(PAIRS)
    assert len({(pair.family, pair.speculator.partition(" (")[0]) for pair in PAIRS}) == len(PAIRS)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_a_row_is_well_formed(pair):
    full, small = (pair.configs(is_full=is_full) for is_full in (True, False))
    expected = [TARGET] if pair.drafter is None else [TARGET, SPECULATOR]
    assert list(full) == list(small) == expected == list(json.loads(json.dumps(small)))
    for folder in expected:
        assert isinstance(full[folder].get("model_type"), str)
        kept = dict(numbers(small[folder]))
        # All but tokens and experts is published size.
        for name, value in numbers(full[folder]):
            short = name.rpartition(".")[2]
            assert kept[name] == value or (short in REDUCED and 0 < kept[name] < value), name
        for name, value in kept.items():
            short = name.rpartition(".")[2]
            assert short not in VOCAB or value <= MAX_VOCAB
            assert short != "draft_vocab_size" or value <= MAX_DRAFT_VOCAB
            assert short not in EXPERTS or value <= MAX_EXPERTS
            assert short not in MASK or value < MAX_VOCAB
    text = full[TARGET].get("text_config", full[TARGET])
    for name in ("layer_types", "no_rope_layers", "layer_rope_theta"):
        assert len(text.get(name, text.get("layer_types", ()))) == len(text.get("layer_types", ()))
    if "layer_types" in text:
        assert text["num_hidden_layers"] == len(text["layer_types"])
        assert set(text["layer_types"]) == set(pair.target.get("text_config", pair.target)["layer_types"])
    if pair.method == "eagle3":
        assert text["num_hidden_layers"] >= 3  # it reads three


def test_methods_exist():
    known = set(registry.METHODS)
    built = {pair.method for pair in PAIRS if RESULT[pair.name].get("onnxruntime", {}).get("outcome") == "built"}
    assert built <= known


def test_records_are_well_formed():
    for name, held in RESULT.items():
        assert set(held) <= set(main.BACKENDS), name
        # Only what ONNX Runtime builds is tried on TensorRT.
        assert "tensorrt" not in held or held["onnxruntime"]["outcome"] == "built", name
        for record in held.values():
            assert record["outcome"] in ("built", "refused", "not run"), name  # a fault is to be mended, not recorded
            if record["outcome"] == "built":
                assert record["seconds"] > 0 and record["peak_bytes"] > 0 and record["bundle_bytes"] > 0
            else:
                assert record["reason"] and "build/pairs" not in record["reason"], name


def test_the_page_says_what_is_recorded():
    text = page.PAGE.read_text()
    assert page.block(RESULT) in text
    assert set(json.loads(main.RESULT.read_text())) == {pair.name for pair in PAIRS}


def test_a_build_that_ends_otherwise_is_recorded():
    error = {"where": "x", "got": "a\nb", "expected": "c", "todo": "d", "kind": "ExportError", "exit_code": 4}
    assert main.record_of(4, json.dumps({"error": error}), "") == {
        "outcome": "refused",
        "reason": "x: got a b; expected c",
    }
    assert main.record_of(-6, "", "one\nterminate called\n") == {
        "outcome": "fault",
        "reason": "exit code -6: terminate called",
    }


def test_what_is_recorded_is_kept():
    refused, built = {"outcome": "refused"}, {"outcome": "built"}
    assert main.needs_build(None, is_retry=False, is_again=False)
    assert [main.needs_build(r, is_retry=False, is_again=False) for r in (refused, built)] == [False, False]
    assert [main.needs_build(r, is_retry=True, is_again=False) for r in (refused, built)] == [True, False]
    assert [main.needs_build(r, is_retry=False, is_again=True) for r in (refused, built)] == [True, True]
