# SPDX-License-Identifier: Apache-2.0
"""GatedDelta without a loop, for GPUs: all pending rows and nodes of a step at once, by products of matrices.

Rows i of a step, the pending ones that count first, are solved together (Yang et al., arXiv 2412.06464, section 3.3).
With G the running sum of g and D_ij = exp(G_i - G_j), the rows that the delta rule writes, u, follow from

    (I + A) u = beta (v - exp(G) S^T k),    A_ij = beta_i (k_i . k_j) D_ij for j < i, otherwise 0
    out_i = scale (exp(G_i) S^T q_i + sum over j <= i of (q_i . k_j) D_ij u_j)
    S' = exp(G_n) S + sum over j <= n of exp(G_n - G_j) k_j u_j^T,    n the last row that is applied

I + A is inverted by blocks of 1, 2, 4, ... rows: where X has the inverses of the diagonal blocks and A_s the part of A
between the halves of a pair, X - X A_s X has those of the pairs. (The product (I - A)(I + A^2)(I + A^4)... cancels
where keys are alike.) Without the delta rule A is 0 and u = beta v. Sums are in float32 and see other rows of the slot:
a step of k nodes equals k single steps to rounding, not in bits. Nodes are a chain: `tree_mask` is not read.
"""

from __future__ import annotations

from dataclasses import replace

from speccompile.core.jobs import PREFILL_CHUNK
from speccompile.ops.gated_delta import BODY_HEAD, GATED_DELTA, MOVED_ROWS
from speccompile.ops.op import Op

# Void pending rows have g = 0 and beta = 0: they change nothing. k is [batch, key_heads, 1, rows, key_dim], v
# [batch, key_heads, group, rows, value_dim].
_ROWS = """
    num_pending1 = Shape<start = 1, end = 2>(pending)
    num_pending = Squeeze(num_pending1, nowhere)
    num_nodes1 = Shape<start = 1, end = 2>(q)
    num_nodes = Squeeze(num_nodes1, nowhere)
    places = Range(none, num_pending, one)
    owed_column = Unsqueeze(num_owed, second)
    is_owed = Less(places, owed_column)
    is_owed3 = Unsqueeze(is_owed, last_axis)
    owed = Where(is_owed3, pending, nothing)
    whole = Concat<axis = 1>(owed, rows)
    k3 = Slice(whole, nowhere, key_end, last_axis)
    v3 = Slice(whole, key_end, value_end, last_axis)
    g3 = Slice(whole, value_end, gate_end, last_axis)
    beta3 = Slice(whole, gate_end, beta_end, last_axis)
    row_key_shape = Concat<axis = 0>(kept_dims, key_heads, unit, key_dim)
    row_value_shape = Concat<axis = 0>(kept_dims, key_heads, group, value_dim)
    row_gate_shape = Concat<axis = 0>(kept_dims, key_heads, group, unit)
    k_split = Reshape(k3, row_key_shape)
    v_split = Reshape(v3, row_value_shape)
    g_split = Reshape(g3, row_gate_shape)
    beta_split = Reshape(beta3, row_gate_shape)
    q_split = Reshape(q32, row_key_shape)
    k_all = Transpose<perm = [0, 2, 3, 1, 4]>(k_split)
    k_columns = Transpose<perm = [0, 2, 3, 4, 1]>(k_split)
    v_all = Transpose<perm = [0, 2, 3, 1, 4]>(v_split)
    g_all = Transpose<perm = [0, 2, 3, 1, 4]>(g_split)
    beta_all = Transpose<perm = [0, 2, 3, 1, 4]>(beta_split)
    q_nodes = Transpose<perm = [0, 2, 3, 1, 4]>(q_split)

    is_new = Equal(lengths, none)
    is_new4 = Unsqueeze(is_new, inner_of_slot)
    started = Where(is_new4, nothing, state)
    first = Reshape(started, grouped_shape)

    num_rows = Add(num_pending, num_nodes)
    at = Range(none, num_rows, one)
    i = Unsqueeze(at, second)
    j = Unsqueeze(at, nowhere)
    is_seen = LessOrEqual(j, i)
    seen = Cast<to = 1>(is_seen)
    sums = MatMul(seen, g_all)
    sum_columns = Transpose<perm = [0, 1, 2, 4, 3]>(sums)
    gaps = Sub(sums, sum_columns)
    never = Constant<value_float = -1e30>()
    seen_gaps = Where(is_seen, gaps, never)
    decays = Exp(seen_gaps)
"""

_RULE = """
    from_start = Exp(sums)
    start_values = MatMul(k_all, first)
    decayed = Mul(from_start, start_values)
    left = Sub(v_all, decayed)
    wanted = Mul(left, beta_all)
    alike = MatMul(k_all, k_columns)
    met = Mul(alike, decays)
    links = Mul(met, beta_all)
    is_same = Equal(i, j)
    x_1 = Cast<to = 1>(is_same)
"""

_LEVEL = """
    size_{0} = Constant<value_int = {0}>()
    pair_{0} = Constant<value_int = {1}>()
    i_half_{0} = Div(i, size_{0})
    j_half_{0} = Div(j, size_{0})
    i_pair_{0} = Div(i, pair_{0})
    j_pair_{0} = Div(j, pair_{0})
    is_pair_{0} = Equal(i_pair_{0}, j_pair_{0})
    is_lower_{0} = Greater(i_half_{0}, j_half_{0})
    is_link_{0} = And(is_pair_{0}, is_lower_{0})
    links_{0} = Where(is_link_{0}, links, nothing)
    met_{0} = MatMul(x_{0}, links_{0})
    change_{0} = MatMul(met_{0}, x_{0})
    x_{1} = Sub(x_{0}, change_{0})
"""

_SOLVED = """
    written_by = MatMul(x_{0}, wanted)
"""

_NO_RULE = """
    written_by = Mul(v_all, beta_all)
"""

# More rows than the inverse covers are NaN, which spoils all: they never give other numbers.
_OUT = """
    most_rows = Constant<value_int = {0}>()
    fits = Less(i, most_rows)
    unknown = Constant<value_float = nan>()
    zero = Where(fits, nothing, unknown)
    u = Add(written_by, zero)
    far = Constant<value_ints = [{1}]>()
    row_axis = Constant<value_ints = [3]>()
    node_decays = Slice(decays, num_pending1, far, row_axis)
    node_sums = Slice(sums, num_pending1, far, row_axis)
    matches = MatMul(q_nodes, k_columns)
    weights = Mul(matches, node_decays)
    by_rows = MatMul(weights, u)
    by_state = MatMul(q_nodes, first)
    node_starts = Exp(node_sums)
    by_start = Mul(node_starts, by_state)
    both = Add(by_start, by_rows)
    scaled = Mul(both, scale_asked)
    by_slot = Transpose<perm = [0, 3, 1, 2, 4]>(scaled)
    out_shape = Shape(v)
    out32 = Reshape(by_slot, out_shape)
    out = CastLike(out32, v)

    sure_column = Unsqueeze(sure_nodes, second)
    num_kept = Add(sure_column, num_pending)
    is_kept = Less(at, num_kept)
    columns = Constant<value_ints = [1, 2, 4]>()
    is_kept5 = Unsqueeze(is_kept, columns)
    kept_gates = Where(is_kept5, g_all, nothing)
    ones_shape = Concat<axis = 0>(unit, unit, unit, unit, num_rows1)
    ones = ConstantOfShape<value = float[1] {{1.0}}>(ones_shape)
    kept_sum = MatMul(ones, kept_gates)
    kept_gaps = Sub(kept_sum, sums)
    shown_gaps = Where(is_kept5, kept_gaps, never)
    kept_decays = Exp(shown_gaps)
    kept_rows = Mul(kept_decays, u)
    written = MatMul(k_columns, kept_rows)
    start_decay = Exp(kept_sum)
    kept_start = Mul(start_decay, first)
    kept_state = Add(kept_start, written)
    state_shape = Shape(state)
    state_updated = Reshape(kept_state, state_shape)

"""

_PENDING = """
    pending_updated = Where(is_row3, moved, nothing)
"""


def gated_delta_op(max_rows: int, delta: bool) -> Op:
    """Returns GatedDelta with a body without a loop for at most `max_rows`, pending ones included; more give NaN."""
    num_levels = max((max_rows - 1).bit_length(), 1)
    solved = _NO_RULE
    if delta:
        levels = "".join(_LEVEL.format(1 << level, 2 << level) for level in range(num_levels))
        solved = _RULE + levels + _SOLVED.format(1 << num_levels)
    counted = "    num_rows1 = Shape<start = 1, end = 2>(whole)\n"
    made = _OUT.format(1 << num_levels, 2**31 - 1)
    return replace(GATED_DELTA, body=BODY_HEAD + _ROWS + counted + solved + made + MOVED_ROWS + _PENDING)


def most_rows(max_pending: int, max_nodes: int) -> int:
    """Returns the most rows of a run: pending ones, and a chunk of a prompt or a step."""
    return max_pending + max(PREFILL_CHUNK, max_nodes)
