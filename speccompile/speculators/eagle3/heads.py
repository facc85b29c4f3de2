# SPDX-License-Identifier: Apache-2.0
"""The EAGLE-3 drafter in torch: one decoder layer over (embedding of the next token, feature of this position).

The feature of a position that the target has read is fc(three residual streams of the target); that of a draft is
the drafter's own output behind its layer, before the norm. The layer has its own cache: row t belongs to the feature
of position t and the token at t + 1. After Li et al. 2025, "EAGLE-3" (arXiv 2503.01840), and the published code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from speccompile.export.layers import RmsNorm, SelfAttention, SwiGlu, attend, init_linear, join_heads

NUM_STREAMS = 3
Rows = tuple[torch.Tensor, torch.Tensor]  # keys and values [batch, kv_heads, rows, head_dim]


@dataclass(frozen=True)
class EagleSizes:
    """Sizes, with the names of config.json.

    Args:
        hidden_size: of the drafter.
        target_hidden_size: of the target.
        intermediate_size: of the MLP.
        num_attention_heads: of the layer.
        num_key_value_heads: of the layer.
        head_dim: of a head.
        vocab_size: of the target.
        draft_vocab_size: tokens that can be drafted.
        layers: decoder layers of the target whose residual streams are fused, from 0.
        rms_norm_eps: of the norms.
        rope_theta: base of the positions.
        norm_before_residual: the layer's residual is the normed feature.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    layers: tuple[int, ...]
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    norm_before_residual: bool = False


class MidLayer(nn.Module):
    """The decoder layer, whose attention reads two vectors side by side."""

    def __init__(self, sizes: EagleSizes) -> None:
        super().__init__()
        width, eps, heads = sizes.hidden_size, sizes.rms_norm_eps, sizes.num_attention_heads
        self.norm_before_residual = sizes.norm_before_residual
        self.hidden_norm, self.input_layernorm = RmsNorm(width, eps), RmsNorm(width, eps)
        self.self_attn = SelfAttention(
            2 * width, width, heads, sizes.num_key_value_heads, sizes.head_dim, sizes.rope_theta
        )
        self.post_attention_layernorm = RmsNorm(width, eps)
        self.mlp = SwiGlu(width, sizes.intermediate_size)

    def project(
        self, embedded: torch.Tensor, feature: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Residual [batch, nodes, hidden], queries, keys and values.

        Args:
            embedded: [batch, nodes, hidden], of the tokens behind the features.
            feature: [batch, nodes, hidden].
            positions: [batch, nodes] int64, of the features.
        """
        normed = self.hidden_norm(feature)
        both = torch.cat((self.input_layernorm(embedded), normed), -1)
        return (normed if self.norm_before_residual else feature, *self.self_attn.project(both, positions))

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The next feature: attended [batch, heads, nodes, head_dim] -> [batch, nodes, hidden]."""
        x = residual + self.self_attn.o_proj(join_heads(attended))
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHeads(nn.Module):
    """The drafter without embeddings, which are the target's; parameters and buffers have the checkpoint's names.

    Args:
        sizes: its sizes.
    """

    def __init__(self, sizes: EagleSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.fc = nn.Linear(NUM_STREAMS * sizes.target_hidden_size, sizes.hidden_size, bias=False)
        self.midlayer = MidLayer(sizes)
        self.norm = RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.lm_head = nn.Linear(sizes.hidden_size, sizes.draft_vocab_size, bias=False)
        if sizes.draft_vocab_size != sizes.vocab_size:
            self.register_buffer("d2t", torch.zeros(sizes.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(sizes.vocab_size, dtype=torch.bool))
        init_linear(self)

    def target_tokens(self) -> torch.Tensor | None:
        """[draft vocab] int64, the target's token of each draft token; None where the vocabularies are one."""
        offsets = getattr(self, "d2t", None)
        return None if offsets is None else offsets + torch.arange(len(offsets), device=offsets.device)

    def fuse(self, streams: Sequence[torch.Tensor]) -> torch.Tensor:
        """Features of positions that the target has read: three [..., target hidden] -> [..., hidden]."""
        return self.fc(torch.cat(tuple(streams), -1))

    def read(
        self, embedded: torch.Tensor, feature: torch.Tensor, positions: torch.Tensor, past: Rows | None, mask: Any
    ) -> tuple[torch.Tensor, Rows]:
        """The layer over new positions behind `past`; the way of inference.

        Args:
            embedded: [batch, nodes, hidden].
            feature: [batch, nodes, hidden].
            positions: [batch, nodes] int64.
            past: keys and values of earlier positions, None at the start.
            mask: bool [nodes, rows + nodes], None where every row is seen.

        Returns:
            Next features [batch, nodes, hidden], and all keys and values.
        """
        residual, q, k, v = self.midlayer.project(embedded, feature, positions)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        return self.midlayer.finish(residual, attend(q, k, v, mask)), (k, v)

    def extend(
        self,
        embedded: torch.Tensor,
        feature: torch.Tensor,
        places: torch.Tensor,
        context: Rows,
        chains: list[Rows],
    ) -> tuple[torch.Tensor, Rows]:
        """One more draft of many chains at once, each with a context of its own; the way of training.

        Args:
            embedded: [batch, starts, hidden], of the chains' last tokens.
            feature: [batch, starts, hidden], the drafter's own.
            places: [batch, starts] int64, the position at which each chain starts.
            context: keys and values of all positions of the text; a chain sees those up to its start.
            chains: keys and values [batch, kv_heads, starts, head_dim] of the drafts before.

        Returns:
            Next features [batch, starts, hidden], and the new rows of the chains.
        """
        residual, q, k, v = self.midlayer.project(embedded, feature, places + 1 + len(chains))
        group, scale = q.shape[1] // k.shape[1], 1 / math.sqrt(q.shape[-1])
        keys, values = (x.repeat_interleave(group, 1) for x in context)
        is_behind = torch.arange(keys.shape[2], device=q.device) > places[:, None, :, None]
        scores = [(q @ keys.transpose(2, 3)).float().masked_fill(is_behind, -math.inf) * scale]
        rows = [(ck.repeat_interleave(group, 1), cv.repeat_interleave(group, 1)) for ck, cv in [*chains, (k, v)]]
        scores += [(q * ck).float().sum(-1, keepdim=True) * scale for ck, _ in rows]
        probs = torch.cat(scores, -1).softmax(-1).to(q.dtype)
        attended = probs[..., : keys.shape[2]] @ values
        for i, (_, cv) in enumerate(rows):
            attended = attended + probs[..., keys.shape[2] + i, None] * cv
        return self.midlayer.finish(residual, attended), (k, v)
