# SPDX-License-Identifier: Apache-2.0
"""Predicts the bytes of a plan's weights from counts alone. Kernels are additional, for each profile.

The forms are those of the lowering: embeddings in the graph's dtype, linear layers quantised, an LM head in int8
under int4 as well, and an LM head that is tied to the embedding stored once where nothing is quantised.
"""

from __future__ import annotations

from speccompile.core.dims import DTYPE_BYTES
from speccompile.core.jobs import STORED, BuildSizes, WeightCounts

MIB = 2**20
INT4_BLOCK = 128  # inputs that share a scale, where it divides their number


def predicted_weight_bytes(
    counts: WeightCounts, quantization: str, dtype: str, *, num_head: int = 0, is_tied: bool = False
) -> int:
    """Returns the bytes of the weights in a plan.

    Scales of channels, and the additional bytes of float32 norms and rotary tables, are not counted: less than one
    percent from a hidden size of 256 on.

    Args:
        quantization: none, int8, int4, fp8 or stored, of which a byte a weight is taken.
        dtype: of the graph: float32, float16 or bfloat16.
        num_head: weights of the LM head, counted in `counts.num_linear`; 0: there is none.
    """
    scalar = DTYPE_BYTES[dtype]
    linear = {"none": float(scalar), "int8": 1.0, "fp8": 1.0, "int4": 0.5 + scalar / INT4_BLOCK, "stored": 1.0}[
        quantization
    ]
    head = 0.0 if is_tied and quantization == "none" else max(linear, 1.0)
    num_body = counts.num_linear - num_head - counts.num_experts
    expert = {"none": float(scalar), "int8": 1.0, "fp8": 1.0, "int4": 0.5, "stored": float(scalar)}[quantization]
    if quantization not in ("none", STORED):
        expert += scalar / INT4_BLOCK  # their int8 has blocks too
    return int(num_body * linear + num_head * head + counts.num_experts * expert + counts.num_plain * scalar)


# Measured with TensorRT-RTX 1.7.1 by bench/tensorrt_memory.py: random Llamas of hidden 1024 to 5120, two layers, two
# profiles. A builder's process holds a constant and a multiple of the lowered weights, one of them the mapped file,
# which the kernel may drop when memory is short.
_BUILDER_FACTOR = {"none": 2.46, "int8": 1.99, "int4": 2.18, "fp8": 1.99, "stored": 2.46}
_BUILDER_BYTES, _PARENT_BYTES, _KERNEL_BYTES = 550 * MIB, 680 * MIB, 30 * MIB
# The export of a checkpoint of two bytes a weight holds six (four from random weights); lowering holds 4.5 to 6.2.
_EXPORT_BYTES_PER_PARAM = {"none": 6.0, "int8": 6.0, "int4": 6.21, "fp8": 6.0, "stored": 6.21}
_EXPORT_BYTES = {"none": 620 * MIB, "int8": 750 * MIB, "int4": 880 * MIB, "fp8": 750 * MIB, "stored": 880 * MIB}


def predict_sizes(counts: WeightCounts, quantization: str, dtype: str) -> BuildSizes:
    """Predict a plan and the memory of its build; the builder's peak includes the parent's memory."""
    num_head, is_tied = counts.num_head, counts.is_tied
    weights = predicted_weight_bytes(counts, quantization, dtype, num_head=num_head, is_tied=is_tied)
    builder = int(weights * _BUILDER_FACTOR[quantization]) + _BUILDER_BYTES + _PARENT_BYTES
    export = int(counts.num_params * _EXPORT_BYTES_PER_PARAM[quantization]) + _EXPORT_BYTES[quantization]
    return BuildSizes(weights, weights + _KERNEL_BYTES, export, builder)
