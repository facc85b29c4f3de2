# SPDX-License-Identifier: Apache-2.0
"""x / sqrt(mean(x^2) + epsilon) * weight -> RMSNormalization, over the last axis.

The weight may be a vector, or absent (then it is ones).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from speccompile.passes.base import Pass, Property
from speccompile.passes.edit import Editor
from speccompile.passes.match import (
    int_attribute,
    ints,
    only_use,
    operands,
    producer,
    rank,
    replace_tree,
    scalar,
    static_dim,
)


@dataclass(frozen=True)
class _Match:
    x: ir.Value
    epsilon: float
    normed: ir.Node  # the Mul of x and the reciprocal root
    scaled: ir.Node | None  # the Mul by the weight
    weight: ir.Value | None


def _square_of(value: ir.Value | None) -> ir.Value | None:
    if (power := producer(value, "Pow")) is not None:
        return power.inputs[0] if scalar(power.inputs[1]) == 2.0 else None
    product = producer(value, "Mul")
    return product.inputs[0] if product is not None and product.inputs[0] is product.inputs[1] else None


def _mean_square(value: ir.Value) -> ir.Value | None:
    """X where `value` is mean(x^2) over the last axis, kept as an axis of size 1."""
    mean = producer(value, "ReduceMean")
    if mean is None or int_attribute(mean, "keepdims", 1) != 1 or len(mean.inputs) != 2:
        return None
    x = _square_of(mean.inputs[0])
    return x if x is not None and ints(mean.inputs[1]) in ([-1], [(rank(x) or 0) - 1]) else None


def _reciprocal_root(node: ir.Node) -> ir.Value | None:
    """V where `node` computes 1 / sqrt(v)."""
    if node.op_type == "Reciprocal":
        root = producer(node.inputs[0], "Sqrt")
        return None if root is None else root.inputs[0]
    return node.inputs[0] if node.op_type == "Pow" and scalar(node.inputs[1]) == -0.5 else None


def _weight_of(normed: ir.Node, size: int) -> tuple[ir.Node | None, ir.Value | None]:
    use = only_use(normed.outputs[0])
    if use is not None and use.op_type == "Mul" and use.domain == "":
        for operand, other in operands(use):
            is_vector = other.is_initializer() and other.shape is not None and tuple(other.shape) == (size,)
            if operand is normed.outputs[0] and is_vector:
                return use, other
    return None, None


def _match(node: ir.Node) -> _Match | None:
    if node.domain != "" or node.op_type not in ("Reciprocal", "Pow"):
        return None
    for mean, offset in operands(producer(_reciprocal_root(node), "Add")):
        x, epsilon, product = _mean_square(mean), scalar(offset), only_use(node.outputs[0])
        size = static_dim(x, -1)
        if x is None or size is None or epsilon is None or product is None or x.dtype != ir.DataType.FLOAT:
            continue
        if product.op_type == "Mul" and any(a is x and b is node.outputs[0] for a, b in operands(product)):
            scaled, weight = _weight_of(product, size)
            return _Match(x, epsilon, product, scaled, weight)
    return None


def fuse_rms_norm(model: ir.Model) -> int:
    """Fuse every RMS normalisation; returns their number."""
    count = 0
    for node in list(model.graph):
        # Each is matched when its turn comes: what it normalises may be a norm that was fused before it.
        match = _match(node) if node.graph is not None else None
        if match is None:
            continue
        count += 1
        last = match.scaled or match.normed
        edit = Editor(model, last)
        size = static_dim(match.x, -1)
        assert size is not None
        weight = match.weight or edit.const(np.ones(size, np.float32), f"ones.{size}")
        fused = edit.op("RMSNormalization", match.x, weight, axis=-1, epsilon=match.epsilon, stash_type=1)
        fused.type, fused.shape = last.outputs[0].type, last.outputs[0].shape
        replace_tree(last, fused)
    return count


def _find_unfused(model: ir.Model) -> str | None:
    left = next((n for n in model.graph if _match(n) is not None), None)
    return None if left is None else f"{left.outputs[0].name} is an RMS normalisation in pieces"


RMS_NORM_FUSED = Property("rms_norm_fused", _find_unfused)
FUSE_RMS_NORM = Pass("fuse_rms_norm", fuse_rms_norm, ensures=(RMS_NORM_FUSED,))
