# SPDX-License-Identifier: Apache-2.0
"""The additive attention masks of a graph, made from lengths and a tree once and shared by all layers that see it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from speccompile.core.specs import IMAGE_NODES, LENGTHS
from speccompile.passes.edit import Editor, input_of

# Added to a score, which it absorbs. Finite, so that the softmax of a row never computes inf - inf, and also after a
# kernel that works in base 2 has multiplied it by 1.44.
HIDDEN_SCORE = np.float32(-1e30)
HALF_HIDDEN_SCORE = np.float16(-6e4)  # the same near the end of float16; bfloat16 has the range of float32


class AttentionMasks:
    """The additive masks of one tree: [batch, nodes, rows] by window.

    Row r of the cache is past (r < length), a node of this step (r - length < nodes) or unused. One gather covers all:
    the tree's additive mask gets a visible first and a hidden last column, and r - length, clipped, is the column. (A
    TensorScatter of the tree into the mask would copy it, as it is not a graph output.)

    Args:
        anchor: the first CachedAttention that sees the tree; the masks are made before it.
        rows_of: a value whose dim `axis` is the number of rows that are attended to.
        dtype: of the masks: float32, float16 or bfloat16.
    """

    def __init__(
        self, model: ir.Model, anchor: ir.Node, rows_of: ir.Value, axis: int = 2, dtype: ir.DataType = ir.DataType.FLOAT
    ) -> None:
        self.edit = edit = Editor(model, anchor)
        self.tree = tree_of(anchor)
        self.has_images = any(value.name == IMAGE_NODES for value in model.graph.inputs)
        hidden = HALF_HIDDEN_SCORE if dtype == ir.DataType.FLOAT16 else HIDDEN_SCORE
        self.visible = edit.const(np.float32(0).astype(dtype.numpy()), "mask.visible")
        self.hidden = edit.const(hidden.astype(dtype.numpy()), "mask.hidden")
        self.length_column = edit.op("Unsqueeze", input_of(model, LENGTHS), edit.ints([1, 2]))
        self.num_rows = edit.op("Shape", rows_of, start=axis, end=axis + 1)
        self.rows = edit.op("Range", edit.ints(0), edit.op("Squeeze", self.num_rows), edit.ints(1))
        self.shape = edit.op("Concat", edit.op("Shape", self.tree, start=0, end=2), self.num_rows, axis=0)
        last_column = edit.op("Add", edit.op("Shape", self.tree, start=2, end=3), edit.ints([1]))
        column = edit.op("Sub", edit.op("Add", self.rows, edit.ints(1)), self.length_column)
        column = edit.op("Min", edit.op("Max", column, edit.ints(0)), last_column)
        self.columns = edit.op("Expand", column, self.shape)  # [batch, nodes, rows]
        self._depth: ir.Value | None = None

    @property
    def depth(self) -> ir.Value:
        """Returns the number of ancestors of each node, [batch, nodes, 1] int64, without later nodes of an image."""
        if self._depth is None:
            ones = self.edit.op("Cast", self.tree, to=ir.DataType.INT64)
            if self.has_images:
                ones = self.edit.op("Trilu", ones, upper=0)
            count = self.edit.op("ReduceSum", ones, self.edit.ints([2]), keepdims=1)
            self._depth = self.edit.op("Sub", count, self.edit.ints(1))
        return self._depth

    def make(self, window: int, group: int = 1) -> ir.Value:
        """Returns the mask of one sliding window (0 = none) [batch, 1, group * nodes, rows], repeated `group` times."""
        edit, tree = self.edit, self.tree
        if window:
            gap = edit.op("Sub", self.depth, edit.op("Transpose", self.depth, perm=[0, 2, 1]))
            tree = edit.op("And", tree, edit.op("Less", gap, edit.ints(window)))
        table = edit.op("Where", tree, self.visible, self.hidden)
        table = edit.op("Pad", table, edit.ints([0, 0, 1, 0, 0, 0]), self.visible)
        table = edit.op("Pad", table, edit.ints([0, 0, 0, 0, 0, 1]), self.hidden)
        mask = edit.op("GatherElements", table, self.columns, axis=2)
        if window:
            # A node's row is at or after its position, so this bound never hides a node in the window.
            newest = edit.op("Sub", edit.op("Add", self.depth, self.length_column), edit.ints(window))
            mask = edit.op("Where", edit.op("Greater", self.rows, newest), mask, self.hidden)
        folded = mask if group == 1 else edit.op("Concat", *[mask] * group, axis=1)
        unsqueezed: ir.Value = edit.op("Unsqueeze", folded, edit.ints([1]))
        return unsqueezed


def tree_of(node: ir.Node, k_index: int = 3) -> ir.Value:
    """Returns the tree mask of an attention, most often the graph's input; input `k_index` is its K cache."""
    tree = node.inputs[k_index + 3]
    assert tree is not None
    return tree


def window_of(node: ir.Node) -> int:
    """Returns the sliding window of a CachedAttention, 0 = none."""
    return node.attributes["window"].as_int() if "window" in node.attributes else 0


def size_of(value: ir.Value | None, axis: int) -> int:
    assert value is not None and value.shape is not None, f"{value} has no shape"
    dim = value.shape[axis]
    assert isinstance(dim, int), f"{value}: dim {axis} is not static"
    return dim
