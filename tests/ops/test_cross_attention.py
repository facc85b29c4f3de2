# SPDX-License-Identifier: Apache-2.0
"""The twin of RotaryCrossAttention against its definition, and the function body against the twin."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from speccompile.backends.onnxruntime.attention_cases import AttentionSizes, cross_attributes, cross_inputs
from speccompile.ops.cross_attention import ROTARY_CROSS_ATTENTION
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
def test_twin_and_body_follow_the_definition(sizes: AttentionSizes, interleaved: int) -> None:
    inputs = cross_inputs(sizes, np.random.default_rng(sizes.nodes))
    attributes = cross_attributes(sizes, interleaved)
    (expected,) = ROTARY_CROSS_ATTENTION.twin(*inputs.values(), **attributes)
    np.testing.assert_allclose(expected, naive_cross(inputs, attributes), atol=TOLERANCE)
    model = model_of("RotaryCrossAttention", **attributes)
    for got in (session_of(model).run(None, inputs), ReferenceEvaluator(model).run(None, inputs)):
        np.testing.assert_allclose(got[0], expected, atol=TOLERANCE)
