# SPDX-License-Identifier: Apache-2.0
"""Sizes of Medusa heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from speccompile.core.jobs import WeightCounts
from speccompile.core.specs import GraphSpec
from speccompile.graph_kinds.heads import candidate_heads_spec


@dataclass(frozen=True)
class HeadsSizes:
    """Sizes of the heads."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int
    uses_target_lm_head: bool  # all heads end in the target's LM head, which is not in the checkpoint
    num_drafts: int = 0  # heads in the graph; 0: all of the checkpoint
    num_candidates: int = 0
    num_params: int = 0  # parameters in the graph; 0 before the export
    model_type: str = "medusa"

    def spec(self, name: str) -> GraphSpec:
        return candidate_heads_spec(name, self.hidden_size, self.vocab_size, self.num_drafts, self.num_candidates)

    def counts(self) -> WeightCounts:
        """Returns the weights of the graph, in which heads that share an LM head have one copy of it."""
        blocks = self.num_drafts * self.num_layers
        heads = 1 if self.uses_target_lm_head else self.num_drafts
        linear = blocks * self.hidden_size**2 + heads * self.vocab_size * self.hidden_size
        return WeightCounts(linear + blocks * self.hidden_size, linear, blocks * self.hidden_size)

    def config(self) -> dict[str, Any]:
        """Returns the config.json of a checkpoint, with the published names."""
        return {
            "model_type": self.model_type,
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "original_lm_head": self.uses_target_lm_head,
        }
