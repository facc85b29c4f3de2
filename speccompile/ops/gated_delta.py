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
        decayed_{0} = held_{0} * Exp(g_{0})
        weighed_{0} = (v_{0} - k_{0} @ decayed_{0} * rule) * beta_{0}
        next_{0} = decayed_{0} + Transpose(k_{0}, perm=[0, 1, 2, 4, 3]) * weighed_{0}
"""

# Whether a slot's nodes are no chain.
IS_TREE = """
    is_other = ~(tree_mask == (node_column >= Unsqueeze(nodes, [0])))
    is_tree = boolean(ReduceMax(int32(is_other), keepdims=0))
"""

# Rows come first for Scan, and every head of k has an axis for the value heads that share it:
# k [rows, batch, key_heads, 1, 1, key_dim], v [rows, batch, key_heads, group, 1, value_dim].
# Void pending rows are zeros, so they change no bit of the state. An engine binds `pending_updated` at the address of
# `pending`: the zeros after its rows are computed from the replayed state, so that it is written last.
BODY_HEAD = """
    rule = float32(attr.delta)
    key_heads = Reshape(attr.num_key_heads, [1])
    value_heads = Reshape(attr.num_value_heads, [1])
    group = value_heads / key_heads
    key_dim = Shape(state, start=2, end=3)
    value_dim = Shape(state, start=3, end=4)
    key_shape = Concat([0, 0], key_heads, [1, 1], key_dim, axis=0)
    value_shape = Concat([0, 0], key_heads, group, [1], value_dim, axis=0)
    gate_shape = Concat([0, 0], key_heads, group, [1, 1], axis=0)
    grouped_shape = Concat([0], key_heads, group, key_dim, value_dim, axis=0)

    q32 = float32(q)
    k32 = float32(k)
    v32 = float32(v)
    g32 = float32(g)
    beta32 = float32(beta)
    rows = Concat(k32, v32, g32, beta32, axis=2)

    key_end = key_heads * key_dim
    value_end = key_end + value_heads * value_dim
    gate_end = value_end + value_heads
    beta_end = gate_end + value_heads
    num_owed = lengths - state_lengths
"""

# As many pending rows are replayed as some slot needs, and at least one, as ONNX Runtime's Scan refuses none.
# The nodes that are not sure, to the front of the pending rows: `moved`, and in `is_row3` which of them there are.
MOVED_ROWS = """
    source = Range(0, num_pending, 1) + Unsqueeze(sure_nodes, [1])
    moved = GatherND(rows, Unsqueeze(Min(source, num_nodes - 1), [2]), batch_dims=1)
    is_row3 = Unsqueeze(source < num_nodes, [2])
"""

# The nodes of a tree: every node has a state of its own, to which the rows of its path are applied in turn.
# A group's value heads are repeated for each node, node by node: [batch, key_heads, nodes * group, ...].
_PATHS = (
    """
    path_seen7 = Unsqueeze(Transpose(tree_mask, perm=[2, 0, 1]), [2, 4, 5, 6])
    num_rows_b = Shape(q_rows, start=0, end=2)
    path_seen_each = Expand(path_seen7, Concat(num_rows_b, [1], num_nodes1, group, [1, 1], axis=0))
    paths = num_nodes1 * group
    seen_p = Reshape(path_seen_each, Concat([0, 0], [1], paths, [1, 1], axis=0))

    path_split = Concat(num_rows_b, key_heads, num_nodes1, group, [1, 1], axis=0)
    rows_wide = Concat(num_rows_b, key_heads, num_nodes1, group, [1], value_dim, axis=0)
    g_row_shape = Concat([0, 0], key_heads, paths, [1, 1], axis=0)
    v_each = Expand(Unsqueeze(v_rows, [3]), rows_wide)
    v_paths = Reshape(v_each, Concat([0, 0], key_heads, paths, [1], value_dim, axis=0))
    g_paths = Reshape(Expand(Unsqueeze(g_rows, [3]), path_split), g_row_shape)
    beta_paths = Reshape(Expand(Unsqueeze(beta_rows, [3]), path_split), g_row_shape)
    num_slots = Shape(q, start=0, end=1)
    all_states = Concat(num_slots, key_heads, num_nodes1, group, key_dim, value_dim, axis=0)
    path_states = Concat([0], key_heads, paths, key_dim, value_dim, axis=0)
    begin_paths = Reshape(Expand(Unsqueeze(replayed, [2]), all_states), path_states)
    path_ends = Scan<num_scan_inputs = 5, body = follow
      (float[b, h, p, i, j] held_p, float[b, h, o, o, i] k_p, float[b, h, p, o, j] v_p, float[b, h, p, o, o] g_p,
       float[b, h, p, o, o] beta_p, bool[b, o, p, o, o] is_seen_p) => (float[b, h, p, i, j] stays_p) {"""
    + _ROW.format("p")
    + """
        stays_p = Where(is_seen_p, next_p, held_p)
      }>(begin_paths, k_rows, v_paths, g_paths, beta_paths, seen_p)
    path_ends6 = Reshape(path_ends, all_states)
    answers_of_tree = q_rows @ Transpose(path_ends6, perm=[2, 0, 1, 3, 4, 5])

    ends_by_slot = Transpose(path_ends6, perm=[0, 2, 1, 3, 4, 5])
    sure_ends = GatherND(ends_by_slot, Unsqueeze(Max(sure_nodes - 1, 0), [1]), batch_dims=1)
    kept_ends = Where(Unsqueeze(sure_nodes > 0, [1, 2, 3, 4]), sure_ends, replayed)
    kept_of_tree = Reshape(kept_ends, state_shape)
"""
)

_SCANS = (
    """
    replayable = Slice(pending, [0], Max(ReduceMax(num_owed, keepdims=1), [1]), [1])
    is_owed = Range(0, Squeeze(Shape(replayable, start=1, end=2), [0]), 1) < Unsqueeze(num_owed, [1])
    owed = Where(Unsqueeze(is_owed, [2]), replayable, 0.0)
    k_owed = Transpose(Reshape(Slice(owed, [0], key_end, [2]), key_shape), perm=[1, 0, 2, 3, 4, 5])
    v_owed = Transpose(Reshape(Slice(owed, key_end, value_end, [2]), value_shape), perm=[1, 0, 2, 3, 4, 5])
    g_owed = Transpose(Reshape(Slice(owed, value_end, gate_end, [2]), gate_shape), perm=[1, 0, 2, 3, 4, 5])
    beta_owed = Transpose(Reshape(Slice(owed, gate_end, beta_end, [2]), gate_shape), perm=[1, 0, 2, 3, 4, 5])

    first = Reshape(Where(Unsqueeze(lengths == 0, [1, 2, 3]), 0.0, state), grouped_shape)
    replayed = Scan<num_scan_inputs = 4, body = replay
      (float[b, h, n, i, j] held_r, float[b, h, o, o, i] k_r, float[b, h, n, o, j] v_r, float[b, h, n, o, o] g_r,
       float[b, h, n, o, o] beta_r) => (float[b, h, n, i, j] next_r) {"""
    + _ROW.format("r")
    + """
      }>(first, k_owed, v_owed, g_owed, beta_owed)

    q_rows = Transpose(Reshape(q32, key_shape), perm=[1, 0, 2, 3, 4, 5])
    k_rows = Transpose(Reshape(k32, key_shape), perm=[1, 0, 2, 3, 4, 5])
    v_rows = Transpose(Reshape(v32, value_shape), perm=[1, 0, 2, 3, 4, 5])
    g_rows = Transpose(Reshape(g32, gate_shape), perm=[1, 0, 2, 3, 4, 5])
    beta_rows = Transpose(Reshape(beta32, gate_shape), perm=[1, 0, 2, 3, 4, 5])
    num_nodes1 = Shape(q, start=1, end=2)
    num_nodes = Squeeze(num_nodes1, [0])
    nodes = Range(0, num_nodes, 1)
    node_column = Unsqueeze(nodes, [1])
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
    is_sure = Unsqueeze(node_column < sure_nodes, [2, 3, 4, 5])
    last, kept, answers_of_chain = Scan<num_scan_inputs = 6, body = walk
      (float[b, h, n, i, j] held_w, float[b, h, n, i, j] kept_w, float[b, h, o, o, i] q_w, float[b, h, o, o, i] k_w,
       float[b, h, n, o, j] v_w, float[b, h, n, o, o] g_w, float[b, h, n, o, o] beta_w, bool[b, o, o, o, o] is_sure_w)
      => (float[b, h, n, i, j] next_w, float[b, h, n, i, j] stays_w, float[b, h, n, o, j] answer_w) {"""
    + _ROW.format("w")
    + """
        stays_w = Where(is_sure_w, next_w, kept_w)
        answer_w = q_w @ next_w
      }>(replayed, replayed, q_rows, k_rows, v_rows, g_rows, beta_rows, is_sure)
    kept_of_chain = Reshape(kept, state_shape)
      }>(is_tree)
    by_slot = Transpose(answers * attr.scale, perm=[1, 0, 2, 3, 4, 5])
    out = CastLike(Reshape(by_slot, Shape(v)), v)

    num_pending = Squeeze(Shape(pending, start=1, end=2), [0])
    """
    + MOVED_ROWS
    + """
    sample = Slice(Reshape(replayed, [-1]), [0], [1], [0])
    pending_updated = Where(is_row3, moved, float32(sample * sample < 0.0))
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
