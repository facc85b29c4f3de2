# SPDX-License-Identifier: Apache-2.0
"""x * cos + rotate_half(x) * sin -> RotaryEmbedding, whole heads or their first part (partial rotary).

The traced cos and sin hold every angle twice, [batch, nodes, head_dim]; the operator expects each once, so the doubling
Concat is removed. gpt-oss has each once, and rotates the halves of x apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from speccompile.passes.base import Property, as_pass
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
from speccompile.passes.rules import Rule

_ELEMENTWISE = ("Cos", "Sin", "Cast")


@dataclass(frozen=True)
class _Match:
    node: ir.Node  # whose output is the rotated x
    x: ir.Value  # [batch, heads, nodes, head_dim]
    cos: ir.Value  # [batch, nodes, rotary_dim], every angle twice; half as wide where each is there once
    sin: ir.Value
    rotary_dim: int  # 0: the whole head
    is_once: bool = False  # the angles are halves of a head wide


def _rotated(op: Any, x: Any, cos: Any, sin: Any, cos_axes: Any, sin_axes: Any) -> Any:
    low, high = (op.Slice(x, _allow_other_inputs=True, _outputs=[name]) for name in ("low", "high"))
    rotated_half = op.Concat(op.Neg(high), low, _outputs=["half"])
    return op.Add(op.Mul(x, op.Unsqueeze(cos, cos_axes)), op.Mul(rotated_half, op.Unsqueeze(sin, sin_axes)))


def _is_rope(
    x: ir.Value,
    cos: ir.Value,
    sin: ir.Value,
    cos_axes: ir.Value,
    sin_axes: ir.Value,
    low: ir.Value,
    high: ir.Value,
    half: ir.Value,
) -> bool:
    """Whether x is [batch, heads, nodes, head_dim], halved in its last axis, with angles broadcast over heads."""
    size, concat = static_dim(x, 3), half.producer()
    if rank(x) != 4 or size is None or size % 2 or static_dim(x, 1) is None or concat is None:
        return False
    bounds = slice_bounds(low.producer()), slice_bounds(high.producer())
    is_half = bounds == ((3, 0, size // 2), (3, size // 2, size)) and int_attribute(concat, "axis", 0) in (-1, 3)
    return is_half and ints(cos_axes) == ints(sin_axes) == [1] and _is_doubled(cos) and _is_doubled(sin)


def _rule() -> Rule:
    return Rule(_rotated, _is_rope, root="Add")


def _turned(op: Any, low: Any, high: Any, cos: Any, sin: Any, cos_axes: Any, sin_axes: Any) -> Any:
    c, s = op.Unsqueeze(cos, cos_axes), op.Unsqueeze(sin, sin_axes)
    first, second = op.Sub(op.Mul(low, c), op.Mul(high, s)), op.Add(op.Mul(high, c), op.Mul(low, s))
    return op.Concat(first, second, _outputs=["joined"])


def _is_turned(
    low: ir.Value,
    high: ir.Value,
    cos: ir.Value,
    sin: ir.Value,
    cos_axes: ir.Value,
    sin_axes: ir.Value,
    joined: ir.Value,
) -> bool:
    """Whether low and high are the halves of [batch, heads, nodes, head_dim], and angles are there once."""
    split, concat, half = producer(low, "Split"), joined.producer(), static_dim(low, 3)
    if split is None or concat is None or list(split.outputs) != [low, high] or int_attribute(split, "axis", 0) != 3:
        return False
    is_half = half is not None and static_dim(high, 3) == static_dim(cos, 2) == static_dim(sin, 2) == half
    is_whole = rank(split.inputs[0]) == 4 and static_dim(split.inputs[0], 1) is not None
    axes = ints(cos_axes) == ints(sin_axes) == [1] and int_attribute(concat, "axis", 0) in (-1, 3)
    return is_half and is_whole and axes


def _halves_rule() -> Rule:
    return Rule(_turned, _is_turned, root="Concat")


def _match_halves(rule: Rule, model: ir.Model, node: ir.Node) -> _Match | None:
    found = rule.match(model, node)
    split = None if found is None else found["low"].producer()
    if found is None or split is None or split.inputs[0] is None:
        return None
    return _Match(node, split.inputs[0], found["cos"], found["sin"], 0, is_once=True)


def _is_doubled(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    if node is None or node.domain != "":
        return False
    if node.op_type == "Concat":
        return len(node.inputs) == 2 and node.inputs[0] is node.inputs[1] and int_attribute(node, "axis", 0) in (-1, 2)
    if node.op_type == "Mul":
        return any(_is_doubled(a) and scalar(b) is not None for a, b in operands(node))
    return node.op_type in _ELEMENTWISE and _is_doubled(node.inputs[0])


def _joins(use: ir.Node | None, node: ir.Node, low: ir.Node, rotary_dim: int) -> bool:
    """Whether `use` is concat(rotated, x[rotary_dim:]), where `node` rotates x[:rotary_dim], which `low` cuts."""
    if use is None or use.op_type != "Concat" or len(use.inputs) != 2 or int_attribute(use, "axis", 0) not in (-1, 3):
        return False
    rest = producer(use.inputs[1], "Slice")
    if use.inputs[0] is not node.outputs[0] or rest is None or rest.inputs[0] is not low.inputs[0]:
        return False
    size = static_dim(low.inputs[0], 3)
    return slice_bounds(low) == (3, 0, rotary_dim) and slice_bounds(rest) == (3, rotary_dim, size)


def _match(rule: Rule, model: ir.Model, node: ir.Node) -> _Match | None:
    found = rule.match(model, node)
    if found is None:
        return None
    x, cos, sin = found["x"], found["cos"], found["sin"]
    low, use = producer(x, "Slice"), only_use(node.outputs[0])
    rotary_dim = static_dim(x, 3)
    if low is not None and low.inputs[0] is not None and rotary_dim is not None and _joins(use, node, low, rotary_dim):
        assert use is not None
        return _Match(use, low.inputs[0], cos, sin, rotary_dim)
    return _Match(node, x, cos, sin, 0)


def _halve(model: ir.Model, value: ir.Value, made: dict[ir.Value, ir.Value]) -> ir.Value:
    """Returns the first half of a doubled value, computed without doubling, at the doubled one's position."""
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
    rule = _rule()
    left = next((n for n in model.graph if rule.match(model, n) is not None), None)
    return None if left is None else f"{left.outputs[0].name} is an unfused rotary embedding"


ROPE_FUSED = Property("rope_fused", _find_unfused)


@as_pass(ensures=(ROPE_FUSED,))
def fuse_rope(model: ir.Model) -> int:
    """Fuse every rotary embedding; returns their number."""
    halves: dict[ir.Value, ir.Value] = {}
    rule, once = _rule(), _halves_rule()
    matches = [m for node in model.graph if (m := _match(rule, model, node)) is not None]
    matches += [m for node in model.graph if (m := _match_halves(once, model, node)) is not None]
    for match in matches:
        cos, sin = (v if match.is_once else _halve(model, v, halves) for v in (match.cos, match.sin))
        edit = Editor(model, match.node)
        attributes: dict[str, Any] = {"interleaved": 0, "num_heads": static_dim(match.x, 1)}
        if match.rotary_dim:
            attributes["rotary_embedding_dim"] = match.rotary_dim
        fused = edit.op("RotaryEmbedding", match.x, cos, sin, **attributes)
        fused.type, fused.shape = match.node.outputs[0].type, match.node.outputs[0].shape
        replace_tree(match.node, fused)
    return len(matches)
