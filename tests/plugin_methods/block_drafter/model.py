# SPDX-License-Identifier: Apache-2.0
"""The drafter in torch.

Token i of a block is drafted from the token before the block and from an attention over the target's features of the
text; the drafts of a block do not see each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from speccompile.export.attention import cached_attention, gather_nodes

if TYPE_CHECKING:
    from tests.plugin_methods.block_drafter.checkpoint import BlockDims


class BlockDrafter(nn.Module):
    """The module that is traced, inputs in the order of its spec; its parameters have the names of the checkpoint.

    Args:
        dims: its sizes.
    """

    def __init__(self, dims: BlockDims) -> None:
        super().__init__()
        self.dims = dims
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(dims.hidden_size, dims.head_dim, bias=False) for _ in range(3)
        )
        self.out_proj = nn.Linear(dims.head_dim, dims.vocab_size, bias=False)
        self.successors = nn.Embedding(dims.vocab_size, dims.trained_size * dims.vocab_size)

    def forward(
        self,
        features: torch.Tensor,
        anchor: torch.Tensor,
        anchor_node: torch.Tensor,
        lengths: torch.Tensor,
        tree_mask: torch.Tensor,
        caches: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Returns tokens [batch, block] int64, and the updated caches."""
        q, k, v = (proj(features)[:, None] for proj in (self.q_proj, self.k_proj, self.v_proj))
        scale = self.dims.head_dim**-0.5
        out, keys, values = cached_attention(q, k, v, *caches, lengths, tree_mask, scale, 0.0, 0)
        context = gather_nodes(out.flatten(2), anchor_node[:, None])  # [batch, 1, head_dim]
        rows = self.successors(anchor).reshape(-1, self.dims.trained_size, self.dims.vocab_size)
        logits = rows[:, : self.dims.block_size] + self.out_proj(context)
        return logits.argmax(-1), keys, values


def make_drafter(dims: BlockDims, weights: Mapping[str, torch.Tensor] | None) -> BlockDrafter:
    """Returns the drafter in float32; without weights a random one, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = BlockDrafter(dims)
    if weights is not None:
        drafter.load_state_dict({name: tensor.to(torch.float32) for name, tensor in weights.items()})
    return drafter.requires_grad_(False).eval()
