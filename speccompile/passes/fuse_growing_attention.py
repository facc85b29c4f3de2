# SPDX-License-Identifier: Apache-2.0
"""Attention to keys that grow with each step within one run -> RotaryQkvAttention over a small cache of its own.

Heads, rotary embedding by constants, concatenated and repeated keys and values, scores and softmax, some forty nodes a
layer and token, become one node, which writes its row after those before. Tokens of a step form a chain; attention
under any other mask, as in trees, is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from speccompile.ops.qkv_attention import QKV_ATTENTION
from speccompile.passes.base import as_pass
from speccompile.passes.edit import OPS_DOMAIN, Editor, nodes_of, replace
from speccompile.passes.match import constant, int_attribute, ints, producer, scalar, slice_bounds, static_dim
from speccompile.passes.merge_heads import TO_HEADS
from speccompile.passes.rules import Rule

_TO_COLUMNS = (0, 1, 3, 2)


@dataclass(frozen=True)
class _Heads:
    """Heads of a step, [batch, num, nodes, head_dim], cut from a part of a merged product and perhaps rotated."""

    part: ir.Value
    num: int
    nodes: int
    head_dim: int
    cos: ir.Value | None = None
    sin: ir.Value | None = None


@dataclass(frozen=True)
class _Match:
    """One attention; `splits` cut Q, K and V of the steps up to its own."""

    node: ir.Node  # a Reshape to the rows of the output product
    splits: tuple[ir.Node, ...]
    nodes: tuple[int, ...]  # tokens of each step
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    angles: tuple[tuple[ir.Value, ir.Value], ...]  # cosines and sines of each step, [1, 1, nodes, head_dim / 2]


def _turned(op: Any, x: Any, cos: Any, sin: Any) -> Any:
    low, high = (op.Slice(x, _allow_other_inputs=True, _outputs=[name]) for name in ("low", "high"))
    first, second = op.Sub(op.Mul(low, cos), op.Mul(high, sin)), op.Add(op.Mul(high, cos), op.Mul(low, sin))
    return op.Concat(first, second, _outputs=["joined"])


def _is_turned(x: ir.Value, cos: ir.Value, sin: ir.Value, low: ir.Value, high: ir.Value, joined: ir.Value) -> bool:
    (nodes, size), concat = (static_dim(x, axis) for axis in (2, 3)), joined.producer()
    if size is None or size % 2 or concat is None or int_attribute(concat, "axis", 0) not in (-1, 3):
        return False
    tables = [constant(value) for value in (cos, sin)]
    has_row_each = all(table is not None and table.shape == (1, 1, nodes, size // 2) for table in tables)
    bounds = slice_bounds(low.producer()), slice_bounds(high.producer())
    return has_row_each and bounds == ((3, 0, size // 2), (3, size // 2, size))


def _heads(rule: Rule, model: ir.Model, value: ir.Value | None) -> _Heads | None:
    num, nodes, head_dim = (static_dim(value, axis) for axis in (1, 2, 3))
    if value is None or num is None or nodes is None or head_dim is None:
        return None
    node = value.producer()
    found = rule.match(model, node) if node is not None else None
    transpose = producer(value if found is None else found["x"], "Transpose")
    if transpose is None or tuple(transpose.attributes["perm"].as_ints()) != TO_HEADS:
        return None
    reshape = producer(transpose.inputs[0], "Reshape")
    if reshape is None or ints(reshape.inputs[1]) not in ([0, nodes, num, head_dim], [0, 0, num, head_dim]):
        return None
    part = reshape.inputs[0]
    if part is None or producer(part, "Split") is None:
        return None
    angles = (None, None) if found is None else (found["cos"], found["sin"])
    return _Heads(part, num, nodes, head_dim, *angles)


def _unrepeated(value: ir.Value | None) -> ir.Value | None:
    reshape = producer(value, "Reshape")
    expand = producer(reshape.inputs[0], "Expand") if reshape is not None else None
    unsqueeze = producer(expand.inputs[0], "Unsqueeze") if expand is not None else None
    if value is None or expand is None or unsqueeze is None or ints(unsqueeze.inputs[1]) != [2]:
        return value
    once, group, heads = unsqueeze.inputs[0], static_dim(expand.outputs[0], 2), static_dim(value, 1)
    dims = [static_dim(v, axis) for v in (once, value) for axis in (2, 3)]
    is_repeat = group is not None and heads == (static_dim(once, 1) or 0) * group
    return once if is_repeat and None not in dims and dims[:2] == dims[2:] else None


def _rows(value: ir.Value | None) -> list[ir.Value | None]:
    concat = producer(value, "Concat")
    if concat is None or int_attribute(concat, "axis", 0) not in (2, -2):
        return [value]
    return [row for part in concat.inputs for row in _rows(part)]


def _scaled(softmax: ir.Node) -> tuple[ir.Node | None, np.ndarray | None]:
    where = producer(softmax.inputs[0], "Where")
    if where is None:
        return producer(softmax.inputs[0], "Mul"), None
    hidden, is_lowest = constant(where.inputs[0]), scalar(where.inputs[1]) == -np.inf
    return (producer(where.inputs[2], "Mul"), hidden) if hidden is not None and is_lowest else (None, None)


def _is_causal(hidden: np.ndarray | None, nodes: int, num_rows: int) -> bool:
    if hidden is None:
        return nodes == 1
    wanted = ~np.tri(nodes, num_rows, num_rows - nodes, dtype=np.bool_)
    return bool(hidden.shape[-2:] == wanted.shape and (hidden == wanted).all())


def _match(rule: Rule, model: ir.Model, node: ir.Node) -> _Match | None:
    transpose = producer(node.inputs[0], "Transpose")
    mix = producer(transpose.inputs[0], "MatMul") if transpose is not None else None
    softmax = producer(mix.inputs[0], "Softmax") if mix is not None else None
    scaled, hidden = _scaled(softmax) if softmax is not None else (None, None)
    scores = producer(scaled.inputs[0], "MatMul") if scaled is not None else None
    keys = producer(scores.inputs[1], "Transpose") if scores is not None else None
    if transpose is None or mix is None or softmax is None or scaled is None or scores is None or keys is None:
        return None
    scale, q = scalar(scaled.inputs[1]), _heads(rule, model, scores.inputs[0])
    is_plain = int_attribute(softmax, "axis", -1) in (-1, 3)
    is_plain &= tuple(transpose.attributes["perm"].as_ints()) == TO_HEADS
    is_plain &= tuple(keys.attributes["perm"].as_ints()) == _TO_COLUMNS
    if scale is None or q is None or not is_plain or static_dim(node.outputs[0], 2) != q.num * q.head_dim:
        return None
    k_rows, v_rows = _rows(_unrepeated(keys.inputs[0])), _rows(_unrepeated(mix.inputs[1]))
    ks, vs = ([_heads(rule, model, row) for row in rows] for rows in (k_rows, v_rows))
    if len(ks) != len(vs):
        return None
    splits, nodes, angles = [], [], []
    for k, v in zip(ks, vs, strict=True):
        split = _split_of(q, k, v)
        if split is None or k is None or k.cos is None or k.sin is None:
            return None
        splits.append(split)
        nodes.append(k.nodes)
        angles.append((k.cos, k.sin))
    if not ks or ks[-1] is None or q.part.producer() is not splits[-1] or not _are_equal(angles[-1], (q.cos, q.sin)):
        return None
    if not _is_causal(hidden, q.nodes, sum(nodes)):
        return None
    return _Match(node, tuple(splits), tuple(nodes), q.num, ks[-1].num, q.head_dim, scale, tuple(angles))


def _split_of(q: _Heads, k: _Heads | None, v: _Heads | None) -> ir.Node | None:
    split = k.part.producer() if k is not None else None
    if (
        k is None
        or v is None
        or split is None
        or (k.num, k.nodes, k.head_dim) != (v.num, v.nodes, v.head_dim)
        or v.cos is not None
    ):
        return None
    if int_attribute(split, "axis", 0) not in (-1, 2) or k.head_dim != q.head_dim or q.num % k.num:
        return None
    if len(split.outputs) != 3 or split.outputs[1] is not k.part or split.outputs[2] is not v.part:
        return None
    widths = [static_dim(part, 2) for part in split.outputs]
    return split if widths == [heads.num * heads.head_dim for heads in (q, k, v)] else None


def _are_equal(first: Sequence[ir.Value | None], second: Sequence[ir.Value | None]) -> bool:
    pairs = [(constant(a), constant(b)) for a, b in zip(first, second, strict=True)]
    return all(a is not None and b is not None and np.array_equal(a, b) for a, b in pairs)


@dataclass
class _Fuser:
    """Makes the ops; that of a step takes the caches of the one of the step before."""

    model: ir.Model
    longest: _Match  # the match with the most steps, of whose angles all others have the first ones
    made: dict[tuple[ir.Node, ...], list[ir.Value]] = field(default_factory=dict)
    lengths: dict[int, ir.Value] = field(default_factory=dict)
    masks: dict[int, ir.Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        match = self.longest
        self.edit = edit = Editor(self.model, match.splits[0])
        self.num_rows = sum(match.nodes)
        self.batch = edit.op("Shape", match.splits[0].inputs[0], start=0, end=1)
        tables = [np.concatenate([_table(pair[i]) for pair in match.angles]) for i in (0, 1)]
        self.tables = [edit.const(table, f"growing.{name}") for table, name in zip(tables, ("cos", "sin"), strict=True)]
        self.rows = edit.ints([self.num_rows])
        self.empty: dict[tuple[int, int], ir.Value] = {}

    def run(self, match: _Match) -> None:
        replace(match.node, self._attend(match, len(match.splits))[0])

    def _attend(self, match: _Match, num: int) -> list[ir.Value]:
        """Returns the rows and the caches of the attention of step `num`, counted from one."""
        steps, nodes = match.splits[:num], match.nodes[num - 1]
        if steps in self.made:
            return self.made[steps]
        caches = [self._empty(match)] * 2 if num == 1 else self._attend(match, num - 1)[1:]
        lengths, mask = self._lengths(sum(match.nodes[: num - 1])), self._mask(nodes)
        merged = steps[-1].inputs[0]
        attributes: dict[str, Any] = {"num_heads": match.num_heads, "num_kv_heads": match.num_kv_heads}
        attributes |= {"head_dim": match.head_dim, "scale": match.scale, "rotary_dim": 0, "interleaved": 0}
        op, edit = QKV_ATTENTION[False, True], Editor(self.model, steps[-1])
        inputs = (merged, *self.tables, *caches, lengths, mask, self.rows)
        made = edit.op(op.name, *inputs, domain=OPS_DOMAIN, num_outputs=3, **attributes)
        width = match.num_heads * match.head_dim
        dims = (("batch", nodes, width), *[("batch", match.num_kv_heads, self.num_rows, match.head_dim)] * 2)
        for value, shape in zip(made, dims, strict=True):
            value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(list(shape))
        self.made[steps] = made
        return list(made)

    def _lengths(self, num_before: int) -> ir.Value:
        if num_before not in self.lengths:
            self.lengths[num_before] = self.edit.op("Expand", self.edit.ints([num_before]), self.batch)
        return self.lengths[num_before]

    def _mask(self, nodes: int) -> ir.Value:
        if nodes not in self.masks:
            chain = self.edit.const(np.tri(nodes, dtype=np.bool_)[None], "growing.mask")
            slots = self.edit.op("Concat", self.batch, self.edit.ints([1, 1]), axis=0)
            self.masks[nodes] = self.edit.op("Expand", chain, slots)
        return self.masks[nodes]

    def _empty(self, match: _Match) -> ir.Value:
        kind = (match.num_kv_heads, match.head_dim)
        if kind not in self.empty:
            zeros = np.zeros((1, match.num_kv_heads, self.num_rows, match.head_dim), np.float32)
            slots = self.edit.op("Concat", self.batch, self.edit.ints([1, 1, 1]), axis=0)
            self.empty[kind] = self.edit.op("Expand", self.edit.const(zeros, "growing.empty"), slots)
        return self.empty[kind]


def _table(value: ir.Value) -> np.ndarray:
    array = constant(value)
    assert array is not None
    return array.reshape(array.shape[2:])


@as_pass()
def fuse_growing_attention(model: ir.Model) -> int:
    """Fuse every such attention; returns their number. Nodes that are then unused stay, for `remove_dead`."""
    rule = Rule(_turned, _is_turned, root="Concat")
    matches = [m for node in nodes_of(model, "Reshape") if (m := _match(rule, model, node)) is not None]
    if not matches:
        return 0
    longest = max(matches, key=lambda match: len(match.splits))
    fitting = [m for m in matches if all(map(_are_equal, m.angles, longest.angles))]
    fuser = _Fuser(model, longest)
    for match in fitting:
        fuser.run(match)
    model.graph.sort()  # a step's nodes may stand before those of the step before it
    return len(fitting)
