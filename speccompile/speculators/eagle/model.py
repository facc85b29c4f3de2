# SPDX-License-Identifier: Apache-2.0
"""The drafter in torch, as its graph computes it: decoder layers over fc(embedding of the next token, feature).

A feature is what the target's LM head reads, of drafts the last layer's output. The first layer has no norm before its
attention. After Li et al. 2024, "EAGLE" (arXiv 2401.15077), and the published code; layers are transformers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from speccompile.checkpoints.target_tables import TargetTables
from speccompile.export.draft_vocab import target_tokens
from speccompile.export.feature_draft import FeatureBody, fill_weights, layer_config, widen_projections
from speccompile.graph_kinds.features import FeatureDims


class EagleBody(FeatureBody):
    """The drafter with its LM head. `target_tokens`: [draft_vocab] int64; None where the vocabularies are one."""

    def __init__(self, config: Mapping[str, Any], dims: FeatureDims, target_tokens: torch.Tensor | None) -> None:
        layer, hidden = layer_config(config), dims.hidden_size
        super().__init__(layer)
        self.embed_tokens = nn.Embedding(dims.vocab_size, hidden)
        self.fc = nn.Linear(2 * hidden, hidden, bias=bool(config.get("bias")))
        self.layers = nn.ModuleList(LlamaDecoderLayer(layer, i) for i in range(dims.num_layers))
        for part in self.layers:
            widen_projections(part.self_attn, hidden, config)
        self.layers[0].input_layernorm = nn.Identity()
        self.lm_head = nn.Linear(hidden, dims.draft_vocab_size, bias=False)
        self.target_tokens = target_tokens

    def advance(self, tokens: torch.Tensor, features: torch.Tensor, angles: Any) -> torch.Tensor:
        x = self.fc(torch.cat((self.embed_tokens(tokens), features), -1))
        for layer in self.layers:
            x = layer(x, position_embeddings=angles)
        return x

    def logits(self, own: torch.Tensor) -> torch.Tensor:
        return self.lm_head(own)


def make_body(
    config: Mapping[str, Any],
    dims: FeatureDims,
    weights: Mapping[str, torch.Tensor] | None,
    tables: TargetTables | None,  # in the place of those that are not among the weights; None: all are
) -> EagleBody:
    """Returns the drafter with its weights. `weights`: by the names of the canonical layout; None: random ones."""
    tokens, shared = target_tokens(dims.draft_vocab_size, dims.vocab_size, weights), {}
    if tables is not None:
        head = tables.lm_head if tokens is None else tables.lm_head[tokens]
        shared = {"embed_tokens.weight": tables.embeddings, "lm_head.weight": head}
    with torch.device("meta"):
        body = EagleBody(config, dims, tokens)
    fill_weights(body, weights, shared)
    return body.eval()
