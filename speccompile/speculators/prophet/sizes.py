# SPDX-License-Identifier: Apache-2.0
"""Sizes of a Prophet, as its config.json has them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from speccompile.core.jobs import WeightCounts

MODEL_TYPE = "prophet"


@dataclass(frozen=True)
class ProphetSizes:
    """Sizes; the fields are those of config.json."""

    vocab_size: int
    target_hidden_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    horizon: int
    rope_theta: float = 10000.0  # base of its positions; the target's state stands at position 0
    rms_norm_eps: float = 1e-5
    uses_target_embeddings: bool = True  # embeddings and LM head are the target's, and not in the checkpoint
    tie_word_embeddings: bool = False  # otherwise, whether its LM head is its embeddings
    model_type: str = MODEL_TYPE
    num_params: int = 0  # parameters in the graph; 0 before the export

    def config_from_sizes(self) -> dict[str, Any]:
        """Returns the config.json of a checkpoint."""
        return {name: value for name, value in asdict(self).items() if name != "num_params"}

    def counts(self) -> WeightCounts:
        """Returns the weights of the graph, copies of the target's tables included."""
        width, heads = self.hidden_size, (2 * self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
        layer = width * (heads + 3 * self.intermediate_size)
        table = self.vocab_size * width
        linear = width * self.target_hidden_size + self.num_hidden_layers * layer + table
        norms = (2 * self.num_hidden_layers + 1) * width
        is_tied = self.tie_word_embeddings and not self.uses_target_embeddings
        return WeightCounts(linear + norms + (0 if is_tied else table), linear, norms + table, table, is_tied)
