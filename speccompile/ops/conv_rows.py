# SPDX-License-Identifier: Apache-2.0
"""ConvRows: a causal depthwise convolution whose kept rows are only those of tokens that stay.

As in `speccompile.ops.gated_delta`, rows of a step with drafts are pending; a node sees the rows of its own path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from speccompile.core.specs import LENGTHS, STATE_LENGTHS, SURE_NODES, TREE_MASK, TensorSpec
from speccompile.core.tree import Bools, Floats, Ints
from speccompile.ops.gated_delta import IS_TREE, parents_from_mask
from speccompile.ops.op import Op

_ROWS_DIMS = ("batch", "conv_rows", "channels")


def _windows(parents: Sequence[int], num_held: int, kernel: int) -> Ints:
    """Returns the rows that each node sees, its own last: [nodes, kernel] int64."""
    windows = np.empty((len(parents), kernel), np.int64)
    for node in range(len(parents)):
        at = node
        for tap in reversed(range(kernel)):
            windows[node, tap] = num_held + at
            at = parents[at] if at >= 0 else at - 1
    return windows


def conv_rows(
    x: Floats,
    weight: Floats,
    bias: Floats,
    rows: Floats,
    lengths: Ints,
    state_lengths: Ints,
    sure_nodes: Ints,
    tree_mask: Bools,
    *,
    activation: int = 0,
) -> tuple[Floats, Floats]:
    """The numpy twin. Returns out as x, and the updated rows: kernel - 1 of the tokens then held, pending ones, zeros.

    Args:
        x: [batch, nodes, channels] float32: raw rows of the nodes.
        weight: [channels, kernel] float32; the last column belongs to the row itself.
        bias: [channels] float32, zeros where there is none.
        rows: [batch, kernel - 1 + pending, channels] float32: the last kernel - 1 raw rows of the tokens that the
            states hold (read as zeros where `lengths` is 0), then the pending rows, of which `lengths - state_lengths`
            count; no other is read.
        lengths: [batch] int64, tokens of the sequence before this step.
        state_lengths: [batch] int64, those of them that the states hold.
        sure_nodes: [batch] int64: the first nodes of this step, a chain, which are applied; later ones become pending.
        tree_mask: [batch, nodes, nodes] bool: row i is true at i and at its ancestors.
        activation: 0: none; 1: SiLU.
    """
    batch, num_past = len(x), weight.shape[1] - 1
    out, updated = np.empty_like(x), np.zeros_like(rows)
    for slot in range(batch):
        num_owed, sure = lengths[slot] - state_lengths[slot], sure_nodes[slot]
        past = rows[slot, : num_past + num_owed] if lengths[slot] > 0 else np.zeros_like(rows[slot, :num_past])
        chain = np.concatenate([past, x[slot]])
        windows = _windows(parents_from_mask(tree_mask[slot]), len(past), num_past + 1)
        out[slot] = bias
        for tap in range(num_past + 1):
            out[slot] += chain[windows[:, tap]] * weight[:, tap]
        left = chain[num_owed + sure :][: rows.shape[1]]
        updated[slot, : len(left)] = left
    if activation:
        with np.errstate(over="ignore"):
            out /= 1 + np.exp(-out)
    return out, updated


# The rows of a chain: node + tap, counted from the first row before the nodes that counts.
_CHAIN = """
    reach3 = Unsqueeze(reach2, [0])
"""

# Of a tree: the ancestor so many levels above, before which stand as many nodes as have a smaller depth in the path; or
# the row so far before the nodes.
_PATHS = (
    IS_TREE
    + """
    reach3 = If<then_branch = by_paths () => (int64[b, r, t] reach_of_tree) {
        seen_of = int64(tree_mask)
        levels = ReduceSum(seen_of, [2], keepdims=1) - 1 - (num_past - taps)
        before = int64(Unsqueeze(CumSum(seen_of, 2), [3]) <= Unsqueeze(levels, [2]))
        reach_of_tree = Where(levels < 0, levels, ReduceSum(before, [2], keepdims=0)) + num_past
      }, else_branch = one_chain () => (int64[c, r, t] reach_of_chain) {
        reach_of_chain = Unsqueeze(reach2, [0])
      }>(is_tree)
"""
)

_HEAD = """
    kernel1 = Shape(weight, start=1, end=2)
    kernel = Squeeze(kernel1, [0])
    num_past = kernel - 1
    num_rows = Squeeze(Shape(rows, start=1, end=2), [0])
    num_nodes = Squeeze(Shape(x, start=1, end=2), [0])

    num_owed = Unsqueeze(lengths - state_lengths, [1])
    past_end = num_owed + num_past
    held = Concat(Where(Unsqueeze(lengths == 0, [1, 2]), 0.0, rows), float32(x), axis=1)
    gap = num_rows - past_end
    last_held = num_rows + num_nodes - 1
    taps = Range(0, kernel, 1)
    nodes = Range(0, num_nodes, 1)
    node_column = Unsqueeze(nodes, [1])
    reach2 = node_column + taps
"""

_REST = """
    seen = reach3 + Unsqueeze(num_owed, [2])
    seen_at = seen + Where(seen >= Unsqueeze(past_end, [2]), Unsqueeze(gap, [2]), 0)
    windows = GatherND(held, Unsqueeze(seen_at, [3]), batch_dims=1)
    ones = ConstantOfShape(Concat([1], kernel1, axis=0), value=[1.0])
    sums = ones @ (windows * Transpose(float32(weight), perm=[1, 0]))
    plain = Squeeze(sums, [2]) + float32(bias)
    out = CastLike(Where(attr.activation > 0, plain * Sigmoid(plain), plain), x)

    source = Range(0, num_rows, 1) + (num_owed + Unsqueeze(sure_nodes, [1]))
    source_at = source + Where(source >= past_end, gap, 0)
    moved = GatherND(held, Unsqueeze(Min(source_at, last_held), [2]), batch_dims=1)
    rows_updated = Where(Unsqueeze(source_at <= last_held, [2]), moved, 0.0)
"""

# The kernel's taps are added by a product with a row of ones: its sums see no other row, so they have the same bits in
# every step. Everything reads `rows` through one Concat, so an engine may bind `rows_updated` at its address.
CONV_ROWS = Op(
    "ConvRows",
    (
        TensorSpec("x", ("batch", "nodes", "channels"), "float32"),
        TensorSpec("weight", ("channels", "kernel"), "float32"),
        TensorSpec("bias", ("channels",), "float32"),
        TensorSpec("rows", _ROWS_DIMS, "float32"),
        TensorSpec(LENGTHS, ("batch",), "int64"),
        TensorSpec(STATE_LENGTHS, ("batch",), "int64"),
        TensorSpec(SURE_NODES, ("batch",), "int64"),
        TensorSpec(TREE_MASK, ("batch", "nodes", "nodes"), "bool"),
    ),
    (TensorSpec("out", ("batch", "nodes", "channels"), "float32"), TensorSpec("rows_updated", _ROWS_DIMS, "float32")),
    conv_rows,
    _HEAD + _PATHS + _REST,
    attributes={"activation": 0},
)

# For chains alone, without a branch.
CHAIN_CONV_ROWS = replace(CONV_ROWS, body=_HEAD + _CHAIN + _REST)
