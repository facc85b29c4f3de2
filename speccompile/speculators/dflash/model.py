# SPDX-License-Identifier: Apache-2.0
"""The drafter as its two graphs compute it: features of the target's states, and a block's candidates and scores.

After the published DFlash (block diffusion over target states), DFlash 2 (dynamic convolutions, a selector over
candidates), DSpark (a Markov head), LiLiCorr and Domino (`heads.py`), with z-lab's names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from speccompile.core.specs import GraphSpec
from speccompile.export.attention import cached_attention, gather_nodes
from speccompile.export.candidates import top_tokens
from speccompile.export.draft_vocab import target_tokens
from speccompile.export.feature_draft import fill_weights, has_qkv_bias, layer_config
from speccompile.graph_kinds.features import FeatureDims
from speccompile.speculators.dflash.drafter import Drafter
from speccompile.speculators.dflash.heads import LatticeCorrector, PathTerms, block_weights


class DynamicConv(nn.Module):
    """Two causal convolutions along a block, before and after a sublayer, each channel's taps from its own row.

    out[t, c] = sum over i of (base[side, i, c] + dynamic[t, side, i, c / group]) x[t - i, c]; no row before the block.
    """

    def __init__(self, hidden: int, drafter: Drafter) -> None:
        super().__init__()
        self.taps, self.group = drafter.taps, drafter.group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * self.taps * hidden // self.group, bias=False)

    def kernels(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the dynamic parts [batch, rows, 2, taps, groups] of rows x [batch, rows, hidden]."""
        return self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))

    def forward(self, x: torch.Tensor, kernels: torch.Tensor, side: int) -> torch.Tensor:
        """Returns x [batch, rows, hidden] after the convolution before (0) or after (1) the sublayer."""
        rows = x.unflatten(-1, (-1, self.group))  # [batch, rows, groups, group]
        base = self.base_kernel[side].unflatten(-1, (-1, self.group))
        out = (base[0] + kernels[:, :, side, 0, :, None]) * rows
        for tap in range(1, min(self.taps, x.shape[1])):
            earlier = torch.cat((torch.zeros_like(rows[:, :tap]), rows[:, :-tap]), 1)
            out = out + (base[tap] + kernels[:, :, side, tap, :, None]) * earlier
        return out.flatten(2)


class BlockAttention(nn.Module):
    """Attention of a block to the context and to itself, over caches; context rows give keys and values alone."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, self.head_dim, bias = config.hidden_size, config.head_dim, has_qkv_bias(config.to_dict())
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(width, keys, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(queries, width, bias=bool(config.attention_bias))
        self.q_norm, self.k_norm = (LlamaRMSNorm(self.head_dim, config.rms_norm_eps) for _ in range(2))

    def forward(
        self,
        rows: torch.Tensor,
        num_context: int,
        angles: tuple[torch.Tensor, torch.Tensor],
        caches: list[torch.Tensor],
        lengths: torch.Tensor,
        mask: torch.Tensor,
        window: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the block's output [batch, block, hidden] and the updated caches.

        Args:
            rows: [batch, context + block, hidden].
            lengths: [batch] int64, rows in use.
            mask: [batch, rows, rows] bool, what each row sees.
            window: 0 = none.
        """
        q, k, v = (part(rows).unflatten(-1, (-1, self.head_dim)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *angles)
        scale = self.head_dim**-0.5
        out, keys, values = cached_attention(q, k, v.transpose(1, 2), *caches, lengths, mask, scale, 0.0, window)
        return self.o_proj(out.flatten(2)[:, num_context:]), keys, values


class BlockLayer(nn.Module):
    """A decoder layer over a block."""

    def __init__(self, config: LlamaConfig, drafter: Drafter) -> None:
        super().__init__()
        width = config.hidden_size
        self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(width, config.rms_norm_eps) for _ in range(2)
        )
        self.self_attn, self.mlp = BlockAttention(config), LlamaMLP(config)
        self.attention_conv = DynamicConv(width, drafter) if drafter.taps else None
        self.mlp_conv = DynamicConv(width, drafter) if drafter.taps else None

    def forward(self, x: torch.Tensor, attend: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Returns the block's next rows; `attend` makes of the attention's input, the rows of x, its output."""
        x = x + around(self.attention_conv, self.input_layernorm(x), attend)
        return x + around(self.mlp_conv, self.post_attention_layernorm(x), self.mlp)


def around(conv: DynamicConv | None, x: torch.Tensor, inner: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns what a sublayer makes of its normed input, with the convolutions around it, if there are any."""
    if conv is None:
        return inner(x)
    kernels = conv.kernels(x)
    return conv(inner(conv(x, kernels, 0)), kernels, 1)


class CandidateSelector(nn.Module):
    """Scores of pairs of neighbouring candidates, by a product of low rank that depends on the slot's state."""

    def __init__(self, hidden: int, vocab: int, draft_vocab: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.empty(draft_vocab, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def forward(self, hidden: torch.Tensor, before: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        """Returns scores [batch, slots, before, candidates] of hidden [batch, slots, hidden].

        Args:
            before: [batch, slots, before] int64, the target's tokens.
            drafted: [batch, slots, candidates] int64, draft tokens.
        """
        left = self.predecessor_codebook[before] * self.hidden_projection(hidden)[:, :, None]
        return left @ self.successor_codebook[drafted].transpose(2, 3)


class MarkovHead(nn.Module):
    """Scores of pairs of neighbouring candidates, by a product of low rank: logits after each token alone."""

    def __init__(self, dims: FeatureDims, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(dims.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, dims.draft_vocab_size, bias=False)

    def forward(self, hidden: torch.Tensor, before: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        return self.markov_w1(before) @ self.markov_w2.weight[drafted].transpose(2, 3)


class BlockDraft(nn.Module):
    """The module that is traced: inputs and outputs as in `block_draft_spec`, the caches as a list.

    Args:
        target_tokens: [draft_vocab] int64: the target's token of each; None where they are the same.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        drafter: Drafter,
        dims: FeatureDims,
        spec: GraphSpec,
        target_tokens: torch.Tensor | None,
    ) -> None:
        super().__init__()
        layer = layer_config(config)
        self.drafter, self.num_drafts, self.num_candidates = drafter, spec.num_drafts, spec.num_candidates
        self.num_masks, self.target_tokens = drafter.num_masks(spec.num_drafts), target_tokens
        # Layers over candidates read as many as they were trained with, whatever is given.
        self.num_ranked = drafter.corrector.num_candidates if drafter.corrector else spec.num_candidates
        # Rows of a block that is not causal have one position in the op, that of the last: all see the root's window.
        wide = [w + (0 if c else self.num_masks) for w, c in zip(drafter.windows, drafter.is_causal, strict=True)]
        # A window that holds a whole sequence is none.
        self.windows = [w if 0 < own < spec.max_rows else 0 for own, w in zip(drafter.windows, wide, strict=True)]
        self.embed_tokens = nn.Embedding(dims.vocab_size, dims.hidden_size)
        self.rotary: nn.Module = nn.Identity()  # it has no weights: see `make_draft`
        self.layers = nn.ModuleList(BlockLayer(layer, drafter) for _ in range(dims.num_layers))
        self.norm = LlamaRMSNorm(dims.hidden_size, layer.rms_norm_eps)
        self.lm_head = nn.Linear(dims.hidden_size, dims.draft_vocab_size, bias=False)
        if drafter.selector_rank:
            sizes = (dims.hidden_size, dims.vocab_size, dims.draft_vocab_size)
            self.candidate_selector = CandidateSelector(*sizes, drafter.selector_rank)
        if drafter.markov_rank:
            self.markov_head = MarkovHead(dims, drafter.markov_rank)
        if drafter.corrector:
            eps = layer.rms_norm_eps
            self.lilicorr = LatticeCorrector(dims.hidden_size, drafter.corrector, drafter.block_size, eps)
        if drafter.path:
            self.path_terms = PathTerms(dims.hidden_size, dims.vocab_size, drafter.path)

    def forward(
        self,
        roots: torch.Tensor,
        lengths: torch.Tensor,
        features: torch.Tensor,
        feature_nodes: torch.Tensor,
        last_nodes: torch.Tensor,
        caches: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Returns candidates, scores, the terms of a drafter with a state over its path, and the updated caches."""
        context = gather_nodes(features, feature_nodes)
        num_context, num_rows = context.shape[1], context.shape[1] + 1 + self.num_masks
        masks = torch.full_like(roots, self.drafter.mask_token_id).expand(-1, self.num_masks)
        x = self.embed_tokens(torch.cat((roots, masks), 1)) * self.drafter.embedding_scale
        numbers, block = torch.arange(num_rows), torch.arange(1 + self.num_masks)
        last = last_nodes[:, None]
        steps = torch.cat((torch.minimum(numbers[:num_context], last), last + 1 + block), 1)
        angles = self.rotary(x, lengths[:, None] + steps)
        is_block = numbers >= num_context
        is_used = (is_block | (numbers <= last))[:, None] | ~is_block[:, None]  # padding is not seen from the block
        causal = numbers <= numbers[:, None]
        seen = {True: causal & is_used, False: (causal | (is_block & is_block[:, None])) & is_used}
        updated: list[torch.Tensor] = []
        for i, layer in enumerate(self.layers):
            mask, pair = seen[self.drafter.is_causal[i]], caches[2 * i : 2 * i + 2]
            attended = (angles, pair, lengths, mask, self.windows[i])

            def attend(y: torch.Tensor, layer: BlockLayer = layer, attended: Any = attended) -> torch.Tensor:
                out, *held = layer.self_attn(torch.cat((context, y), 1), num_context, *attended)
                updated.extend(held)
                return out

            x = layer(x, attend)
        hidden = self.norm(x[:, 1 + self.num_masks - self.num_drafts :])
        tokens, scores = self.lattice(roots, hidden, gather_nodes(context, last)[:, 0])
        terms = self.terms(roots, hidden, tokens) if self.drafter.path else ()
        return (tokens, scores, *terms, *updated)

    def lattice(
        self, roots: torch.Tensor, hidden: torch.Tensor, anchors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns candidates and scores of slots [batch, slots, hidden]; anchors: see `LatticeCorrector`."""
        logits = self.logits(hidden)
        drafted, probs = top_tokens(logits, self.num_ranked)
        if self.drafter.corrector:
            return self.corrected(hidden, anchors, logits, drafted, probs[:, :, :1])
        return self.scored(roots, hidden, logits, drafted)

    def terms(
        self, roots: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns what the step reads of slots' states and candidates; see `graph_kinds.blocks`."""
        terms, rows = self.path_terms(hidden, tokens)
        return self.embed_tokens(torch.cat((roots, tokens[:, :-1].flatten(1)), 1)), terms, rows

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns [batch, slots, draft_vocab] of slots [batch, slots, hidden]."""
        logits: torch.Tensor = self.lm_head(hidden) * self.drafter.multiplier
        if self.drafter.softcap:
            logits = torch.tanh(logits / self.drafter.softcap) * self.drafter.softcap
        return logits

    def scored(
        self, roots: torch.Tensor, hidden: torch.Tensor, logits: torch.Tensor, drafted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns tokens of the target and scores of slots' candidates `drafted` [batch, slots, candidates] int64."""
        scores = torch.gather(logits, 2, drafted)[:, :, None]
        tokens = drafted if self.target_tokens is None else self.target_tokens[drafted]
        if self.drafter.is_paired:
            head = self.candidate_selector if self.drafter.selector_rank else self.markov_head
            before = torch.cat((roots[:, :, None].expand(-1, -1, self.num_candidates), tokens[:, :-1]), 1)
            scores = scores + head(hidden, before, drafted)
        return tokens, scores

    def corrected(
        self,
        hidden: torch.Tensor,
        anchors: torch.Tensor,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        best: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the most probable candidates and LiLiCorr's scores; its layers read `num_ranked` of each slot.

        Args:
            hidden: [batch, slots, hidden].
            logits: [batch, slots, vocab].
            tokens: [batch, slots, num_ranked] int64, the most probable first.
            best: [batch, slots, 1], the highest probability; those of others may be too small for a number.
        """
        chosen, num = torch.gather(logits, 2, tokens), self.num_candidates
        log_probs = chosen - chosen[:, :, :1] + best.log()
        scores = self.lilicorr(self.embed_tokens(tokens), log_probs, hidden, anchors)
        return tokens[:, :, :num], scores[:, :, :num, :num]


class Fusion(nn.Module):
    """Features of positions that the target has read, of its residual streams."""

    def __init__(self, config: Mapping[str, Any], dims: FeatureDims) -> None:
        super().__init__()
        self.fc = nn.Linear(len(dims.layers) * dims.target_hidden_size, dims.hidden_size, bias=False)
        self.hidden_norm = LlamaRMSNorm(dims.hidden_size, layer_config(config).rms_norm_eps)

    def forward(self, streams: list[torch.Tensor]) -> torch.Tensor:
        """Returns the features: [batch, nodes, target_hidden] each -> [batch, nodes, hidden]."""
        return self.hidden_norm(self.fc(torch.cat(streams, -1)))


def make_draft(
    config: Mapping[str, Any],
    drafter: Drafter,
    dims: FeatureDims,
    spec: GraphSpec,
    weights: Mapping[str, torch.Tensor] | None,
    shared: Mapping[str, torch.Tensor],
) -> BlockDraft:
    """Returns the drafter with its weights.

    Args:
        weights: by the names of the canonical layout; None: random ones.
        shared: the target's embeddings and LM head, for a drafter without.
    """
    tokens = target_tokens(dims.draft_vocab_size, dims.vocab_size, weights)
    if weights is not None and drafter.path:
        weights = {**weights, **block_weights(weights, dims.hidden_size, "path_terms")}
    with torch.device("meta"):
        draft = BlockDraft(config, drafter, dims, spec, tokens)
    fill_weights(draft, weights, shared)
    draft.rotary = LlamaRotaryEmbedding(layer_config(config))
    return draft.eval()


def make_fusion(config: Mapping[str, Any], dims: FeatureDims, weights: Mapping[str, torch.Tensor] | None) -> Fusion:
    with torch.device("meta"):
        fusion = Fusion(config, dims)
    fill_weights(fusion, weights)
    return fusion.eval()
