# SPDX-License-Identifier: Apache-2.0
"""GatedDelta: a step of gated linear attention whose recurrent state holds only rows that stay.

Rows of a step with drafts become pending: the next step applies those that were accepted, by the caller's `lengths`.
The nodes may be a tree: each is answered by the state after its own path. Of a tree the caller moves the pending rows
of the accepted path to the front before the next step.
"""

from __future__ import annotations

import numpy as np

from speccompile.core.specs import LENGTHS, STATE_LENGTHS, SURE_NODES, TREE_MASK, TensorSpec
from speccompile.core.tree import Bools, Floats, Ints
from speccompile.ops.op import Op

_STATE_DIMS = ("batch", "value_heads", "key_dim", "value_dim")
_PENDING_DIMS = ("batch", "pending", "pending_width")


def pending_width(num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int) -> int:
    """Returns the width of a pending row: k | v | g | beta of all heads."""
    return num_key_heads * key_dim + num_value_heads * (value_dim + 2)


def kept_pending(rows: Floats, sure_nodes: Ints, capacity: int) -> Floats:
    """Returns the rows of a step that become pending, [batch, capacity, width]; zeros after them.

    Args:
        rows: [batch, nodes, width] float32.
        sure_nodes: [batch] int64: the first nodes, which do not become pending.
        capacity: rows that are kept; further ones are dropped, so they must be padding.
    """
    batch, nodes, width = rows.shape
    kept = np.zeros((batch, capacity, width), np.float32)
    for slot, sure in enumerate(sure_nodes):
        count = min(nodes - sure, capacity)
        kept[slot, :count] = rows[slot, sure : sure + count]
    return kept


def parents_from_mask(seen: Bools) -> list[int]:
    """Returns the parent of each node by a slot of `tree_mask` [nodes, nodes], -1 where it follows earlier tokens."""
    return [int(earlier[-1]) if (earlier := np.flatnonzero(row[:node])).size else -1 for node, row in enumerate(seen)]


def advanced(state: Floats, k: Floats, v: Floats, g: Floats, beta: Floats, *, delta: bool) -> Floats:
    """Returns the state [value_heads, key_dim, value_dim] float32 after one row of all value heads.

    `g` is the logarithm of the decay, `beta` the row's weight, `delta`: what the state gives for `k` is taken off `v`.
    """
    state = state * np.exp(g)[:, None, None]
    held = (state * k[:, :, None]).sum(axis=1) if delta else np.zeros_like(v)
    return state + k[:, :, None] * (beta[:, None] * (v - held))[:, None, :]


def gated_delta(
    q: Floats,
    k: Floats,
    v: Floats,
    g: Floats,
    beta: Floats,
    state: Floats,
    pending: Floats,
    lengths: Ints,
    state_lengths: Ints,
    sure_nodes: Ints,
    tree_mask: Bools,
    *,
    num_key_heads: int = 1,
    num_value_heads: int = 1,
    scale: float = 1.0,
    delta: int = 1,
) -> tuple[Floats, Floats, Floats]:
    """The numpy twin. Value head h has the query and key of head h // (num_value_heads / num_key_heads).

    Args:
        q: [batch, nodes, num_key_heads * key_dim] float32.
        k: as q, normalised already where the model normalises it.
        v: [batch, nodes, num_value_heads * value_dim] float32.
        g: [batch, nodes, num_value_heads] float32: logarithm of the decay; `beta` alike.
        state: [batch, num_value_heads, key_dim, value_dim] float32; read as zeros where `lengths` is 0.
        pending: [batch, pending, pending_width] float32: rows that are not applied yet; `lengths - state_lengths` of
            each slot count, and no other is read.
        lengths: [batch] int64, tokens of the sequence before this step.
        state_lengths: [batch] int64, those of them that the state holds.
        sure_nodes: [batch] int64: the first nodes of this step, a chain, which are applied to the state; later ones
            become pending.
        tree_mask: [batch, nodes, nodes] bool: row i is true at i and at its ancestors.
        delta: 1: the delta rule; 0: none (Mamba 2: q = C, k = B, v = x, g = dt * A, beta = dt).

    Returns:
        out as v, the updated state, and the pending rows of this step followed by zeros.
    """
    group, (_, _, key_dim, _) = num_value_heads // num_key_heads, state.shape
    rows = np.concatenate([k, v, g, beta], axis=2)
    ends = np.cumsum([k.shape[2], v.shape[2], num_value_heads])

    def after(held: Floats, row: Floats) -> Floats:
        row_k, row_v, row_g, row_beta = np.split(row, ends)
        keys = np.repeat(row_k.reshape(num_key_heads, key_dim), group, axis=0)
        return advanced(held, keys, row_v.reshape(num_value_heads, -1), row_g, row_beta, delta=bool(delta))

    out, updated = np.zeros_like(v), np.zeros_like(state)
    for slot, (length, num_applied, sure) in enumerate(zip(lengths, state_lengths, sure_nodes, strict=True)):
        held = state[slot] if length > 0 else np.zeros_like(state[slot])
        for row in pending[slot, : length - num_applied]:
            held = after(held, row)
        by_node: list[Floats] = []
        for node, parent in enumerate(parents_from_mask(tree_mask[slot])):
            by_node.append(after(by_node[parent] if parent >= 0 else held, rows[slot, node]))
            queries = np.repeat(q[slot, node].reshape(num_key_heads, key_dim), group, axis=0)
            out[slot, node] = np.float32(scale) * (by_node[node] * queries[:, :, None]).sum(axis=1).reshape(-1)
        updated[slot] = by_node[sure - 1] if sure else held
    return out, updated, kept_pending(rows, sure_nodes, pending.shape[1])


# One row. A product of a vector with a matrix alone has the same bits in every step, as its sums see no other row.
_ROW = """
        decay_{0} = Exp(g_{0})
        decayed_{0} = Mul(held_{0}, decay_{0})
        given_{0} = MatMul(k_{0}, decayed_{0})
        minus_{0} = Mul(given_{0}, rule)
        left_{0} = Sub(v_{0}, minus_{0})
        weighed_{0} = Mul(left_{0}, beta_{0})
        column_{0} = Transpose<perm = [0, 1, 2, 4, 3]>(k_{0})
        added_{0} = Mul(column_{0}, weighed_{0})
        next_{0} = Add(decayed_{0}, added_{0})
"""

# Whether a slot's nodes are no chain.
IS_TREE = """
    node_row = Unsqueeze(nodes, nowhere)
    is_earlier = GreaterOrEqual(node_column, node_row)
    is_as_chain = Equal(tree_mask, is_earlier)
    is_other = Not(is_as_chain)
    others = Cast<to = 6>(is_other)
    any_other = ReduceMax<keepdims = 0>(others)
    is_tree = Cast<to = 9>(any_other)
"""

# Rows come first for Scan, and every head of k has an axis for the value heads that share it:
# k [rows, batch, key_heads, 1, 1, key_dim], v [rows, batch, key_heads, group, 1, value_dim].
# Void pending rows are zeros, so they change no bit of the state. An engine binds `pending_updated` at the address of
# `pending`: the zeros after its rows are computed from the replayed state, so that it is written last.
BODY_HEAD = """
    none = Constant<value_int = 0>()
    one = Constant<value_int = 1>()
    nothing = Constant<value_float = 0.0>()
    unit = Constant<value_ints = [1]>()
    units = Constant<value_ints = [1, 1]>()
    kept_dims = Constant<value_ints = [0, 0]>()
    second = Constant<value_ints = [1]>()
    inner = Constant<value_ints = [2, 3, 4, 5]>()
    inner_of_slot = Constant<value_ints = [1, 2, 3]>()
    num_key_heads = Constant<value_int: int = @num_key_heads>()
    num_value_heads = Constant<value_int: int = @num_value_heads>()
    scale_asked = Constant<value_float: float = @scale>()
    rule_asked = Constant<value_int: int = @delta>()
    rule = Cast<to = 1>(rule_asked)
    key_heads = Reshape(num_key_heads, unit)
    value_heads = Reshape(num_value_heads, unit)
    group = Div(value_heads, key_heads)
    key_dim = Shape<start = 2, end = 3>(state)
    value_dim = Shape<start = 3, end = 4>(state)
    key_shape = Concat<axis = 0>(kept_dims, key_heads, units, key_dim)
    value_shape = Concat<axis = 0>(kept_dims, key_heads, group, unit, value_dim)
    gate_shape = Concat<axis = 0>(kept_dims, key_heads, group, units)
    nowhere = Constant<value_ints = [0]>()
    grouped_shape = Concat<axis = 0>(nowhere, key_heads, group, key_dim, value_dim)

    q32 = Cast<to = 1>(q)
    k32 = Cast<to = 1>(k)
    v32 = Cast<to = 1>(v)
    g32 = Cast<to = 1>(g)
    beta32 = Cast<to = 1>(beta)
    rows = Concat<axis = 2>(k32, v32, g32, beta32)

    key_end = Mul(key_heads, key_dim)
    value_width = Mul(value_heads, value_dim)
    value_end = Add(key_end, value_width)
    gate_end = Add(value_end, value_heads)
    beta_end = Add(gate_end, value_heads)
    last_axis = Constant<value_ints = [2]>()
    num_owed = Sub(lengths, state_lengths)
"""

# As many pending rows are replayed as some slot needs, and at least one, as ONNX Runtime's Scan refuses none.
# The nodes that are not sure, to the front of the pending rows: `moved`, and in `is_row3` which of them there are.
MOVED_ROWS = """
    source = Add(places, sure_column)
    last_node = Sub(num_nodes, one)
    inside = Min(source, last_node)
    indices = Unsqueeze(inside, last_axis)
    moved = GatherND<batch_dims = 1>(rows, indices)
    is_row = Less(source, num_nodes)
    is_row3 = Unsqueeze(is_row, last_axis)
"""

# The nodes of a tree: every node has a state of its own, to which the rows of its path are applied in turn.
# A group's value heads are repeated for each node, node by node: [batch, key_heads, nodes * group, ...].
_PATHS = (
    """
    path_seen = Transpose<perm = [2, 0, 1]>(tree_mask)
    path_axes = Constant<value_ints = [2, 4, 5, 6]>()
    path_seen7 = Unsqueeze(path_seen, path_axes)
    num_rows_b = Shape<start = 0, end = 2>(q_rows)
    each_value = Concat<axis = 0>(num_rows_b, unit, num_nodes1, group, units)
    path_seen_each = Expand(path_seen7, each_value)
    paths = Mul(num_nodes1, group)
    seen_shape = Concat<axis = 0>(kept_dims, unit, paths, units)
    seen_p = Reshape(path_seen_each, seen_shape)

    path_axis = Constant<value_ints = [3]>()
    path_split = Concat<axis = 0>(num_rows_b, key_heads, num_nodes1, group, units)
    rows_wide = Concat<axis = 0>(num_rows_b, key_heads, num_nodes1, group, unit, value_dim)
    v_row_shape = Concat<axis = 0>(kept_dims, key_heads, paths, unit, value_dim)
    g_row_shape = Concat<axis = 0>(kept_dims, key_heads, paths, units)
    v_rows7 = Unsqueeze(v_rows, path_axis)
    g_rows7 = Unsqueeze(g_rows, path_axis)
    beta_rows7 = Unsqueeze(beta_rows, path_axis)
    v_each = Expand(v_rows7, rows_wide)
    g_each = Expand(g_rows7, path_split)
    beta_each = Expand(beta_rows7, path_split)
    v_paths = Reshape(v_each, v_row_shape)
    g_paths = Reshape(g_each, g_row_shape)
    beta_paths = Reshape(beta_each, g_row_shape)
    begin_axis = Constant<value_ints = [2]>()
    begin6 = Unsqueeze(replayed, begin_axis)
    num_slots = Shape<start = 0, end = 1>(q)
    all_states = Concat<axis = 0>(num_slots, key_heads, num_nodes1, group, key_dim, value_dim)
    begin_each = Expand(begin6, all_states)
    path_states = Concat<axis = 0>(nowhere, key_heads, paths, key_dim, value_dim)
    begin_paths = Reshape(begin_each, path_states)
    path_ends = Scan<num_scan_inputs = 5, body = follow
      (float[b, h, p, i, j] held_p, float[b, h, o, o, i] k_p, float[b, h, p, o, j] v_p, float[b, h, p, o, o] g_p,
       float[b, h, p, o, o] beta_p, bool[b, o, p, o, o] is_seen_p) => (float[b, h, p, i, j] stays_p) {"""
    + _ROW.format("p")
    + """
        stays_p = Where(is_seen_p, next_p, held_p)
      }>(begin_paths, k_rows, v_paths, g_paths, beta_paths, seen_p)
    path_ends6 = Reshape(path_ends, all_states)
    ends_by_node = Transpose<perm = [2, 0, 1, 3, 4, 5]>(path_ends6)
    answers_of_tree = MatMul(q_rows, ends_by_node)

    last_sure = Sub(sure_nodes, one)
    sure_at = Max(last_sure, none)
    sure_index = Unsqueeze(sure_at, second)
    ends_by_slot = Transpose<perm = [0, 2, 1, 3, 4, 5]>(path_ends6)
    sure_ends = GatherND<batch_dims = 1>(ends_by_slot, sure_index)
    has_sure = Greater(sure_nodes, none)
    slot_axes = Constant<value_ints = [1, 2, 3, 4]>()
    has_sure5 = Unsqueeze(has_sure, slot_axes)
    kept_ends = Where(has_sure5, sure_ends, replayed)
    kept_of_tree = Reshape(kept_ends, state_shape)
"""
)

_SCANS = (
    """
    most_owed = ReduceMax<keepdims = 1>(num_owed)
    num_taken = Max(most_owed, unit)
    replayable = Slice(pending, nowhere, num_taken, second)
    num_replayed1 = Shape<start = 1, end = 2>(replayable)
    num_replayed = Squeeze(num_replayed1, nowhere)
    replays = Range(none, num_replayed, one)
    owed_column = Unsqueeze(num_owed, second)
    is_owed = Less(replays, owed_column)
    is_owed3 = Unsqueeze(is_owed, last_axis)
    owed = Where(is_owed3, replayable, nothing)
    k_owed3 = Slice(owed, nowhere, key_end, last_axis)
    v_owed3 = Slice(owed, key_end, value_end, last_axis)
    g_owed3 = Slice(owed, value_end, gate_end, last_axis)
    beta_owed3 = Slice(owed, gate_end, beta_end, last_axis)
    k_owed6 = Reshape(k_owed3, key_shape)
    v_owed6 = Reshape(v_owed3, value_shape)
    g_owed6 = Reshape(g_owed3, gate_shape)
    beta_owed6 = Reshape(beta_owed3, gate_shape)
    k_owed = Transpose<perm = [1, 0, 2, 3, 4, 5]>(k_owed6)
    v_owed = Transpose<perm = [1, 0, 2, 3, 4, 5]>(v_owed6)
    g_owed = Transpose<perm = [1, 0, 2, 3, 4, 5]>(g_owed6)
    beta_owed = Transpose<perm = [1, 0, 2, 3, 4, 5]>(beta_owed6)

    is_new = Equal(lengths, none)
    is_new4 = Unsqueeze(is_new, inner_of_slot)
    started = Where(is_new4, nothing, state)
    first = Reshape(started, grouped_shape)
    replayed = Scan<num_scan_inputs = 4, body = replay
      (float[b, h, n, i, j] held_r, float[b, h, o, o, i] k_r, float[b, h, n, o, j] v_r, float[b, h, n, o, o] g_r,
       float[b, h, n, o, o] beta_r) => (float[b, h, n, i, j] next_r) {"""
    + _ROW.format("r")
    + """
      }>(first, k_owed, v_owed, g_owed, beta_owed)

    q6 = Reshape(q32, key_shape)
    k6 = Reshape(k32, key_shape)
    v6 = Reshape(v32, value_shape)
    g6 = Reshape(g32, gate_shape)
    beta6 = Reshape(beta32, gate_shape)
    q_rows = Transpose<perm = [1, 0, 2, 3, 4, 5]>(q6)
    k_rows = Transpose<perm = [1, 0, 2, 3, 4, 5]>(k6)
    v_rows = Transpose<perm = [1, 0, 2, 3, 4, 5]>(v6)
    g_rows = Transpose<perm = [1, 0, 2, 3, 4, 5]>(g6)
    beta_rows = Transpose<perm = [1, 0, 2, 3, 4, 5]>(beta6)
    num_nodes1 = Shape<start = 1, end = 2>(q)
    num_nodes = Squeeze(num_nodes1, nowhere)
    nodes = Range(none, num_nodes, one)
    node_column = Unsqueeze(nodes, second)
"""
    + IS_TREE
    + """
    state_shape = Shape(state)
    state_updated, answers = If<then_branch = by_paths () =>
      (float[b, v, i, j] kept_of_tree, float[r, b, h, n, o, j] answers_of_tree) {"""
    + _PATHS
    + """
      }, else_branch = one_chain () =>
      (float[b, v, i, j] kept_of_chain, float[r, b, h, n, o, j] answers_of_chain) {
    is_sure2 = Less(node_column, sure_nodes)
    is_sure = Unsqueeze(is_sure2, inner)
    last, kept, answers_of_chain = Scan<num_scan_inputs = 6, body = walk
      (float[b, h, n, i, j] held_w, float[b, h, n, i, j] kept_w, float[b, h, o, o, i] q_w, float[b, h, o, o, i] k_w,
       float[b, h, n, o, j] v_w, float[b, h, n, o, o] g_w, float[b, h, n, o, o] beta_w, bool[b, o, o, o, o] is_sure_w)
      => (float[b, h, n, i, j] next_w, float[b, h, n, i, j] stays_w, float[b, h, n, o, j] answer_w) {"""
    + _ROW.format("w")
    + """
        stays_w = Where(is_sure_w, next_w, kept_w)
        answer_w = MatMul(q_w, next_w)
      }>(replayed, replayed, q_rows, k_rows, v_rows, g_rows, beta_rows, is_sure)
    kept_of_chain = Reshape(kept, state_shape)
      }>(is_tree)
    scaled = Mul(answers, scale_asked)
    by_slot = Transpose<perm = [1, 0, 2, 3, 4, 5]>(scaled)
    out_shape = Shape(v)
    out32 = Reshape(by_slot, out_shape)
    out = CastLike(out32, v)

    num_pending1 = Shape<start = 1, end = 2>(pending)
    num_pending = Squeeze(num_pending1, nowhere)
    places = Range(none, num_pending, one)
    sure_column = Unsqueeze(sure_nodes, second)
    """
    + MOVED_ROWS
    + """
    flat_shape = Constant<value_ints = [-1]>()
    flat = Reshape(replayed, flat_shape)
    sample = Slice(flat, nowhere, unit, nowhere)
    square = Mul(sample, sample)
    is_never = Less(square, nothing)
    zero = Cast<to = 1>(is_never)
    pending_updated = Where(is_row3, moved, zero)
    """
)

GATED_DELTA = Op(
    "GatedDelta",
    (
        TensorSpec("q", ("batch", "nodes", "key_width"), "float32"),
        TensorSpec("k", ("batch", "nodes", "key_width"), "float32"),
        TensorSpec("v", ("batch", "nodes", "value_width"), "float32"),
        TensorSpec("g", ("batch", "nodes", "value_heads"), "float32"),
        TensorSpec("beta", ("batch", "nodes", "value_heads"), "float32"),
        TensorSpec("state", _STATE_DIMS, "float32"),
        TensorSpec("pending", _PENDING_DIMS, "float32"),
        TensorSpec(LENGTHS, ("batch",), "int64"),
        TensorSpec(STATE_LENGTHS, ("batch",), "int64"),
        TensorSpec(SURE_NODES, ("batch",), "int64"),
        TensorSpec(TREE_MASK, ("batch", "nodes", "nodes"), "bool"),
    ),
    (
        TensorSpec("out", ("batch", "nodes", "value_width"), "float32"),
        TensorSpec("state_updated", _STATE_DIMS, "float32"),
        TensorSpec("pending_updated", _PENDING_DIMS, "float32"),
    ),
    gated_delta,
    BODY_HEAD + _SCANS,
    attributes={"num_key_heads": 1, "num_value_heads": 1, "scale": 1.0, "delta": 1},
)
