# SPDX-License-Identifier: Apache-2.0
"""The GLIDE drafter in torch: a small Llama whose layers also read the target's last cache.

Each layer has a cross-attention to it between self-attention and MLP, without a norm before it. After Du et al. 2024,
"GliDe with a CaPE" (arXiv 2402.02082), and ColossalAI's code, which skips it in prompts; here it never is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from speccompile.export.attention import cached_attention, cross_attention, gather_nodes
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
from speccompile.export.own_drafts import RotaryTables
from speccompile.speculators.glide.config import GlideDims

KeyValues = tuple[torch.Tensor, torch.Tensor]  # [batch, kv_heads, rows, head_dim] each

RANDOM_SEED = 0
LM_HEAD = "lm_head.weight"


class CrossAttention(nn.Module):
    """Projections with the target's heads; keys and values are the target's."""

    def __init__(self, sizes: GlideDims) -> None:
        super().__init__()
        width = sizes.target_heads * sizes.target_head_dim
        self.q_proj = nn.Linear(sizes.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, sizes.hidden_size, bias=False)


class Text(Protocol):
    """The keys and values that new nodes attend to, and which of them each node sees."""

    def attend(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Adds the rows of layer `index` and attends to all of its rows: [batch, nodes, heads * head_dim].

        `q` is [batch, heads, nodes, head_dim], `k` and `v` [batch, kv_heads, nodes, head_dim], without positions.
        """
        ...

    def attend_target(self, q: torch.Tensor) -> torch.Tensor:
        """Attends to the target's last cache: q [batch, heads, nodes, head_dim] -> [batch, nodes, heads * head_dim]."""
        ...


class GlideLayer(nn.Module):
    """Self-attention, cross-attention, MLP, each added to the residual."""

    def __init__(self, sizes: GlideDims, index: int) -> None:
        super().__init__()
        width, eps, self.index = sizes.hidden_size, sizes.rms_norm_eps, index
        self.head_dim, self.target_head_dim = sizes.head_dim, sizes.target_head_dim
        self.input_layernorm = RmsNorm(width, eps)
        self.self_attn = SelfAttention(
            width, width, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.rope_theta
        )  # fmt: skip
        self.cross_attn = CrossAttention(sizes)
        self.post_attention_layernorm = RmsNorm(width, eps)
        self.mlp = SwiGlu(width, sizes.intermediate_size)

    def forward(self, x: torch.Tensor, text: Text) -> torch.Tensor:
        """Returns the stream [batch, nodes, hidden] after the layer."""
        normed, attention, cross = self.input_layernorm(x), self.self_attn, self.cross_attn
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (split_heads(part(normed), self.head_dim) for part in parts)
        x = x + attention.o_proj(text.attend(self.index, q, k, v))
        x = x + cross.o_proj(text.attend_target(split_heads(cross.q_proj(x), self.target_head_dim)))
        return x + self.mlp(self.post_attention_layernorm(x))


class GlideModel(nn.Module):
    """Embeddings, layers and norm, under the names of the checkpoint."""

    def __init__(self, sizes: GlideDims) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(GlideLayer(sizes, index) for index in range(sizes.num_layers))
        self.norm = RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)


class Glide(nn.Module):
    """The drafter, as it is trained and as it is compiled; its LM head is its embeddings."""

    def __init__(self, sizes: GlideDims) -> None:
        super().__init__()
        self.sizes, self.model = sizes, GlideModel(sizes)
        init_linear(self)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, text: Text) -> torch.Tensor:
        """Returns what the LM head reads: tokens [batch, nodes] int64 -> [batch, nodes, hidden]."""
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, text)
        return self.model.norm(x)


class WholeText:
    """A `Text` whose rows are tensors of this run and of the one before, as in training; `rows` has the new ones last.

    Args:
        positions: [batch, nodes] int64, or one that broadcasts to it.
        target: the target's last cache, keys with their positions rotated in.
        target_mask: bool, broadcasts to [batch, 1, nodes, target rows]; None where every row is seen.
        past: own keys and values of each layer from before; none at the start.
        mask: bool [nodes, rows + nodes]; None where every row is seen.
    """

    def __init__(
        self,
        sizes: GlideDims,
        positions: torch.Tensor,
        target: KeyValues,
        target_mask: torch.Tensor | None = None,
        past: Sequence[KeyValues] = (),
        mask: torch.Tensor | None = None,
    ) -> None:
        self.sizes, self.positions, self.past, self.mask = sizes, positions, past, mask
        self.target, self.target_mask = target, target_mask
        self.rows: list[KeyValues] = []

    def attend(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k = (rotate(x, self.positions, self.sizes.rope_theta) for x in (q, k))
        if self.past:
            k, v = torch.cat((self.past[index][0], k), 2), torch.cat((self.past[index][1], v), 2)
        self.rows.append((k, v))
        return join_heads(attend(q, k, v, self.mask))

    def attend_target(self, q: torch.Tensor) -> torch.Tensor:
        q = rotate(q, self.positions, self.sizes.target_rope_theta)
        return join_heads(attend(q, *self.target, self.target_mask))


class CachedStep:
    """A `Text` of a step over static caches, as in graphs; `updated` are own caches with the new rows.

    A node at position p sees the target's rows before p, as far as the target has read: those before its root, as in
    training. The first token of a text sees row 0.

    Args:
        tables: of the drafter's own positions, and of the target's.
        lengths: [batch] int64, rows in use.
        tree_mask: [batch, nodes, nodes] bool.
        caches: own K and V of each layer in order.
        target: caches of the target's last layer.
        target_lengths: [batch] int64, rows in use of these.
    """

    def __init__(
        self,
        tables: tuple[RotaryTables, RotaryTables],
        lengths: torch.Tensor,
        tree_mask: torch.Tensor,
        caches: Sequence[torch.Tensor],
        target: KeyValues,
        target_lengths: torch.Tensor,
    ) -> None:
        self.tables, self.lengths, self.tree_mask, self.caches, self.target = tables, lengths, tree_mask, caches, target
        self.positions = lengths.unsqueeze(1) + (tree_mask.to(torch.int64).sum(-1) - 1)
        self.limits = torch.minimum(target_lengths.unsqueeze(1), self.positions).clamp(min=1)
        self.updated: list[torch.Tensor] = []

    def attend(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k = (self.tables[0](x, self.positions) for x in (q, k))
        own, scale = self.caches[2 * index : 2 * index + 2], q.shape[-1] ** -0.5
        out, *updated = cached_attention(q, k, v, *own, self.lengths, self.tree_mask, scale, 0.0, 0)
        self.updated += updated
        return out.flatten(2)

    def attend_target(self, q: torch.Tensor) -> torch.Tensor:
        q = self.tables[1](q, self.positions)
        return cross_attention(q, *self.target, self.limits, q.shape[-1] ** -0.5).flatten(2)


class CompiledGlide(nn.Module):
    """The module that is traced: inputs of its decoder spec in order, its own caches as one list.

    Args:
        lm_head: [vocab, hidden]; None: the embeddings.
    """

    def __init__(self, drafter: Glide, lm_head: torch.Tensor | None, num_positions: int) -> None:
        super().__init__()
        self.drafter, sizes, table = drafter, drafter.sizes, drafter.model.embed_tokens.weight
        self.lm_head = table if lm_head is None else nn.Parameter(lm_head, requires_grad=False)
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
        """Returns the logits [batch, scored, vocab] and the updated caches."""
        tables, target = (self.own, self.targets), (target_k, target_v)
        step = CachedStep(tables, lengths, tree_mask, caches, target, target_lengths)
        states = gather_nodes(self.drafter(tokens, step), scored_nodes)
        return (nn.functional.linear(states, self.lm_head), *step.updated)


def make_drafter(sizes: GlideDims, weights: Mapping[str, torch.Tensor] | None, num_positions: int) -> CompiledGlide:
    """Returns the drafter in float32; `weights` by canonical name, None: random ones, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RANDOM_SEED)
        drafter = Glide(sizes)
    lm_head = None
    if weights is not None:
        tensors = {name: tensor.to(torch.float32) for name, tensor in weights.items()}
        lm_head = tensors.pop(LM_HEAD, None)
        drafter.load_state_dict(tensors)
        shared = LM_HEAD in weights and torch.equal(weights[LM_HEAD], weights["model.embed_tokens.weight"])
        lm_head = None if shared else lm_head
    return CompiledGlide(drafter, lm_head, num_positions)
