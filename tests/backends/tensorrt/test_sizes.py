# SPDX-License-Identifier: Apache-2.0
"""Predicted bytes of weights: the arithmetic, and the example target's own figures."""

import pytest

from speccompile.backends.tensorrt.backend import predicted_weight_bytes
from speccompile.backends.tensorrt.specs import tensorrt_spec
from speccompile.core import specs
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import WeightCounts
from speccompile.core.specs import GraphSpec, TensorSpec
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec, rollback_spec, verified_spec

# examples/models/pycode-16m: 8 layers of hidden 384, tied to an embedding of 8192 x 384.
HEAD = 8192 * 384
EXAMPLE = WeightCounts(15_735_168, 12_582_912 + HEAD, HEAD + 17 * 384 + 512 * 64)
# Weights of its plans as TensorRT-RTX 1.7.1 built them, in bytes.
SEEN = {"none": 31_617_312, "int8": 22_251_552, "int4": 16_101_408, "fp8": 22_251_552}


@pytest.mark.parametrize("quantization", SEEN)
def test_the_example_target_is_predicted_within_two_percent(quantization):
    got = predicted_weight_bytes(EXAMPLE, quantization, "float16", num_head=HEAD, is_tied=True)
    assert got == pytest.approx(SEEN[quantization], rel=0.02)


def test_the_parts():
    counts = WeightCounts(300, 200, 100)
    assert predicted_weight_bytes(counts, "none", "float32") == 1200
    assert predicted_weight_bytes(counts, "none", "bfloat16") == 600
    assert predicted_weight_bytes(counts, "int8", "float16") == 200 + 200
    assert predicted_weight_bytes(WeightCounts(0, 256, 0), "int4", "float16") == 128 + 4
    # The LM head: stored once when tied and plain, its own copy in int8 under int4.
    assert predicted_weight_bytes(counts, "none", "float16", num_head=100, is_tied=True) == 200 + 200
    assert predicted_weight_bytes(WeightCounts(0, 228, 0), "int4", "float16", num_head=100) == 66 + 100


DIMS = ModelDims("llama", vocab_size=97, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
                 max_positions=64)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_target_has_half_caches_of_static_rows_and_one_more_input(dtype):
    plain = verified_spec(decoder_spec("target", DIMS, hidden=True, hidden_layers=(0,)))
    spec = tensorrt_spec(plain, dtype, 72)
    assert [t.name for t in spec.inputs] == [*[t.name for t in plain.inputs[:-4]], specs.KV_ROWS, *plain.caches]
    assert spec.input(specs.KV_ROWS) == TensorSpec("kv_rows", ("kv",), "int8")
    for name in plain.caches:
        wanted = TensorSpec(name, ("batch", 2, 72, 16), dtype)
        assert spec.input(name) == wanted
        assert spec.output(f"{name}.updated").dims == wanted.dims
    assert {t.name for t in spec.outputs if t.dtype == dtype} == {
        "hidden", "hidden.0", *(f"{c}.updated" for c in plain.caches),
    }  # fmt: skip
    kept = [t for t in spec.inputs if t.name not in (specs.KV_ROWS, *spec.caches)]
    assert kept == list(plain.inputs[:-4])


def test_a_compacting_target_has_compacted_caches_after_all_updates():
    plain = verified_spec(decoder_spec("target", DIMS))
    spec = tensorrt_spec(plain, "float16", 72, compacts=True)
    assert [t.name for t in spec.outputs[-8:]] == [
        *(f"{c}.updated" for c in plain.caches),
        *(specs.compacted_cache_name(c) for c in plain.caches),
    ]
    assert spec.output("v_cache.1.compacted") == TensorSpec("v_cache.1.compacted", ("batch", 2, 72, 16), "float16")
    assert specs.spec_from_json(spec.json_from_spec()) == spec


def test_a_rollback_attends_to_nothing_and_has_no_row_count():
    spec = tensorrt_spec(rollback_spec(DIMS), "float16", 72)
    assert [t.name for t in spec.inputs] == [specs.LENGTHS, specs.PATH, *spec.caches]
    assert {t.dtype for t in spec.outputs} == {"float16"}


def test_a_graph_without_caches_changes_its_hidden_states_alone():
    plain = GraphSpec(
        "heads",
        (TensorSpec(specs.HIDDEN, ("batch", "nodes", 64), "float32"), TensorSpec(specs.TOKENS, ("batch",), "int64")),
        (TensorSpec(specs.CHAIN_PROBS, ("batch", 4, 97), "float32"),),
    )
    spec = tensorrt_spec(plain, "bfloat16", 72)
    assert [t.dtype for t in (*spec.inputs, *spec.outputs)] == ["bfloat16", "int64", "float32"]


def test_cache_bytes_follow_the_dtype():
    assert DIMS.cache_row_bytes == 2 * 4 * 2 * 2 * 16
    assert DIMS.cache_row_bytes_in("bfloat16") == DIMS.cache_row_bytes_in("float16") == DIMS.cache_row_bytes // 2


def test_a_dist_that_comes_out_has_the_vocabulary_and_one_that_goes_in_may_be_a_dummy():
    draft = tensorrt_spec(candidate_spec(decoder_spec("draft", DIMS), 1, dists=True), "float16", 72)
    assert draft.output(specs.NODE_PROBS).dims == ("batch", "scored", 97)
    target = tensorrt_spec(verified_spec(decoder_spec("target", DIMS)), "float16", 72)
    assert target.input(specs.DRAFT_PROBS).dims == ("batch", "scored", "draft_vocab")
