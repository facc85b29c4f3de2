# SPDX-License-Identifier: Apache-2.0
"""The GLIDE drafter as it is compiled: a cache of its own, written in place, and the target's, which it reads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from speccompile.core.specs import ModelDims
from speccompile.export.attention import cached_attention, cross_attention, gather_nodes
from speccompile.export.cached_draft import RotaryTables
from speccompile.export.layers import split_heads
from speccompile.speculators.glide.heads import Glide, GlideLayer, GlideSizes
from speccompile.speculators.glide.sizes import GlideDims

RANDOM_SEED = 0
LM_HEAD = "lm_head.weight"


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
