# SPDX-License-Identifier: Apache-2.0
"""x / sqrt(mean(x^2) + epsilon) * weight -> RMSNormalization, over the last axis; without a weight it is ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from speccompile.passes.base import Property, as_pass
from speccompile.passes.edit import Editor
from speccompile.passes.match import int_attribute, ints, only_use, operands, rank, replace_tree, scalar, static_dim
from speccompile.passes.rules import Rule, either


@dataclass(frozen=True)
class _Match:
    x: ir.Value
    epsilon: float
    last: ir.Node  # the Mul by the weight, or of x and the reciprocal root
    weight: ir.Value | None


def _normed(op: Any, x: Any, epsilon: Any, axes: Any) -> Any:
    square = either([op.Pow(x, 2.0), op.Mul(x, x)])
    mean_square = op.Add(op.ReduceMean(square, axes, _outputs=["mean"]), epsilon)
    inverse = either([op.Reciprocal(op.Sqrt(mean_square)), op.Pow(mean_square, -0.5)])
    return op.Mul(x, inverse)


def _is_norm(x: ir.Value, epsilon: ir.Value, axes: ir.Value, mean: ir.Value) -> bool:
    node = mean.producer()
    assert node is not None
    is_last = ints(axes) in ([-1], [(rank(x) or 0) - 1]) and int_attribute(node, "keepdims", 1) == 1
    is_sized = static_dim(x, -1) is not None and x.dtype == ir.DataType.FLOAT
    return is_last and is_sized and scalar(epsilon) is not None


def _rule() -> Rule:
    return Rule(_normed, _is_norm, root="Mul")


def _weight_of(normed: ir.Node, size: int) -> tuple[ir.Node | None, ir.Value | None]:
    use = only_use(normed.outputs[0])
    if use is not None and use.op_type == "Mul" and use.domain == "":
        for operand, other in operands(use):
            is_vector = other.is_initializer() and other.shape is not None and tuple(other.shape) == (size,)
            if operand is normed.outputs[0] and is_vector:
                return use, other
    return None, None


def _match(rule: Rule, model: ir.Model, node: ir.Node) -> _Match | None:
    found = rule.match(model, node)
    if found is None:
        return None
    size, epsilon = static_dim(found["x"], -1), scalar(found["epsilon"])
    assert size is not None and epsilon is not None
    scaled, weight = _weight_of(node, size)
    return _Match(found["x"], epsilon, scaled or node, weight)


def _find_unfused(model: ir.Model) -> str | None:
    rule = _rule()
    left = next((n for n in model.graph if rule.match(model, n) is not None), None)
    return None if left is None else f"{left.outputs[0].name} is an unfused RMS normalisation"


RMS_NORM_FUSED = Property("rms_norm_fused", _find_unfused)


@as_pass(ensures=(RMS_NORM_FUSED,))
def fuse_rms_norm(model: ir.Model) -> int:
    """Fuse every RMS normalisation; returns their number."""
    count, rule = 0, _rule()
    for node in list(model.graph):
        # Each is matched in order: its input may be a norm that was fused before it.
        match = _match(rule, model, node) if node.graph is not None else None
        if match is None:
            continue
        count += 1
        edit = Editor(model, match.last)
        size = static_dim(match.x, -1)
        assert size is not None
        weight = match.weight or edit.const(np.ones(size, np.float32), f"ones.{size}")
        fused = edit.op("RMSNormalization", match.x, weight, axis=-1, epsilon=match.epsilon, stash_type=1)
        fused.type, fused.shape = match.last.outputs[0].type, match.last.outputs[0].shape
        replace_tree(match.last, fused)
    return count
