# SPDX-License-Identifier: Apache-2.0
"""Sizes of a GLIDE drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from speccompile.core.dims import ModelDims
from speccompile.core.jobs import WeightCounts
from speccompile.core.specs import GraphSpec, cache_names
from speccompile.graph_kinds.borrowed import reading_spec
from speccompile.graph_kinds.decoder import decoder_spec

PUBLISHED_THETA = 10000.0  # of the queries' positions, whatever the target's is


@dataclass(frozen=True)
class GlideDims(ModelDims):
    """Sizes of a drafter; the fields before are those of its self-attention, and `max_positions` is the target's."""

    intermediate_size: int = 0
    target_hidden_size: int = 0
    target_heads: int = 0  # query heads of the target, which the cross-attention has, too
    target_kv_heads: int = 0  # key heads of the target's caches
    target_head_dim: int = 0
    target_layer: int = 0  # layer of the target whose caches are read, from 0
    is_tied: bool = True
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    target_rope_theta: float = PUBLISHED_THETA  # base of the positions in the target's caches

    def decoder_spec(self, name: str, target: ModelDims) -> GraphSpec:
        return reading_spec(decoder_spec(name, self), target, cache_names(self.target_layer))

    def counts(self) -> WeightCounts:
        """Returns the weights of the graph."""
        hidden, cross = self.hidden_size, self.target_heads * self.target_head_dim
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = hidden * (attention + 2 * cross + 3 * self.intermediate_size)
        table = self.vocab_size * hidden
        plain = (2 * self.num_layers + 1) * hidden + table
        linear = self.num_layers * layer + table
        num_params = linear + plain - (table if self.is_tied else 0)
        return WeightCounts(num_params, linear, plain, num_head=table, is_tied=self.is_tied)

    def config(self) -> dict[str, Any]:
        """Returns the config.json of a drafter of these sizes."""
        return {
            "architectures": ["GlideLlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.is_tied,
            "large_hidden_size": self.target_hidden_size,
            "large_num_attention_heads": self.target_heads,
            "large_head_dim": self.target_head_dim,
            "large_num_key_value_heads": self.target_kv_heads,
            "large_rope_theta": self.target_rope_theta,
        }
