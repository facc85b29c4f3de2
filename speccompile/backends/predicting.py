# SPDX-License-Identifier: Apache-2.0
"""Sizes of float32 ONNX graphs, and the memory of building them."""

from __future__ import annotations

from speccompile.core.jobs import BuildSizes, WeightCounts

# Bytes of a weight, in the larger one of its kernel forms: a block of 32 has one float32 scale.
_WEIGHT_BYTES = {"none": 4.0, "int8": 1 + 4 / 32, "int4": 0.5 + 4 / 32}
_WEIGHT_BYTES["auto"] = max(_WEIGHT_BYTES.values())  # not known before it is measured
_FLOAT_BYTES = 4
# Beside torch's copy an export holds rewritten tensors (at most 0.3 of the weights) and the libraries themselves.
_EXPORT_FACTOR, _LIBRARY_BYTES = 2.3, 700 * 2**20


def predict_float32(counts: WeightCounts, quantization: str) -> BuildSizes:
    """Predict a graph for ONNX Runtime or the reference evaluator; quantization is none, int8, int4 or auto."""
    weights_bytes = int(counts.num_linear * _WEIGHT_BYTES[quantization]) + _FLOAT_BYTES * counts.num_plain
    export_bytes = int(counts.num_params * _FLOAT_BYTES * _EXPORT_FACTOR) + _LIBRARY_BYTES
    return BuildSizes(weights_bytes, weights_bytes, export_bytes)
