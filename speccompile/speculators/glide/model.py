# SPDX-License-Identifier: Apache-2.0
"""The GLIDE drafter in torch: a small Llama whose layers also read the target's last cache.

A layer is self-attention, cross-attention to the keys and values of the target's last layer (no keys and values of
its own, no norm in front), and an MLP. After Du et al. 2024, "GliDe with a CaPE" (arXiv 2402.02082), and ColossalAI's
code, which takes the target's last cache and skips the cross-attention while it reads a prompt; here it never does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from speccompile.core.specs import ModelDims
from speccompile.export.attention import cached_attention, cross_attention, gather_nodes
from speccompile.export.cached_draft import RotaryTables
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
from speccompile.speculators.glide.checkpoint import GlideDims

Rows = tuple[torch.Tensor, torch.Tensor]  # keys and values [batch, kv_heads, rows, head_dim]

RANDOM_SEED = 0
LM_HEAD = "lm_head.weight"


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


class CompiledLayer(nn.Module):
    """A layer over static caches.

    Args:
        layer: with its weights.
        sizes: of the drafter.
    """

    def __init__(self, layer: GlideLayer, sizes: GlideSizes) -> None:
        super().__init__()
        self.layer, self.sizes = layer, sizes

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        step: tuple[torch.Tensor, torch.Tensor],
        own: tuple[torch.Tensor, torch.Tensor],
        target: tuple[torch.Tensor, torch.Tensor],
        limits: torch.Tensor,
        tables: tuple[RotaryTables, RotaryTables],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The stream behind the layer, and the two updated caches.

        Args:
            x: [batch, nodes, hidden].
            positions: [batch, nodes] int64.
            step: lengths and tree mask.
            own: caches of this layer.
            target: caches of the target's last layer.
            limits: [batch, nodes] int64: rows of these that each node sees.
            tables: of the drafter's own positions, and of the target's.
        """
        layer, sizes = self.layer, self.sizes
        normed, attention = layer.input_layernorm(x), layer.self_attn
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (split_heads(part(normed), sizes.head_dim) for part in parts)
        q, k = tables[0](q, positions), tables[0](k, positions)
        out, k_all, v_all = cached_attention(q, k, v, *own, *step, sizes.head_dim**-0.5, 0.0, 0)
        x = x + attention.o_proj(out.flatten(2))
        cross = layer.cross_attn
        q = tables[1](split_heads(cross.q_proj(x), sizes.target_head_dim), positions)
        x = x + cross.o_proj(cross_attention(q, *target, limits, sizes.target_head_dim**-0.5).flatten(2))
        return layer.feed_forward(x), k_all, v_all


class CompiledGlide(nn.Module):
    """The module that is traced: inputs of its decoder spec in order, its own caches as one list.

    A node at position p sees the target's rows in front of p, as far as the target has read: a draft at any depth
    sees what stands in front of its root, as in training. The first token of all has nothing in front; it sees row 0.

    Args:
        drafter: with its weights.
        lm_head: [vocab, hidden]; None: the embeddings.
        num_positions: that can occur.
    """

    def __init__(self, drafter: Glide, lm_head: torch.Tensor | None, num_positions: int) -> None:
        super().__init__()
        sizes = drafter.sizes
        self.embed_tokens, self.norm = drafter.model.embed_tokens, drafter.model.norm
        self.layers = nn.ModuleList(CompiledLayer(layer, sizes) for layer in drafter.model.layers)
        self.lm_head = self.embed_tokens.weight if lm_head is None else nn.Parameter(lm_head, requires_grad=False)
        self.own = RotaryTables(sizes.head_dim, sizes.rope_theta, num_positions)
        self.targets = RotaryTables(sizes.target_head_dim, sizes.target_rope_theta, num_positions)

    def forward(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        tree_mask: torch.Tensor,
        scored_nodes: torch.Tensor,
        target_lengths: torch.Tensor,
        target_k: torch.Tensor,
        target_v: torch.Tensor,
        caches: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Logits [batch, scored, vocab] and the updated caches."""
        positions = lengths.unsqueeze(1) + tree_mask.to(torch.int64).sum(-1) - 1
        limits = torch.minimum(target_lengths.unsqueeze(1), positions).clamp(min=1)
        x, updated = self.embed_tokens(tokens), []
        for index, layer in enumerate(self.layers):
            own = (caches[2 * index], caches[2 * index + 1])
            target, tables = (target_k, target_v), (self.own, self.targets)
            x, k_all, v_all = layer(x, positions, (lengths, tree_mask), own, target, limits, tables)
            updated += [k_all, v_all]
        return (nn.functional.linear(gather_nodes(self.norm(x), scored_nodes), self.lm_head), *updated)


def sizes_from_dims(dims: GlideDims, target: ModelDims) -> GlideSizes:
    """Sizes of the torch module."""
    return GlideSizes(
        hidden_size=dims.hidden_size,
        intermediate_size=dims.intermediate_size,
        num_layers=dims.num_layers,
        num_heads=dims.num_heads,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        vocab_size=dims.vocab_size,
        target_hidden_size=target.hidden_size,
        target_heads=dims.target_heads,
        target_kv_heads=dims.target_kv_heads,
        target_head_dim=dims.target_head_dim,
        rms_norm_eps=dims.rms_norm_eps,
        rope_theta=dims.rope_theta,
        target_rope_theta=dims.target_rope_theta,
    )


def make_drafter(sizes: GlideSizes, weights: Mapping[str, torch.Tensor] | None, num_positions: int) -> CompiledGlide:
    """The drafter in float32.

    Args:
        sizes: its sizes.
        weights: by their names in our layout; None: random ones, the same every time.
        num_positions: see `CompiledGlide`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RANDOM_SEED)
        drafter = Glide(sizes)
    lm_head = None
    if weights is not None:
        held = {name: tensor.to(torch.float32) for name, tensor in weights.items()}
        lm_head = held.pop(LM_HEAD, None)
        drafter.load_state_dict(held)
        shared = LM_HEAD in weights and torch.equal(weights[LM_HEAD], weights["model.embed_tokens.weight"])
        lm_head = None if shared else lm_head
    return CompiledGlide(drafter, lm_head, num_positions)
