# SPDX-License-Identifier: Apache-2.0
"""CachedAttention -> TensorScatter in place + folded Attention(24), for ONNX Runtime.

The query heads of one group are folded into the rows ([batch, kv_heads, group * nodes, head_dim]), so each K
and V row is read once per kv head. The additive mask is made once per distinct window and shared by all layers:
a boolean mask would be converted in every layer, and `nonpad_kv_seqlen` makes the kernel no shorter.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from speccompile.core.specs import LENGTHS, TREE_MASK
from speccompile.passes.base import Pass, Property
from speccompile.passes.edit import OPS_DOMAIN, Editor, input_of, nodes_of, replace

HIDDEN_SCORE = np.float32(-3e38)  # added to a score: finite, so that softmax of a row never sees inf - inf


def _find_neutral(model: ir.Model) -> str | None:
    nodes = nodes_of(model, "CachedAttention", OPS_DOMAIN)
    return None if not nodes else f"{len(nodes)} CachedAttention nodes are left"


ATTENTION_LOWERED = Property("attention_lowered", _find_neutral)


class _Mask:
    """The additive masks of one graph: [batch, 1, group * nodes, max_seq] by window.

    Row r of the cache is past (r < length), a node of this step (r - length < nodes) or unused. One gather answers
    all three: the tree's additive mask gets a visible column in front and a hidden one behind, and r - length,
    clipped, is the column. (A TensorScatter of the tree into the mask would be copied: it is no graph output.)
    """

    def __init__(self, model: ir.Model, anchor: ir.Node, cache: ir.Value) -> None:
        self.edit = edit = Editor(model, anchor)
        self.tree = input_of(model, TREE_MASK)
        self.visible = edit.const(np.float32(0), "mask.visible")
        self.hidden = edit.const(HIDDEN_SCORE, "mask.hidden")
        self.length_column = edit.op("Unsqueeze", input_of(model, LENGTHS), edit.ints([1, 2]))
        max_seq = edit.op("Shape", cache, start=2, end=3)
        self.rows = edit.op("Range", edit.ints(0), edit.op("Squeeze", max_seq), edit.ints(1))
        self.shape = edit.op("Concat", edit.op("Shape", self.tree, start=0, end=2), max_seq, axis=0)
        last_column = edit.op("Add", edit.op("Shape", self.tree, start=2, end=3), edit.ints([1]))
        column = edit.op("Sub", edit.op("Add", self.rows, edit.ints(1)), self.length_column)
        column = edit.op("Min", edit.op("Max", column, edit.ints(0)), last_column)
        self.columns = edit.op("Expand", column, self.shape)  # [batch, nodes, max_seq]
        self._depth: ir.Value | None = None

    @property
    def depth(self) -> ir.Value:
        """[batch, nodes, 1] int64: ancestors of each node."""
        if self._depth is None:
            ones = self.edit.op("Cast", self.tree, to=ir.DataType.INT64)
            count = self.edit.op("ReduceSum", ones, self.edit.ints([2]), keepdims=1)
            self._depth = self.edit.op("Sub", count, self.edit.ints(1))
        return self._depth

    def make(self, window: int, group: int) -> ir.Value:
        """The mask for one sliding window (0 = none) and one number of query heads per kv head."""
        edit, tree = self.edit, self.tree
        if window:
            gap = edit.op("Sub", self.depth, edit.op("Transpose", self.depth, perm=[0, 2, 1]))
            tree = edit.op("And", tree, edit.op("Less", gap, edit.ints(window)))
        table = edit.op("Where", tree, self.visible, self.hidden)
        table = edit.op("Pad", table, edit.ints([0, 0, 1, 0, 0, 0]), self.visible)
        table = edit.op("Pad", table, edit.ints([0, 0, 0, 0, 0, 1]), self.hidden)
        mask = edit.op("GatherElements", table, self.columns, axis=2)
        if window:
            # A node's row lies at or behind its position, so this bound never hides a node in the window.
            newest = edit.op("Sub", edit.op("Add", self.depth, self.length_column), edit.ints(window))
            mask = edit.op("Where", edit.op("Greater", self.rows, newest), mask, self.hidden)
        folded = mask if group == 1 else edit.op("Concat", *[mask] * group, axis=1)
        unsqueezed: ir.Value = edit.op("Unsqueeze", folded, edit.ints([1]))
        return unsqueezed


def lower_attention(model: ir.Model) -> int:
    """Lower every CachedAttention; returns their number."""
    nodes = nodes_of(model, "CachedAttention", OPS_DOMAIN)
    if not nodes:
        return 0
    masks = _Mask(model, nodes[0], _cache_of(nodes[0]))
    kinds = [(_window(n), _static_dim(n.inputs[0], 1) // _static_dim(n.inputs[3], 1)) for n in nodes]
    made = {kind: masks.make(*kind) for kind in dict.fromkeys(kinds)}
    for node, kind in zip(nodes, kinds, strict=True):
        query, key, value, k_cache, v_cache, lengths, _ = node.inputs
        edit = Editor(model, node)
        kv_heads, heads = _static_dim(k_cache, 1), _static_dim(query, 1)
        k_all = edit.op("TensorScatter", k_cache, key, lengths, axis=2, mode="linear")
        v_all = edit.op("TensorScatter", v_cache, value, lengths, axis=2, mode="linear")
        folded = (
            query
            if heads == kv_heads
            else edit.op("Reshape", query, edit.ints([0, kv_heads, -1, _static_dim(k_cache, 3)]))
        )
        softcap = node.attributes["softcap"].as_float() if "softcap" in node.attributes else 0.0
        out = edit.op(
            "Attention", folded, k_all, v_all, made[kind], scale=node.attributes["scale"].as_float(), softcap=softcap
        )
        if heads != kv_heads:
            out = edit.op("Reshape", out, edit.ints([0, heads, -1, _static_dim(k_cache, 3)]))
        replace(node, edit.op("Transpose", out, perm=[0, 2, 1, 3]), k_all, v_all)
    return len(nodes)


def _cache_of(node: ir.Node) -> ir.Value:
    cache = node.inputs[3]
    assert cache is not None
    return cache


def _window(node: ir.Node) -> int:
    return node.attributes["window"].as_int() if "window" in node.attributes else 0


def _static_dim(value: ir.Value | None, axis: int) -> int:
    assert value is not None and value.shape is not None, f"{value} has no shape"
    dim = value.shape[axis]
    assert isinstance(dim, int), f"{value}: dim {axis} is not static"
    return dim


LOWER_ATTENTION = Pass("lower_attention", lower_attention, ensures=(ATTENTION_LOWERED,))
