# SPDX-License-Identifier: Apache-2.0
"""The network of an EAGLE-3 or P-EAGLE drafter under training, for whole texts; `model.py` has the same for graphs.

It is decoder layers over (embedding of the next token, feature of this position); the first layer's attention reads
both side by side. The feature of a position that the target has read is fc(three residual streams of the target); that
of a draft is the drafter's own output after its layers, before the norm. EAGLE-3.1 norms each of the streams, and its
drafts read that output after the norm. Drafts of P-EAGLE read masks instead: the embedding of one token, and the
feature of trained states. Each layer has its own cache: row t belongs to the feature of position t and the token at
t + 1. After Li et al. 2025, "EAGLE-3" (arXiv 2503.01840), Hui et al. 2026, "P-EAGLE" (arXiv 2602.01469), and the
published code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from speccompile.export.layers import RmsNorm, SelfAttention, SwiGlu, attend, init_linear, join_heads
from speccompile.speculators.eagle3.layouts import MASK_TOKENS, NUM_STREAMS

KeyValues = tuple[torch.Tensor, torch.Tensor]  # [batch, kv_heads, rows, head_dim] each
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class EagleSizes:
    """Sizes, with the names of config.json.

    Args:
        layers: decoder layers of the target whose residual streams are fused, from 0.
        norm_before_residual: the first layer's residual is the normed feature.
        head_rank: inner width of an LM head that is two products; 0: one product.
        mask_token: of the masks that drafts read, as in P-EAGLE; None: they read the drafts before them.
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
    fc_norm: bool = False
    norm_output: bool = False
    head_rank: int = 0
    num_hidden_layers: int = 1
    mask_token: int | None = None


class FurtherLayer(nn.Module):
    """A decoder layer after the first one, with Llama's names."""

    def __init__(self, sizes: EagleSizes, width: int | None = None) -> None:
        super().__init__()
        hidden, eps, heads = sizes.hidden_size, sizes.rms_norm_eps, sizes.num_attention_heads
        self.input_layernorm = RmsNorm(hidden, eps)
        self.self_attn = SelfAttention(
            width or hidden, hidden, heads, sizes.num_key_value_heads, sizes.head_dim, sizes.rope_theta
        )
        self.post_attention_layernorm = RmsNorm(hidden, eps)
        self.mlp = SwiGlu(hidden, sizes.intermediate_size)

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries, keys and values: x [batch, nodes, hidden], positions [batch, nodes] int64."""
        return self.self_attn.project(self.input_layernorm(x), positions)

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output: attended [batch, heads, nodes, head_dim] -> [batch, nodes, hidden]."""
        x = residual + self.self_attn.o_proj(join_heads(attended))
        return x + self.mlp(self.post_attention_layernorm(x))


class MidLayer(FurtherLayer):
    """The first decoder layer, whose attention reads two vectors side by side."""

    def __init__(self, sizes: EagleSizes) -> None:
        super().__init__(sizes, 2 * sizes.hidden_size)
        self.norm_before_residual = sizes.norm_before_residual
        self.hidden_norm = RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def read(
        self, embedded: torch.Tensor, feature: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns residual [batch, nodes, hidden], queries, keys and values.

        Args:
            embedded: [batch, nodes, hidden], of the tokens after the features.
            feature: [batch, nodes, hidden].
            positions: [batch, nodes] int64, of the features.
        """
        normed = self.hidden_norm(feature)
        both = torch.cat((self.input_layernorm(embedded), normed), -1)
        return (normed if self.norm_before_residual else feature, *self.self_attn.project(both, positions))


class EagleHeads(nn.Module):
    """The drafter without embeddings, which are the target's; parameters and buffers have the checkpoint's names.

    The embedding of a mask is its own parameter; in a checkpoint it is a row of the embeddings.
    """

    def __init__(self, sizes: EagleSizes) -> None:
        super().__init__()
        self.sizes = sizes
        fused = NUM_STREAMS * sizes.target_hidden_size
        self.fc = nn.Linear(fused, sizes.hidden_size, bias=False)
        width, eps = sizes.target_hidden_size, sizes.rms_norm_eps
        self.fc_norm = nn.ModuleList(RmsNorm(width, eps) for _ in range(NUM_STREAMS)) if sizes.fc_norm else None
        self.midlayer = MidLayer(sizes)
        self.layers = nn.ModuleDict({str(i): FurtherLayer(sizes) for i in range(1, sizes.num_hidden_layers)})
        self.norm = RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)
        rank = sizes.head_rank
        self.lm_head_down = nn.Linear(sizes.hidden_size, rank, bias=False) if rank else nn.Identity()
        self.lm_head = nn.Linear(rank or sizes.hidden_size, sizes.draft_vocab_size, bias=False)
        if sizes.mask_token is not None:
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, fused))
            self.mask_embedding = nn.Parameter(torch.zeros(sizes.hidden_size))
        if sizes.draft_vocab_size != sizes.vocab_size:
            self.register_buffer("d2t", torch.zeros(sizes.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(sizes.vocab_size, dtype=torch.bool))
        init_linear(self)

    def target_tokens(self) -> torch.Tensor | None:
        """Returns [draft vocab] int64, the target's token of each draft token; None where the vocabularies are one."""
        offsets = getattr(self, "d2t", None)
        return None if offsets is None else offsets + torch.arange(len(offsets), device=offsets.device)

    def fuse(self, streams: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the features of positions that the target has read: three [..., target hidden] -> [..., hidden]."""
        if self.fc_norm is not None:
            streams = [norm(x) for norm, x in zip(self.fc_norm, streams, strict=True)]
        return self.fc(torch.cat(tuple(streams), -1))

    def masks(self, *dims: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns embeddings and features of masks, [*dims, hidden] each."""
        feature = self.fuse(self.mask_hidden.flatten().chunk(NUM_STREAMS))
        return self.mask_embedding.expand(*dims, -1), feature.expand(*dims, -1)

    def scored(self, features: torch.Tensor) -> torch.Tensor:
        """Returns what the LM head's last product reads of next features [..., hidden]."""
        return self.lm_head_down(features if self.sizes.norm_output else self.norm(features))

    def _advance(
        self, embedded: torch.Tensor, feature: torch.Tensor, positions: torch.Tensor, attended: Attend
    ) -> torch.Tensor:
        """Returns the next features of nodes.

        Args:
            embedded: [batch, nodes, hidden].
            feature: [batch, nodes, hidden].
            positions: [batch, nodes] int64.
            attended: (number of the layer, queries, keys, values) -> [batch, heads, nodes, head_dim].
        """
        x, *projected = self.midlayer.read(embedded, feature, positions)
        x = self.midlayer.finish(x, attended(0, *projected))
        for i, layer in enumerate(self.layers.values(), 1):
            x = layer.finish(x, attended(i, *layer.project(x, positions)))
        return self.norm(x) if self.sizes.norm_output else x

    def read(
        self,
        embedded: torch.Tensor,
        feature: torch.Tensor,
        positions: torch.Tensor,
        past: Sequence[KeyValues] | None,
        mask: Any,
    ) -> tuple[torch.Tensor, list[KeyValues]]:
        """Runs the layers over new positions after `past`, as inference does.

        Args:
            embedded: [batch, nodes, hidden].
            feature: [batch, nodes, hidden].
            positions: [batch, nodes] int64.
            past: keys and values of earlier positions in each layer, None at the start.
            mask: bool [nodes, rows + nodes], None where every row is seen.

        Returns:
            Next features [batch, nodes, hidden], and all keys and values of each layer.
        """
        held: list[KeyValues] = []

        def attended(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if past is not None:
                k, v = torch.cat((past[i][0], k), 2), torch.cat((past[i][1], v), 2)
            held.append((k, v))
            return attend(q, k, v, mask)

        return self._advance(embedded, feature, positions, attended), held

    def extend(
        self,
        embedded: torch.Tensor,
        feature: torch.Tensor,
        first_positions: torch.Tensor,
        context: Sequence[KeyValues],
        chains: Sequence[KeyValues] | None = None,
    ) -> tuple[torch.Tensor, list[KeyValues]]:
        """Runs further drafts of many chains at once, each with a context of its own, as training does.

        Args:
            embedded: [batch, starts, rows, hidden], of the tokens before the drafts.
            feature: [batch, starts, rows, hidden].
            first_positions: [batch, starts] int64, the position at which each chain starts.
            context: keys and values of all positions of the text in each layer; a chain sees those up to its start.
            chains: keys and values [batch, kv_heads, starts, drafts, head_dim] of the drafts before; None: there are
                none.

        Returns:
            Next features [batch, starts, rows, hidden], and `chains` with the new rows.
        """
        starts, rows = embedded.shape[1:3]
        first = 1 + (chains[0][0].shape[3] if chains else 0)
        positions = first_positions[..., None] + first + torch.arange(rows, device=first_positions.device)
        held: list[KeyValues] = []

        def attended(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.unflatten(2, (starts, rows)) for x in (q, k, v))
            if chains:
                k, v = torch.cat((chains[i][0], k), 3), torch.cat((chains[i][1], v), 3)
            held.append((k, v))
            return attend_from_starts(q, context[i], (k, v), first_positions).flatten(2, 3)

        x = self._advance(embedded.flatten(1, 2), feature.flatten(1, 2), positions.flatten(1), attended)
        return x.unflatten(1, (starts, rows)), held


def attend_from_starts(
    q: torch.Tensor, context: KeyValues, own: KeyValues, first_positions: torch.Tensor
) -> torch.Tensor:
    """Returns the attention of the last rows of chains, [batch, heads, starts, rows, head_dim].

    Args:
        q: [batch, heads, starts, rows, head_dim].
        context: keys and values [batch, kv_heads, positions, head_dim]; a chain sees those up to its start.
        own: of the chains [batch, kv_heads, starts, drafts, head_dim], those of q the last ones; a row sees the rows
            before it and itself.
        first_positions: [batch, starts] int64, the position at which each chain starts.
    """
    (keys, values), (k, v), (starts, rows, dim) = context, own, q.shape[2:]
    group, num = q.shape[1] // k.shape[1], keys.shape[2]
    q = q.unflatten(1, (-1, group))  # [batch, kv_heads, group, starts, rows, dim]
    past = (q.flatten(2, 4) @ keys.transpose(2, 3)).unflatten(2, (group, starts, rows)).float()
    is_later = torch.arange(num, device=q.device) > first_positions[..., None]  # [batch, starts, positions]
    past = past.masked_fill(is_later[:, None, None, :, None], -math.inf)
    mine = (q @ k[:, :, None].transpose(4, 5)).float()
    is_seen = torch.ones(rows, k.shape[3], dtype=torch.bool, device=q.device).tril(k.shape[3] - rows)
    mine = mine.masked_fill(~is_seen, -math.inf)
    probs = (torch.cat((past, mine), -1) * dim**-0.5).softmax(-1).to(v.dtype)
    mixed = (probs[..., :num].flatten(2, 4) @ values).unflatten(2, (group, starts, rows))
    return (mixed + probs[..., num:] @ v[:, :, None]).flatten(1, 2)


def config_from_sizes(sizes: EagleSizes) -> dict[str, Any]:
    """Returns the config.json of a drafter of these sizes."""
    mask = sizes.mask_token
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": sizes.hidden_size,
        "target_hidden_size": sizes.target_hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_hidden_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope_theta,
        "vocab_size": sizes.vocab_size,
        "draft_vocab_size": sizes.draft_vocab_size,
        "tie_word_embeddings": False,
        "norm_before_residual": sizes.norm_before_residual,
        **({"fc_norm": True} if sizes.fc_norm else {}),
        **({"norm_output": True} if sizes.norm_output else {}),
        **({"head_rank": sizes.head_rank} if sizes.head_rank else {}),
        **({} if mask is None else {"parallel_drafting": True, MASK_TOKENS[0]: mask}),
        # The published ids count states before layers: layer i's output is the state before i + 1.
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in sizes.layers],
    }
