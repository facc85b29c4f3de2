# SPDX-License-Identifier: Apache-2.0
"""The GLIDE drafter in torch: a small Llama whose layers also read the target's last cache.

A layer is self-attention, cross-attention to the keys and values of the target's last layer (no keys and values of
its own, no norm in front), and an MLP. After Du et al. 2024, "GliDe with a CaPE" (arXiv 2402.02082), and ColossalAI's
code, which takes the target's last cache and skips the cross-attention while it reads a prompt; here it never does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from speccompile.export.layers import (
    RmsNorm,
    SelfAttention,
    SwiGlu,
    attend,
    init_linear,
    join_heads,
    rotate,
    split_heads,
)

Rows = tuple[torch.Tensor, torch.Tensor]  # keys and values [batch, kv_heads, rows, head_dim]


@dataclass(frozen=True)
class GlideSizes:
    """Sizes.

    Args:
        hidden_size: of the drafter.
        intermediate_size: of its MLPs.
        num_layers: its layers.
        num_heads: of its self-attention.
        num_kv_heads: of its self-attention.
        head_dim: of its self-attention.
        vocab_size: of the target.
        target_hidden_size: of the target.
        target_heads: query heads of the target, which the cross-attention has, too.
        target_kv_heads: key heads of the target's cache.
        target_head_dim: of the target.
        rms_norm_eps: of the norms.
        rope_theta: base of the drafter's positions.
        target_rope_theta: base of the positions in the target's cache.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    target_hidden_size: int
    target_heads: int
    target_kv_heads: int
    target_head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    target_rope_theta: float = 10000.0


class CrossAttention(nn.Module):
    """Queries with the target's heads over the target's keys and values."""

    def __init__(self, sizes: GlideSizes) -> None:
        super().__init__()
        width = sizes.target_heads * sizes.target_head_dim
        self.head_dim, self.theta = sizes.target_head_dim, sizes.target_rope_theta
        self.q_proj = nn.Linear(sizes.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, sizes.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, target: Rows, mask: Any) -> torch.Tensor:
        """x [batch, nodes, hidden] over `target`; `mask` bool [batch, 1, nodes, rows], true where a row is seen."""
        q = rotate(split_heads(self.q_proj(x), self.head_dim), positions, self.theta)
        return self.o_proj(join_heads(attend(q, target[0], target[1], mask)))


class GlideLayer(nn.Module):
    """Self-attention, cross-attention, MLP, each added to the residual."""

    def __init__(self, sizes: GlideSizes) -> None:
        super().__init__()
        width, eps = sizes.hidden_size, sizes.rms_norm_eps
        self.input_layernorm = RmsNorm(width, eps)
        self.self_attn = SelfAttention(
            width, width, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.rope_theta
        )  # fmt: skip
        self.cross_attn = CrossAttention(sizes)
        self.post_attention_layernorm = RmsNorm(width, eps)
        self.mlp = SwiGlu(width, sizes.intermediate_size)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, past: Rows | None, mask: Any, target: Rows, target_mask: Any
    ) -> tuple[torch.Tensor, Rows]:
        """New positions behind `past`; see `Glide.forward`."""
        q, k, v = self.self_attn.project(self.input_layernorm(x), positions)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        x = x + self.self_attn.o_proj(join_heads(attend(q, k, v, mask)))
        x = x + self.cross_attn(x, positions, target, target_mask)
        return self.feed_forward(x), (k, v)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream behind the last part of the layer."""
        return x + self.mlp(self.post_attention_layernorm(x))


class GlideModel(nn.Module):
    """Embeddings, layers and norm, under the names of the checkpoint."""

    def __init__(self, sizes: GlideSizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(GlideLayer(sizes) for _ in range(sizes.num_layers))
        self.norm = RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)


class Glide(nn.Module):
    """The drafter; its LM head is its embeddings.

    Args:
        sizes: its sizes.
    """

    def __init__(self, sizes: GlideSizes) -> None:
        super().__init__()
        self.sizes, self.model = sizes, GlideModel(sizes)
        init_linear(self)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        past: list[Rows] | None,
        mask: Any,
        target: Rows,
        target_mask: Any,
    ) -> tuple[torch.Tensor, list[Rows]]:
        """New positions behind `past`.

        Args:
            tokens: [batch, nodes] int64.
            positions: [batch, nodes] int64, or one that broadcasts to it.
            past: own keys and values of each layer, None at the start.
            mask: bool [nodes, rows + nodes], None where every row is seen.
            target: the target's last cache, keys with their positions rotated in.
            target_mask: bool, broadcasts to [batch, 1, nodes, target rows]; None where every row is seen.

        Returns:
            [batch, nodes, hidden], what the LM head reads, and all keys and values.
        """
        x, held = self.model.embed_tokens(tokens), []
        for index, layer in enumerate(self.model.layers):
            x, rows = layer(x, positions, None if past is None else past[index], mask, target, target_mask)
            held.append(rows)
        return self.model.norm(x), held
