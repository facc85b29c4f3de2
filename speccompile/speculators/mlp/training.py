# SPDX-License-Identifier: Apache-2.0
"""How an MLP speculator is trained. Needs no torch before `make`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.core.training import TargetNeeds, TargetParts
from speccompile.errors import RecipeError
from speccompile.speculators.mlp.sizes import MODEL_TYPE, HeadsSizes


@dataclass(frozen=True)
class HeadsConfig:
    """What is trained.

    Args:
        num_heads: tokens drafted.
        inner_size: width of the heads' state; 0: the target's.
        tie_weights: heads share embedding, LM head and norm; all projections but the first are one.
        scale_input: the target's state is normalised first.
    """

    num_heads: int = 4
    inner_size: int = 0
    tie_weights: bool = True
    scale_input: bool = True

    def __post_init__(self) -> None:
        least = 2 if self.tie_weights else 1
        if not least <= self.num_heads <= 64:
            where, expected = "training.heads.num_heads", f"{least} to 64"
            raise RecipeError(where, f"{self.num_heads}", expected, "Correct the recipe.")
        if self.inner_size < 0:
            raise RecipeError("training.heads.inner_size", f"{self.inner_size}", "0 or more", "Correct the recipe.")


class MlpTrainer:
    """See `speccompile.core.training.Trainer`."""

    def needs(self, config: HeadsConfig, target: Mapping[str, Any]) -> TargetNeeds:
        """The final-normed states."""
        return TargetNeeds(hidden=True)

    def make(self, config: HeadsConfig, parts: TargetParts, start: Path | None) -> Any:
        """Embeddings and LM heads as the target's, in their best `inner_size` directions, or `start`."""
        from speccompile.speculators.mlp.trainable import TrainableMlp, begin_heads, load_heads

        vocab, hidden = parts.lm_head.shape
        inner = config.inner_size or hidden
        sizes = HeadsSizes(
            MODEL_TYPE, vocab, hidden, inner, config.num_heads, config.num_heads, config.tie_weights, config.scale_input
        )
        heads = begin_heads(sizes, parts) if start is None else load_heads(sizes, start)
        return TrainableMlp(heads)
