# SPDX-License-Identifier: Apache-2.0
"""Sizes of float32 ONNX graphs, and the memory of building them."""

from __future__ import annotations

from speccompile.core.jobs import BuildSizes, WeightCounts

# Bytes of a weight, in the larger one of its kernel forms: a block of 32 has one float32 scale, or two float16 numbers.
_WEIGHT_BYTES = {"none": 4.0, "bf16": 2.0, "int8": 1 + 4 / 32, "int4": 0.5 + 4 / 32, "stored": 1 + 4 / 32}
_WEIGHT_BYTES["auto"] = max(_WEIGHT_BYTES.values())  # not known before it is measured
# In the smaller one: weights that are those of bfloat16 are kept so, and scales are float16.
_LEAST_BYTES = {"none": 2.0, "bf16": 2.0, "int8": 1 + 2 / 32, "int4": 0.5 + 2 / 32, "stored": 0.5 + 2 / 32}
_LEAST_BYTES["auto"] = _LEAST_BYTES["int8"]
# Experts have one form, whose scales are float16.
_EXPERT_BYTES = {"none": 4.0, "bf16": 2.0, "int8": 1 + 2 / 32, "int4": 0.5 + 2 / 32, "stored": 4.0, "auto": 4.0}
_FLOAT_BYTES = 4
_TEXT_BYTES = 2**18  # operators and bodies beside the weights; the most that was seen: 230 kB, of 30 layers
# Beside torch's copy an export holds rewritten tensors (at most 0.3 of the weights) and the libraries themselves.
_EXPORT_FACTOR, _LIBRARY_BYTES = 2.3, 700 * 2**20


def predict_float32(
    counts: WeightCounts, quantization: str, *, packs_experts: bool = True, ties: bool = False
) -> BuildSizes:
    """Predicts a graph for ONNX Runtime or the reference evaluator.

    Args:
        quantization: none, bf16, int8, int4, stored or auto.
        packs_experts: experts are quantised as linears are; False: they stay float32.
        ties: an embedding that is tied to the LM head is stored once, as the head.
    """
    experts_bytes = counts.num_experts * (_EXPERT_BYTES[quantization] if packs_experts else _FLOAT_BYTES)
    linear_bytes = (counts.num_linear - counts.num_experts) * _WEIGHT_BYTES[quantization]
    num_own = 0 if counts.is_tied else min(counts.num_head, counts.num_plain)
    # An embedding that is not the head's has 8 bits beside quantised linears, else 2 bytes at least.
    num_other = max(counts.num_plain - counts.num_head, 0)
    num_floats = num_other if ties and counts.is_tied else counts.num_plain
    weights_bytes = int(linear_bytes + experts_bytes) + _FLOAT_BYTES * num_floats
    table_bytes = (_LEAST_BYTES["int8"] if quantization in ("int8", "int4") else 2) * num_own
    least_bytes = int(counts.num_linear * _LEAST_BYTES[quantization] + table_bytes) + _FLOAT_BYTES * num_other
    export_bytes = int(counts.num_params * _FLOAT_BYTES * _EXPORT_FACTOR) + _LIBRARY_BYTES
    least_bytes = min(least_bytes, weights_bytes)
    return BuildSizes(weights_bytes, weights_bytes + _TEXT_BYTES, export_bytes, least_file_bytes=least_bytes)
