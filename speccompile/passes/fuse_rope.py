# SPDX-License-Identifier: Apache-2.0
"""x * cos + rotate_half(x) * sin -> RotaryEmbedding, whole heads or their first part (partial rotary).

The traced cos and sin hold every angle twice, [batch, nodes, head_dim]; the operator wants each once, so the
doubling Concat goes and Cos and Sin shrink to half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    slice_bounds,
    static_dim,
)

_ELEMENTWISE = ("Cos", "Sin", "Cast")


@dataclass(frozen=True)
class _Match:
    node: ir.Node  # whose output is the rotated x
    x: ir.Value  # [batch, heads, nodes, head_dim]
    cos: ir.Value  # [batch, nodes, rotary_dim], every angle twice
    sin: ir.Value
    rotary_dim: int  # 0: the whole head


def _rotated_half(value: ir.Value) -> ir.Value | None:
    """X where `value` is concat(-x[half:], x[:half]) over the last axis of rank 4."""
    concat = producer(value, "Concat")
    if concat is None or len(concat.inputs) != 2 or int_attribute(concat, "axis", 0) not in (-1, 3):
        return None
    negated, low = producer(concat.inputs[0], "Neg"), producer(concat.inputs[1], "Slice")
    high = producer(negated.inputs[0], "Slice") if negated is not None else None
    if low is None or high is None or low.inputs[0] is not high.inputs[0]:
        return None
    x = low.inputs[0]
    size = static_dim(x, 3)
    if x is None or size is None or size % 2 or rank(x) != 4:
        return None
    if slice_bounds(low) == (3, 0, size // 2) and slice_bounds(high) == (3, size // 2, size):
        return x
    return None


def _broadcast_of(value: ir.Value) -> ir.Value | None:
    """The [batch, nodes, dim] tensor that `value` spreads over the heads."""
    node = producer(value, "Unsqueeze")
    return node.inputs[0] if node is not None and ints(node.inputs[1]) == [1] else None


def _is_doubled(value: ir.Value | None) -> bool:
    """Whether `value` is an elementwise function of concat(f, f), so that `_halve` can act on it."""
    node = None if value is None else value.producer()
    if node is None or node.domain != "":
        return False
    if node.op_type == "Concat":
        return len(node.inputs) == 2 and node.inputs[0] is node.inputs[1] and int_attribute(node, "axis", 0) in (-1, 2)
    if node.op_type == "Mul":
        return any(_is_doubled(a) and scalar(b) is not None for a, b in operands(node))
    return node.op_type in _ELEMENTWISE and _is_doubled(node.inputs[0])


def _match_whole(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    if node.op_type != "Add" or node.domain != "":
        return None
    for left, right in operands(node):
        for x, cos_4d in operands(producer(left, "Mul")):
            for half, sin_4d in operands(producer(right, "Mul")):
                cos, sin = _broadcast_of(cos_4d), _broadcast_of(sin_4d)
                if cos is None or sin is None or _rotated_half(half) is not x or static_dim(x, 1) is None:
                    continue
                if _is_doubled(cos) and _is_doubled(sin):
                    return x, cos, sin
    return None


def _joins(use: ir.Node | None, node: ir.Node, low: ir.Node, rotary_dim: int) -> bool:
    """Whether `use` is concat(rotated, x[rotary_dim:]), where `node` rotates x[:rotary_dim], which `low` cuts."""
    if use is None or use.op_type != "Concat" or len(use.inputs) != 2 or int_attribute(use, "axis", 0) not in (-1, 3):
        return False
    rest = producer(use.inputs[1], "Slice")
    if use.inputs[0] is not node.outputs[0] or rest is None or rest.inputs[0] is not low.inputs[0]:
        return False
    size = static_dim(low.inputs[0], 3)
    return slice_bounds(low) == (3, 0, rotary_dim) and slice_bounds(rest) == (3, rotary_dim, size)


def _match(node: ir.Node) -> _Match | None:
    found = _match_whole(node)
    if found is None:
        return None
    x, cos, sin = found
    low, use = producer(x, "Slice"), only_use(node.outputs[0])
    rotary_dim = static_dim(x, 3)
    if low is not None and low.inputs[0] is not None and rotary_dim is not None and _joins(use, node, low, rotary_dim):
        assert use is not None
        return _Match(use, low.inputs[0], cos, sin, rotary_dim)
    return _Match(node, x, cos, sin, 0)


def fuse_rope(model: ir.Model) -> int:
    """Fuse every rotary embedding; returns their number."""
    halves: dict[ir.Value, ir.Value] = {}
    matches = [m for m in map(_match, model.graph) if m is not None]
    for match in matches:
        cos, sin = (_halve(model, v, halves) for v in (match.cos, match.sin))
        edit = Editor(model, match.node)
        attributes: dict[str, Any] = {"interleaved": 0, "num_heads": static_dim(match.x, 1)}
        if match.rotary_dim:
            attributes["rotary_embedding_dim"] = match.rotary_dim
        fused = edit.op("RotaryEmbedding", match.x, cos, sin, **attributes)
        fused.type, fused.shape = match.node.outputs[0].type, match.node.outputs[0].shape
        replace_tree(match.node, fused)
    return len(matches)


def _halve(model: ir.Model, value: ir.Value, made: dict[ir.Value, ir.Value]) -> ir.Value:
    """The first half of a doubled value, computed without doubling; placed where the doubled one is."""
    if value in made:
        return made[value]
    node = value.producer()
    assert node is not None
    if node.op_type == "Concat":
        half = node.inputs[0]
        assert half is not None
    else:
        inputs = [_halve(model, v, made) if _is_doubled(v) else v for v in node.inputs if v is not None]
        attributes = {k: a.value for k, a in node.attributes.items()}
        half = Editor(model, node).op(node.op_type, *inputs, **attributes)
        half.type = value.type
        size = static_dim(value, -1)
        if value.shape is not None and size is not None:
            half.shape = ir.Shape([*value.shape.dims[:-1], size // 2])
    made[value] = half
    return half


def _find_unfused(model: ir.Model) -> str | None:
    left = next((n for n in model.graph if _match_whole(n) is not None), None)
    return None if left is None else f"{left.outputs[0].name} is a rotary embedding in pieces"


ROPE_FUSED = Property("rope_fused", _find_unfused)
FUSE_ROPE = Pass("fuse_rope", fuse_rope, ensures=(ROPE_FUSED,))
