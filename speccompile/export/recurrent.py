# SPDX-License-Identifier: Apache-2.0
"""`speccompile::GatedDelta` and `speccompile::ConvRows` as torch ops, which compute what the numpy twins do."""

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
    """Applies the accepted pending rows to the state, then answers the nodes of each path one after the other.

    Arguments and results are those of `ops.gated_delta.gated_delta`.
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
    """Convolves each node's raw row with those before it, channel by channel; as `ops.conv_rows.conv_rows`."""
    tensors = (x, weight, bias, rows, lengths, state_lengths, sure_nodes, tree_mask)
    out, new_rows = _twin_of(conv_rows_op.CONV_ROWS, tensors, activation=activation)
    return out, new_rows


@conv_rows.register_fake
def _(x, weight, bias, rows, lengths, state_lengths, sure_nodes, tree_mask, activation):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), torch.empty_like(rows)
