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
    reach3 = Unsqueeze(reach2, nowhere)
"""

# Of a tree: the ancestor so many levels above, before which stand as many nodes as have a smaller depth in the path; or
# the row so far before the nodes.
_PATHS = (
    IS_TREE
    + """
    reach3 = If<then_branch = by_paths () => (int64[b, r, t] reach_of_tree) {
        seen_of = Cast<to = 7>(tree_mask)
        counts = CumSum(seen_of, depth_axis)
        sizes = ReduceSum<keepdims = 1>(seen_of, third)
        depths = Sub(sizes, one)
        above = Sub(num_past, taps)
        levels = Sub(depths, above)
        levels4 = Unsqueeze(levels, third)
        counts4 = Unsqueeze(counts, tap_axis)
        is_before = LessOrEqual(counts4, levels4)
        before = Cast<to = 7>(is_before)
        ancestors = ReduceSum<keepdims = 0>(before, third)
        is_held = Less(levels, none)
        offsets = Where(is_held, levels, ancestors)
        reach_of_tree = Add(offsets, num_past)
      }, else_branch = one_chain () => (int64[c, r, t] reach_of_chain) {
        reach_of_chain = Unsqueeze(reach2, nowhere)
      }>(is_tree)
"""
)

_HEAD = """
    none = Constant<value_int = 0>()
    one = Constant<value_int = 1>()
    nothing = Constant<value_float = 0.0>()
    nowhere = Constant<value_ints = [0]>()
    second = Constant<value_ints = [1]>()
    third = Constant<value_ints = [2]>()
    inner = Constant<value_ints = [1, 2]>()
    tap_axis = Constant<value_ints = [3]>()
    depth_axis = Constant<value_int = 2>()
    x32 = Cast<to = 1>(x)
    weight32 = Cast<to = 1>(weight)
    bias32 = Cast<to = 1>(bias)
    kernel1 = Shape<start = 1, end = 2>(weight)
    kernel = Squeeze(kernel1, nowhere)
    num_past = Sub(kernel, one)
    num_rows1 = Shape<start = 1, end = 2>(rows)
    num_rows = Squeeze(num_rows1, nowhere)
    num_nodes1 = Shape<start = 1, end = 2>(x)
    num_nodes = Squeeze(num_nodes1, nowhere)

    num_owed0 = Sub(lengths, state_lengths)
    num_owed = Unsqueeze(num_owed0, second)
    past_end = Add(num_owed, num_past)
    is_new = Equal(lengths, none)
    is_new3 = Unsqueeze(is_new, inner)
    known = Where(is_new3, nothing, rows)
    held = Concat<axis = 1>(known, x32)
    gap = Sub(num_rows, past_end)
    num_held = Add(num_rows, num_nodes)
    last_held = Sub(num_held, one)

    taps = Range(none, kernel, one)
    nodes = Range(none, num_nodes, one)
    node_column = Unsqueeze(nodes, second)
    reach2 = Add(node_column, taps)
"""

_REST = """    owed3 = Unsqueeze(num_owed, third)
    seen = Add(reach3, owed3)
    end3 = Unsqueeze(past_end, third)
    gap3 = Unsqueeze(gap, third)
    is_node = GreaterOrEqual(seen, end3)
    skipped = Where(is_node, gap3, none)
    seen_at = Add(seen, skipped)
    seen_index = Unsqueeze(seen_at, tap_axis)
    windows = GatherND<batch_dims = 1>(held, seen_index)
    by_tap = Transpose<perm = [1, 0]>(weight32)
    products = Mul(windows, by_tap)
    ones_shape = Concat<axis = 0>(second, kernel1)
    ones = ConstantOfShape<value = float[1] {1.0}>(ones_shape)
    sums = MatMul(ones, products)
    summed = Squeeze(sums, third)
    plain = Add(summed, bias32)
    asked = Constant<value_int: int = @activation>()
    is_activated = Greater(asked, none)
    weight_of = Sigmoid(plain)
    silu = Mul(plain, weight_of)
    out32 = Where(is_activated, silu, plain)
    out = CastLike(out32, x)

    places = Range(none, num_rows, one)
    sure_column = Unsqueeze(sure_nodes, second)
    num_applied = Add(num_owed, sure_column)
    source = Add(places, num_applied)
    is_new_row = GreaterOrEqual(source, past_end)
    passed = Where(is_new_row, gap, none)
    source_at = Add(source, passed)
    is_row = LessOrEqual(source_at, last_held)
    source_in = Min(source_at, last_held)
    source_index = Unsqueeze(source_in, third)
    moved = GatherND<batch_dims = 1>(held, source_index)
    is_row3 = Unsqueeze(is_row, third)
    rows_updated = Where(is_row3, moved, nothing)
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
    (
        TensorSpec("out", ("batch", "nodes", "channels"), "float32"),
        TensorSpec("rows_updated", _ROWS_DIMS, "float32"),
    ),
    conv_rows,
    _HEAD + _PATHS + _REST,
    attributes={"activation": 0},
)

# For chains alone, without a branch.
CHAIN_CONV_ROWS = replace(CONV_ROWS, body=_HEAD + _CHAIN + _REST)
