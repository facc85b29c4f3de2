# SPDX-License-Identifier: Apache-2.0
"""Split -> heads -> norm -> rotary embedding -> CachedAttention -> rows becomes one QkvAttention op.

Some fifteen nodes a layer become one. A CachedAttention whose surroundings differ is left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from speccompile.core.specs import IMAGE_NODES, LENGTHS, TREE_MASK
from speccompile.ops.qkv_attention import QKV_ATTENTION
from speccompile.passes.base import as_pass
from speccompile.passes.edit import OPS_DOMAIN, Editor, input_of, nodes_of, replace
from speccompile.passes.match import int_attribute, ints, producer, rank, static_dim
from speccompile.passes.merge_heads import TO_HEADS
from speccompile.passes.rules import Rule


@dataclass(frozen=True)
class Norm:
    """An RMS norm of each head."""

    gamma: ir.Value
    epsilon: float


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding by constant tables."""

    cos: ir.Value
    sin: ir.Value
    positions: ir.Value
    rotary_dim: int
    interleaved: int


@dataclass(frozen=True)
class Heads:
    """Heads of Q, K or V, and how they come from columns of a merged product."""

    rows: ir.Value
    num: int
    head_dim: int
    norm: Norm | None
    rotary: Rotary | None


@dataclass(frozen=True)
class _Match:
    node: ir.Node
    split: ir.Node
    first: int  # Q is this output of `split`, K and V are the next ones
    q: Heads
    k: Heads


def _rotary(node: ir.Node) -> Rotary | None:
    if len(node.inputs) != 4:
        return None
    _, cos, sin, positions = node.inputs
    if cos is None or sin is None or positions is None or not (cos.is_initializer() and sin.is_initializer()):
        return None
    if rank(cos) != 2 or rank(sin) != 2:
        return None
    rotary_dim = int_attribute(node, "rotary_embedding_dim", 0)
    return Rotary(cos, sin, positions, rotary_dim, int_attribute(node, "interleaved", 0))


def _norm(node: ir.Node, head_dim: int) -> Norm | None:
    gamma = node.inputs[1] if len(node.inputs) == 2 else None
    axis = int_attribute(node, "axis", -1)
    if gamma is None or axis not in (-1, 3) or rank(gamma) != 1 or static_dim(gamma, 0) != head_dim:
        return None
    epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
    return Norm(gamma, epsilon)


def heads_of(value: ir.Value | None) -> Heads | None:
    """Follows a [batch, heads, nodes, head_dim] input of an attention op up to the rows that it is cut from."""
    num, head_dim = static_dim(value, 1), static_dim(value, 3)
    if num is None or head_dim is None:
        return None
    rotary, norm = None, None
    node = producer(value, "RotaryEmbedding")
    if node is not None:
        rotary = _rotary(node)
        if rotary is None:
            return None
        value = node.inputs[0]
    for step in ("RMSNormalization", "Transpose", "RMSNormalization", "Reshape"):
        node = producer(value, step)
        if node is None:
            if step == "RMSNormalization":
                continue
            return None
        if step == "RMSNormalization":
            norm = _norm(node, head_dim) if norm is None else None
            if norm is None:
                return None
        if step == "Transpose" and tuple(node.attributes["perm"].as_ints()) != TO_HEADS:
            return None
        if step == "Reshape" and ints(node.inputs[1]) != [0, 0, num, head_dim]:
            return None
        value = node.inputs[0]
    return None if value is None else Heads(value, num, head_dim, norm, rotary)


def _positions_rule(has_images: bool) -> Rule:
    def formula(op: Any, lengths: Any, tree_mask: Any, second: Any, third: Any) -> Any:
        seen = op.Cast(tree_mask)
        count = op.ReduceSum(op.Trilu(seen, 0, upper=0) if has_images else seen, third, _outputs=["count"])
        return op.Add(op.Unsqueeze(lengths, second), op.Sub(count, 1))

    def holds(lengths: ir.Value, tree_mask: ir.Value, second: ir.Value, third: ir.Value, count: ir.Value) -> bool:
        is_input = lengths.name == LENGTHS and tree_mask.name == TREE_MASK
        node = count.producer()
        is_flat = node is not None and int_attribute(node, "keepdims", 1) == 0
        return is_input and is_flat and ints(second) == [1] and ints(third) in ([2], [-1])

    return Rule(formula, holds, root="Add")


def _are_positions(rule: Rule, model: ir.Model, value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and rule.match(model, node) is not None


def _match(rule: Rule, model: ir.Model, node: ir.Node) -> _Match | None:
    q, k, v = (heads_of(value) for value in node.inputs[:3])
    if q is None or k is None or v is None or v.norm is not None or v.rotary is not None:
        return None
    if (k.num, k.head_dim) != (v.num, v.head_dim) or q.rotary != k.rotary or (q.norm is None) != (k.norm is None):
        return None
    if q.norm is not None and k.norm is not None and q.norm.epsilon != k.norm.epsilon:
        return None
    if q.rotary is not None and not _are_positions(rule, model, q.rotary.positions):
        return None
    lengths, mask = node.inputs[5:7]
    split = producer(q.rows, "Split")
    if split is None or lengths is not input_of(model, LENGTHS) or mask is not input_of(model, TREE_MASK):
        return None
    first = q.rows.index()
    parts = list(split.outputs)[first : first + 3] if first is not None else []
    if (
        first is None
        or len(parts) != 3
        or any(a is not b for a, b in zip(parts, (q.rows, k.rows, v.rows), strict=True))
    ):
        return None
    if int_attribute(split, "axis", 0) not in (-1, 2) or rank(q.rows) != 3:
        return None
    widths = [static_dim(part, 2) for part in parts]
    return None if widths != [h.num * h.head_dim for h in (q, k, v)] else _Match(node, split, first, q, k)


def _merged_rows(model: ir.Model, match: _Match) -> ir.Value:
    """Returns the rows of Q, K and V beside each other: the input of the Split, or a part of it."""
    split, outputs = match.split, list(match.split.outputs)
    whole = split.inputs[0]
    assert whole is not None
    if len(outputs) == 3:
        return whole
    edit = Editor(model, split)
    before, merged, after = outputs[: match.first], outputs[match.first : match.first + 3], outputs[match.first + 3 :]
    widths = [static_dim(part, 2) or 0 for part in outputs]
    total = sum(widths[match.first : match.first + 3])
    sizes = [*widths[: match.first], total, *widths[match.first + 3 :]]
    parts = edit.op("Split", whole, edit.ints(sizes), axis=-1, num_outputs=len(sizes))
    for old, new in zip([*before, *after], [*parts[: match.first], *parts[match.first + 1 :]], strict=True):
        new.type, new.shape = old.type, old.shape
        old.replace_all_uses_with(new)
    rows: ir.Value = parts[match.first]
    rows.type = merged[0].type
    return rows


def _fuse(model: ir.Model, match: _Match, num_rows: ir.Value) -> None:
    node, q, k = match.node, match.q, match.k
    edit = Editor(model, node)
    k_cache, v_cache, lengths, mask = node.inputs[3:7]
    inputs: list[ir.Value | None] = [_merged_rows(model, match)]
    attributes: dict[str, Any] = {"num_heads": q.num, "num_kv_heads": k.num, "head_dim": q.head_dim}
    attributes |= {name: attribute.value for name, attribute in node.attributes.items()}
    if q.norm is not None and k.norm is not None:
        inputs += [q.norm.gamma, k.norm.gamma]
        attributes["epsilon"] = q.norm.epsilon
    if q.rotary is not None:
        inputs += [q.rotary.cos, q.rotary.sin]
        attributes |= {"rotary_dim": q.rotary.rotary_dim, "interleaved": q.rotary.interleaved}
    op = QKV_ATTENTION[q.norm is not None, q.rotary is not None]
    inputs += [k_cache, v_cache, lengths, mask, num_rows]
    rows, k_updated, v_updated = edit.op(op.name, *inputs, domain=OPS_DOMAIN, num_outputs=3, **attributes)
    out = node.outputs[0]
    rows.type = out.type
    width, heads = q.num * q.head_dim, rows
    for use in [use.node for use in out.uses()]:
        if use.op_type == "Reshape" and ints(use.inputs[1]) in ([0, 0, width], [0, 0, -1]):
            rows.shape = use.outputs[0].shape
            replace(use, rows)
    if out.uses() or out.is_graph_output():
        heads = edit.op("Reshape", rows, edit.ints([0, 0, q.num, q.head_dim]))
        heads.type, heads.shape = out.type, out.shape
    replace(node, heads, k_updated, v_updated)


@as_pass()
def fuse_qkv_attention(model: ir.Model) -> int:
    """Fuses every CachedAttention whose Q, K and V are cut from one product; returns their number."""
    rule = _positions_rule(any(value.name == IMAGE_NODES for value in model.graph.inputs))
    nodes = nodes_of(model, "CachedAttention", OPS_DOMAIN)
    matches = [m for node in nodes if (m := _match(rule, model, node)) is not None]
    made: dict[str, ir.Value] = {}
    for match in matches:
        cache = match.node.inputs[3]
        assert cache is not None and cache.shape is not None
        rows = str(cache.shape[2])  # caches of one graph that have this dim in common have as many rows
        if rows not in made:
            made[rows] = Editor(model, matches[0].node).op("Shape", cache, start=2, end=3)
        _fuse(model, match, made[rows])
    return len(matches)
