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
    num_pending1 = Shape(pending, start=1, end=2)
    num_pending = Squeeze(num_pending1, [0])
    owed = Where(Unsqueeze(Range(0, num_pending, 1) < Unsqueeze(num_owed, [1]), [2]), pending, 0.0)
    whole = Concat(owed, rows, axis=1)
    row_key_shape = Concat([0, 0], key_heads, [1], key_dim, axis=0)
    row_value_shape = Concat([0, 0], key_heads, group, value_dim, axis=0)
    row_gate_shape = Concat([0, 0], key_heads, group, [1], axis=0)
    k_split = Reshape(Slice(whole, [0], key_end, [2]), row_key_shape)
    v_split = Reshape(Slice(whole, key_end, value_end, [2]), row_value_shape)
    g_split = Reshape(Slice(whole, value_end, gate_end, [2]), row_gate_shape)
    beta_split = Reshape(Slice(whole, gate_end, beta_end, [2]), row_gate_shape)
    k_all = Transpose(k_split, perm=[0, 2, 3, 1, 4])
    k_columns = Transpose(k_split, perm=[0, 2, 3, 4, 1])
    v_all = Transpose(v_split, perm=[0, 2, 3, 1, 4])
    g_all = Transpose(g_split, perm=[0, 2, 3, 1, 4])
    beta_all = Transpose(beta_split, perm=[0, 2, 3, 1, 4])
    q_nodes = Transpose(Reshape(q32, row_key_shape), perm=[0, 2, 3, 1, 4])

    first = Reshape(Where(Unsqueeze(lengths == 0, [1, 2, 3]), 0.0, state), grouped_shape)

    num_nodes = Squeeze(Shape(q, start=1, end=2), [0])
    at = Range(0, num_pending + num_nodes, 1)
    i = Unsqueeze(at, [1])
    j = Unsqueeze(at, [0])
    is_seen = j <= i
    sums = float32(is_seen) @ g_all
    decays = Exp(Where(is_seen, sums - Transpose(sums, perm=[0, 1, 2, 4, 3]), -1e30))
"""

_RULE = """
    wanted = (v_all - Exp(sums) * (k_all @ first)) * beta_all
    links = (k_all @ k_columns) * decays * beta_all
    x_1 = float32(i == j)
"""

_LEVEL = """
    links_{0} = Where((i / {1} == j / {1}) & (i / {0} > j / {0}), links, 0.0)
    x_{1} = x_{0} - x_{0} @ links_{0} @ x_{0}
"""

_SOLVED = """
    written_by = x_{0} @ wanted
"""

_NO_RULE = """
    written_by = v_all * beta_all
"""

# More rows than the inverse covers are NaN, which spoils all: they never give other numbers.
_OUT = """
    unknown = Constant<value_float = nan>()
    u = written_by + Where(i < {0}, 0.0, unknown)
    by_start = Exp(Slice(sums, num_pending1, [{1}], [3])) * (q_nodes @ first)
    both = by_start + ((q_nodes @ k_columns) * Slice(decays, num_pending1, [{1}], [3])) @ u
    out = CastLike(Reshape(Transpose(both * attr.scale, perm=[0, 3, 1, 2, 4]), Shape(v)), v)

    is_kept5 = Unsqueeze(at < Unsqueeze(sure_nodes, [1]) + num_pending, [1, 2, 4])
    ones = ConstantOfShape(Concat([1, 1, 1, 1], Shape(whole, start=1, end=2), axis=0), value=[1.0])
    kept_sum = ones @ Where(is_kept5, g_all, 0.0)
    kept_rows = Exp(Where(is_kept5, kept_sum - sums, -1e30)) * u
    state_updated = Reshape(Exp(kept_sum) * first + k_columns @ kept_rows, Shape(state))
"""

_PENDING = """
    pending_updated = Where(is_row3, moved, 0.0)
"""


def gated_delta_op(max_rows: int, delta: bool) -> Op:
    """Returns GatedDelta with a body without a loop for at most `max_rows`, pending ones included; more give NaN."""
    num_levels = max((max_rows - 1).bit_length(), 1)
    solved = _NO_RULE
    if delta:
        levels = "".join(_LEVEL.format(1 << level, 2 << level) for level in range(num_levels))
        solved = _RULE + levels + _SOLVED.format(1 << num_levels)
    made = _OUT.format(1 << num_levels, 2**31 - 1)
    return replace(GATED_DELTA, body=BODY_HEAD + _ROWS + solved + made + MOVED_ROWS + _PENDING)


def most_rows(max_pending: int, max_nodes: int) -> int:
    """Returns the most rows of a run: pending ones, and a chunk of a prompt or a step."""
    return max_pending + max(PREFILL_CHUNK, max_nodes)
