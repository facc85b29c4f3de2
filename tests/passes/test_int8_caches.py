# SPDX-License-Identifier: Apache-2.0
"""Caches become int8 rows with scales, in our ops and in standard ones, and attention is the twin's over such rows."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from speccompile.core.specs import BorrowedCache, GraphSpec, TensorSpec, updated_cache_name
from speccompile.errors import PassError
from speccompile.graph_kinds.int8_caches import int8_cache_names, with_int8_caches
from speccompile.ops.int8_caches import INT8_ATTENTION, quantize_rows
from speccompile.ops.registry import attach_functions
from speccompile.passes.edit import OPS_DOMAIN, Editor
from speccompile.passes.int8_caches import quantize_caches
from speccompile.passes.lower_attention import lower_attention
from tests.passes.graphs import ops
from tests.passes.test_lowering import CACHES, attention_model, random_tree

TOLERANCE = 2e-6  # of numbers of order 1, float32
HEADS, KV_HEADS, WIDTH = 4, 2, 40


def model_with_caches() -> ir.Model:
    model = attention_model(HEADS, KV_HEADS, WIDTH, scale=0.3, softcap=0.0, window=0)
    for value, cache in zip(model.graph.outputs[1:], CACHES, strict=True):
        value.name = updated_cache_name(cache)
    return model


def feeds_of(model: ir.Model) -> dict[str, np.ndarray]:
    rng, nodes, rows = np.random.default_rng(0), 6, 20
    shapes = {"q": (2, HEADS, nodes, WIDTH), **dict.fromkeys("kv", (2, KV_HEADS, nodes, WIDTH))}
    given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for n, cache in zip("kv", CACHES, strict=True):
        pair = quantize_rows(rng.standard_normal((2, KV_HEADS, rows, WIDTH)).astype(np.float32))
        given[cache], given[f"{cache}.scale"] = pair
        assert n == cache[0]
    given |= {"lengths": np.array([0, 14]), "tree_mask": random_tree(rng, 2, nodes)}
    return {str(value.name): given[str(value.name)] for value in model.graph.inputs}


@pytest.mark.parametrize("is_lowered", [True, False], ids=["lowered", "op"])
def test_the_graph_is_the_twin_over_int8_rows(is_lowered):
    model = model_with_caches()
    if is_lowered:
        lower_attention(model)
    assert quantize_caches(model, CACHES) == (3 if is_lowered else 1)  # two writes and a reader
    assert ops(model)["Int8CachedAttention"] == (not is_lowered)
    names = [str(value.name) for value in model.graph.outputs]
    assert names[1:] == [f"{cache}{scale}.updated" for cache in CACHES for scale in ("", ".scale")]
    attach_functions(model)
    feeds = feeds_of(model)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    inputs = [feeds[name.replace("_scale", "_cache.scale")] for name in (t.name for t in INT8.inputs)]
    wanted = INT8.twin(*inputs, scale=0.3)
    for mine, theirs in zip(session.run(None, feeds), wanted, strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine, theirs, atol=0 if mine.dtype == np.int8 else TOLERANCE)


INT8 = INT8_ATTENTION["CachedAttention"]


def test_other_caches_stay_as_they_are():
    model = model_with_caches()
    before = ops(model)
    assert quantize_caches(model, ()) == 0 and ops(model) == before
    assert all(value.dtype != ir.DataType.INT8 for value in model.graph.inputs)


def test_an_op_that_reads_floats_alone_is_refused():
    model = model_with_caches()
    cache = next(value for value in model.graph.inputs if value.name == "k_cache")
    model.graph.outputs.append(Editor(model).op("GatedDelta", cache, domain=OPS_DOMAIN))
    with pytest.raises(PassError, match="node GatedDelta: got a reader of int8 caches; expected an attention op"):
        quantize_caches(model, CACHES)


def test_the_caches_of_a_target_and_those_borrowed_of_it_are_meant():
    rows = TensorSpec("k_cache.0", ("batch", 2, "max_seq", 8), "float32")
    update = TensorSpec("k_cache.0.updated", rows.dims, "float32")
    target = GraphSpec("target", (rows,), (update,), ("k_cache.0",), tail="verify")
    made = with_int8_caches(target)
    assert [(t.name, t.dtype, t.dims[-1]) for t in made.inputs] == [
        ("k_cache.0", "int8", 8),
        ("k_cache.0.scale", "float32", 1),
    ]
    assert [t.name for t in made.outputs] == ["k_cache.0.updated", "k_cache.0.scale.updated"]
    assert made.caches == made.own_caches == ("k_cache.0", "k_cache.0.scale")
    draft = GraphSpec("draft", (rows,), (update,), ("k_cache.0",), tail="candidates")
    assert int8_cache_names(draft) == () and with_int8_caches(draft) == draft
    sharer = GraphSpec("draft", (rows,), (update,), ("k_cache.0",), borrowed=(BorrowedCache("k_cache.0", "k_cache.7"),))
    refs = with_int8_caches(sharer).borrowed
    assert [(ref.name, ref.cache) for ref in refs] == [
        ("k_cache.0", "k_cache.7"),
        ("k_cache.0.scale", "k_cache.7.scale"),
    ]
