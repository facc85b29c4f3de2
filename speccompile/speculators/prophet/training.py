# SPDX-License-Identifier: Apache-2.0
"""How a Prophet transformer is trained. Needs no torch before `make`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.core.training import TargetNeeds, TargetParts
from speccompile.errors import RecipeError


@dataclass(frozen=True)
class HeadsConfig:
    """What is trained.

    Args:
        num_layers: of the transformer.
        num_heads: attention heads of a layer.
        num_kv_heads: key heads of a layer.
        intermediate_size: of its MLPs.
        horizon: drafts trained from every start; longer than the drafts that will be used.
        starts: share of the text's positions that are starts in a step, drawn anew each time.
    """

    num_layers: int = 2
    num_heads: int = 6
    num_kv_heads: int = 2
    intermediate_size: int = 1024
    horizon: int = 8
    starts: float = 0.25

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            got = f"{self.num_kv_heads} for {self.num_heads} heads"
            raise RecipeError("training.heads.num_kv_heads", got, "a divisor of num_heads", "Correct the recipe.")
        if not 0 < self.starts <= 1:
            raise RecipeError("training.heads.starts", f"{self.starts}", "above 0, at most 1", "Correct the recipe.")
        for name in ("num_layers", "horizon", "intermediate_size"):
            if getattr(self, name) < 1:
                raise RecipeError(f"training.heads.{name}", f"{getattr(self, name)}", "1 or more", "Raise it.")


class ProphetTrainer:
    """See `speccompile.core.training.Trainer`."""

    def needs(self, config: HeadsConfig, target: Mapping[str, Any]) -> TargetNeeds:
        """The final-normed states."""
        return TargetNeeds(hidden=True)

    def make(self, config: HeadsConfig, parts: TargetParts, start: Path | None) -> Any:
        """The target's last layers, where the sizes allow it, between its embeddings and its LM head; or `start`."""
        from speccompile.export.heads_file import read_heads
        from speccompile.speculators.prophet.heads import ProphetSizes
        from speccompile.speculators.prophet.trainable import TrainableProphet, begin_prophet

        vocab, hidden = parts.lm_head.shape
        if hidden % config.num_heads or hidden // config.num_heads % 2:
            expected = f"a divisor of the target's hidden size {hidden} that leaves an even head size"
            raise RecipeError("training.heads.num_heads", f"{config.num_heads}", expected, "Correct the recipe.")
        sizes = ProphetSizes(
            vocab_size=vocab,
            target_hidden_size=hidden,
            hidden_size=hidden,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=hidden // config.num_heads,
            horizon=config.horizon,
        )
        heads = begin_prophet(sizes, parts)
        if start is not None:
            heads.load_state_dict(read_heads(start, heads.state_dict()))
        return TrainableProphet(heads, parts, config.starts)
