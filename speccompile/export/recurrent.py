# SPDX-License-Identifier: Apache-2.0
"""`speccompile::GatedDelta` and `speccompile::ConvRows` as torch ops, for layers with recurrent states.

They compute what the numpy twins do. Their state inputs are what the engine keeps: see `speccompile.ops.gated_delta`
and `speccompile.ops.conv_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from speccompile.ops import conv_rows as conv_rows_op
from speccompile.ops import gated_delta as gated_delta_op
from speccompile.ops.op import Op

__all__ = ["conv_rows", "gated_delta"]


def _twin_of(op: Op, tensors: Sequence[torch.Tensor], **attributes: int | float) -> list[torch.Tensor]:
    outputs = op.twin(*(tensor.detach().numpy() for tensor in tensors), **attributes)
    return [torch.from_numpy(array) for array in outputs]


@torch.library.custom_op("speccompile::gated_delta", mutates_args=())
def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    pending: torch.Tensor,
    lengths: torch.Tensor,
    state_lengths: torch.Tensor,
    sure_nodes: torch.Tensor,
    tree_mask: torch.Tensor,
    num_key_heads: int,
    num_value_heads: int,
    scale: float,
    delta: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply the accepted pending rows to the state, then answer the nodes of each path one after the other.

    Args:
        q: [batch, nodes, num_key_heads * key_dim] float32; `k` alike.
        k: see `q`; normalised already where the model normalises it.
        v: [batch, nodes, num_value_heads * value_dim] float32.
        g: [batch, nodes, num_value_heads] float32, logarithm of the decay; `beta` alike.
        state: [batch, num_value_heads, key_dim, value_dim] float32.
        pending: [batch, pending, width] float32, rows of k | v | g | beta.
        lengths: [batch] int64, tokens of the sequence.
        state_lengths: [batch] int64, those that the state holds.
        sure_nodes: [batch] int64, the first nodes, a chain, which are applied to the state.
        tree_mask: [batch, nodes, nodes] bool, row i is true at i and at its ancestors.
        delta: 1: the delta rule; 0: none.

    Returns:
        out [batch, nodes, num_value_heads * value_dim], the updated state and the updated pending rows.
    """
    tensors = (q, k, v, g, beta, state, pending, lengths, state_lengths, sure_nodes, tree_mask)
    heads = {"num_key_heads": num_key_heads, "num_value_heads": num_value_heads}
    out, new_state, new_pending = _twin_of(gated_delta_op.GATED_DELTA, tensors, **heads, scale=scale, delta=delta)
    return out, new_state, new_pending


@gated_delta.register_fake
def _(q, k, v, g, beta, state, pending, *others):  # type: ignore[no-untyped-def]
    return torch.empty_like(v), torch.empty_like(state), torch.empty_like(pending)


@torch.library.custom_op("speccompile::conv_rows", mutates_args=())
def conv_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    state_lengths: torch.Tensor,
    sure_nodes: torch.Tensor,
    tree_mask: torch.Tensor,
    activation: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve each node's raw row with those before it, channel by channel.

    Args:
        x: [batch, nodes, channels] float32.
        weight: [channels, kernel] float32; the last column belongs to the row itself.
        bias: [channels] float32, zeros where the model has none.
        rows: [batch, kernel - 1 + pending, channels] float32: raw rows of the state, then the pending ones.
        lengths: [batch] int64, tokens of the sequence.
        state_lengths: [batch] int64, those that the state holds.
        sure_nodes: [batch] int64, the first nodes, a chain, which are applied.
        tree_mask: [batch, nodes, nodes] bool, row i is true at i and at its ancestors.
        activation: 0: none; 1: SiLU.

    Returns:
        out as x, and the updated rows.
    """
    tensors = (x, weight, bias, rows, lengths, state_lengths, sure_nodes, tree_mask)
    out, new_rows = _twin_of(conv_rows_op.CONV_ROWS, tensors, activation=activation)
    return out, new_rows


@conv_rows.register_fake
def _(x, weight, bias, rows, lengths, state_lengths, sure_nodes, tree_mask, activation):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), torch.empty_like(rows)
