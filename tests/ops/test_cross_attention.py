# SPDX-License-Identifier: Apache-2.0
"""Attention to caches that others write: twins against their definition, and function bodies against the twins."""

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from speccompile.backends.onnxruntime.attention_cases import (
    AttentionSizes,
    attention_inputs,
    cross_attributes,
    cross_inputs,
)
from speccompile.ops.cached_attention import CACHED_ATTENTION, SHARED_ATTENTION
from speccompile.ops.cross_attention import CROSS_ATTENTION, ROTARY_CROSS_ATTENTION
from tests.ops.op_lab import model_of, session_of
from tests.ops.qkv_lab import naive_cross

TOLERANCE = 3e-6  # of outputs of size 1: float32 sums in another order
SIZES = [
    AttentionSizes(),
    AttentionSizes(batch=1, nodes=1, num_kv_heads=1, group=1, head_dim=6, max_seq=1, rotary_dim=6),
    AttentionSizes(batch=3, nodes=5, num_kv_heads=1, group=4, head_dim=10, max_seq=31, rotary_dim=4),
]


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_twin_and_body_follow_the_definition(sizes, interleaved):
    inputs = cross_inputs(sizes, np.random.default_rng(sizes.nodes))
    attributes = cross_attributes(sizes, interleaved)
    (expected,) = ROTARY_CROSS_ATTENTION.twin(*inputs.values(), **attributes)
    np.testing.assert_allclose(expected, naive_cross(inputs, attributes), atol=TOLERANCE)
    model = model_of("RotaryCrossAttention", **attributes)
    for got in (session_of(model).run(None, inputs), ReferenceEvaluator(model).run(None, inputs)):
        np.testing.assert_allclose(got[0], expected, atol=TOLERANCE)


def test_a_window_leaves_the_last_rows_below_the_limit():
    sizes = AttentionSizes()
    inputs = cross_inputs(sizes, np.random.default_rng(4))
    given = {name: inputs[name] for name in ("k_cache", "v_cache", "limits")}
    shape = (sizes.batch, sizes.num_heads, sizes.nodes, sizes.head_dim)
    given = {"q": np.random.default_rng(5).standard_normal(shape).astype(np.float32), **given}
    (got,) = CROSS_ATTENTION.twin(*given.values(), scale=0.3, window=4)
    for slot, limits in enumerate(given["limits"]):
        for node, limit in enumerate(limits):
            rows = [given[name][slot : slot + 1, :, max(0, limit - 4) : limit] for name in ("k_cache", "v_cache")]
            q = given["q"][slot : slot + 1, :, node : node + 1]
            (alone,) = CROSS_ATTENTION.twin(q, *rows, np.array([[rows[0].shape[2]]]), scale=0.3)
            np.testing.assert_allclose(got[slot, node], alone[0, 0], atol=TOLERANCE)
    (body,) = session_of(model_of("CrossAttention", scale=0.3, window=4)).run(None, given)
    np.testing.assert_allclose(body, got, atol=TOLERANCE)


@pytest.mark.parametrize("window", [0, 3])
def test_shared_attention_reads_what_another_layer_wrote(window):
    attributes = {"scale": 0.3, "softcap": 2.0, "window": window}
    inputs = attention_inputs(CACHED_ATTENTION, AttentionSizes(), np.random.default_rng(6), np.array([0, 30]))
    expected, k_cache, v_cache = CACHED_ATTENTION.twin(*inputs.values(), **attributes)
    given = {t.name: inputs[t.name] for t in SHARED_ATTENTION.inputs} | {"k_cache": k_cache, "v_cache": v_cache}
    (twin,) = SHARED_ATTENTION.twin(*given.values(), **attributes)
    np.testing.assert_array_equal(twin, expected)
    (body,) = session_of(model_of("SharedAttention", **attributes)).run(None, given)
    np.testing.assert_allclose(body, expected, atol=TOLERANCE)
