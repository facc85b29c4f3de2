# SPDX-License-Identifier: Apache-2.0
"""The network of an EAGLE-3 or P-EAGLE drafter, as its graphs compute it and as it is trained.

Decoder layers over (embedding of the next token, feature of this position); the first layer's attention reads both side
by side. The feature is fc(three residual streams of the target), of a draft the drafter's output before the norm.
EAGLE-3.1 norms each of the streams, and its drafts read that output after the norm. P-EAGLE's drafts read masks: one
token's embedding and trained states. Layers are transformers' Llama layers, for biases, activation and rotary scaling;
with norms of queries and keys Qwen3's.
After Li et al. 2025, "EAGLE-3" (arXiv 2503.01840), Hui et al. 2026, "P-EAGLE" (arXiv 2602.01469), and the published
code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer

from speccompile.checkpoints.target_tables import TargetTables
from speccompile.export.draft_vocab import target_tokens
from speccompile.export.feature_draft import FeatureBody, fill_weights, layer_config, widen_projections
from speccompile.graph_kinds.features import FeatureDims
from speccompile.speculators.eagle3.layouts import HEAD, MASK_HIDDEN
from speccompile.speculators.eagle3.speculators_config import windows_of


class MidLayer(nn.Module):
    """The first layer, whose attention reads embedding and feature side by side."""

    def __init__(self, layer: Any, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = layer.hidden_size, layer.rms_norm_eps
        self.is_normed = bool(config.get("norm_before_residual"))
        self.hidden_norm, self.input_layernorm = LlamaRMSNorm(width, eps), LlamaRMSNorm(width, eps)
        self.self_attn = (Qwen3Attention if config.get("qk_norm") else LlamaAttention)(layer, 0)
        widen_projections(self.self_attn, 2 * width, config)
        self.post_attention_layernorm, self.mlp = LlamaRMSNorm(width, eps), LlamaMLP(layer)

    def forward(self, embedded: torch.Tensor, features: torch.Tensor, angles: Any) -> torch.Tensor:
        """Returns the next features: embeddings and features [batch, nodes, hidden] -> own features."""
        normed = self.hidden_norm(features)
        mixed = torch.cat((self.input_layernorm(embedded), normed), -1)
        x = (normed if self.is_normed else features) + self.self_attn(
            mixed, position_embeddings=angles, attention_mask=None
        )[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Body(FeatureBody):
    """Everything after the fused feature. `target_tokens`: [draft_vocab] int64; None where the vocabularies are one."""

    def __init__(self, config: Mapping[str, Any], dims: FeatureDims, target_tokens: torch.Tensor | None) -> None:
        layer = layer_config(config)
        super().__init__(layer)
        self.embed_tokens = nn.Embedding(dims.vocab_size, dims.hidden_size)
        self.midlayer = MidLayer(layer, config)
        further = Qwen3DecoderLayer if config.get("qk_norm") else LlamaDecoderLayer
        self.layers = nn.ModuleDict({str(i): further(layer, i) for i in range(1, dims.num_layers)})
        for part in self.layers.values() if config.get("qkv_bias") is not None else ():
            widen_projections(part.self_attn, dims.hidden_size, config)
        self.norm = LlamaRMSNorm(dims.hidden_size, layer.rms_norm_eps)
        self.gives_normed = bool(config.get("norm_output"))  # of EAGLE-3.1: the next draft reads what the head reads
        rank = dims.head_rank  # two products, which cost less than one of the whole width
        self.lm_head_down = nn.Linear(dims.hidden_size, rank, bias=False) if rank else nn.Identity()
        self.lm_head = nn.Linear(rank or dims.hidden_size, dims.draft_vocab_size, bias=False)
        self.target_tokens = target_tokens
        self.windows = windows_of(config, dims.num_layers)

    def advance(self, tokens: torch.Tensor, features: torch.Tensor, angles: Any) -> torch.Tensor:
        return self.read(self.embed_tokens(tokens), features, angles)

    def read(self, embedded: torch.Tensor, features: torch.Tensor, angles: Any) -> torch.Tensor:
        """Returns own features [batch, nodes, hidden] of embeddings and features of the same shape."""
        x = self.midlayer(embedded, features, angles)
        for layer in self.layers.values():
            x = layer(x, position_embeddings=angles)
        return self.norm(x) if self.gives_normed else x

    def finish(self, own: torch.Tensor) -> torch.Tensor:
        """Returns what the LM head's last product reads."""
        return self.lm_head_down(own if self.gives_normed else self.norm(own))

    def logits(self, own: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.finish(own))


class Fusion(nn.Module):
    """Features of positions that the target has read, of three of its residual streams."""

    def __init__(self, config: Mapping[str, Any], dims: FeatureDims) -> None:
        super().__init__()
        width, eps, num = dims.target_hidden_size, layer_config(config).rms_norm_eps, len(dims.layers)
        self.fc = nn.Linear(num * width, dims.hidden_size, bias=False)
        self.input_norm = LlamaRMSNorm(num * width, eps) if config.get("norm_before_fc") else nn.Identity()
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, eps) for _ in dims.layers) if config.get("fc_norm") else None

    def forward(self, streams: list[torch.Tensor]) -> torch.Tensor:
        """Returns the features: three [batch, nodes, target_hidden] -> [batch, nodes, hidden]."""
        if self.fc_norm is not None:
            streams = [norm(x) for norm, x in zip(self.fc_norm, streams, strict=True)]
        return self.fc(self.input_norm(torch.cat(streams, -1)))


def make_body(
    config: Mapping[str, Any],
    dims: FeatureDims,
    weights: Mapping[str, torch.Tensor] | None,
    tables: TargetTables | None,  # in the place of those that are not among the weights; None: all are
    *,
    has_masks: bool = False,
) -> Eagle3Body:
    """Returns the drafter with its weights.

    Args:
        weights: by the names of the canonical layout; None: random ones.
    """
    tokens = target_tokens(dims.draft_vocab_size, dims.vocab_size, weights)
    with torch.device("meta"):
        body = Eagle3Body(config, dims, tokens)
    shared = {} if tables is None else {"embed_tokens.weight": tables.embeddings}
    if tables is not None and weights is not None:
        shared[HEAD] = tables.lm_head
    fill_weights(body, weights, shared)
    if has_masks:
        body.mask_feature = mask_feature(config, dims, weights)
    return body.eval()


@torch.no_grad()
def mask_feature(
    config: Mapping[str, Any], dims: FeatureDims, weights: Mapping[str, torch.Tensor] | None
) -> torch.Tensor:
    """Returns the feature of masks [hidden]: trained states `mask_hidden`, through the same norms and fc."""
    if weights is None:
        states = torch.randn(len(dims.layers) * dims.target_hidden_size, generator=torch.Generator().manual_seed(0))
    else:
        states = weights[MASK_HIDDEN].to(torch.float32).flatten()
    return make_fusion(config, dims, weights)(list(states.chunk(len(dims.layers))))


def make_fusion(config: Mapping[str, Any], dims: FeatureDims, weights: Mapping[str, torch.Tensor] | None) -> Fusion:
    with torch.device("meta"):
        fusion = Fusion(config, dims)
    fill_weights(fusion, weights)
    return fusion.eval()
