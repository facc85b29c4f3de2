# SPDX-License-Identifier: Apache-2.0
"""Predicted bytes of weights: the arithmetic, and the example target's own figures."""

import pytest

from speccompile.backends.tensorrt.backend import predicted_weight_bytes
from speccompile.core.jobs import WeightCounts

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
