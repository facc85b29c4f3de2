# SPDX-License-Identifier: Apache-2.0
"""How a draft model is trained: a small Llama, distilled from the target. Needs no torch before `make`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.errors import RecipeError
from speccompile.training_contract import TargetNeeds, TargetParts


@dataclass(frozen=True)
class HeadsConfig:
    """What is trained.

    Args:
        hidden_size: of the draft.
        num_layers: of the draft.
        num_heads: attention heads of a layer.
        num_kv_heads: key heads of a layer.
        head_dim: of a head; 0: hidden_size / num_heads.
        intermediate_size: of its MLPs.
        chain: drafts of a chain, for the estimated acceptance.
    """

    hidden_size: int = 192
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 0
    intermediate_size: int = 512
    chain: int = 4

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size", "chain"):
            if getattr(self, name) < 1:
                raise RecipeError(f"training.heads.{name}", f"{getattr(self, name)}", "1 or more", "Raise it.")
        if self.num_heads % self.num_kv_heads or (not self.head_dim and self.hidden_size % self.num_heads):
            got = f"{self.num_heads} heads, {self.num_kv_heads} key heads, hidden size {self.hidden_size}"
            raise RecipeError("training.heads.num_heads", got, "sizes that divide one another", "Correct the recipe.")


class DraftModelTrainer:
    """See `speccompile.training_contract.Trainer`."""

    def needs(self, config: HeadsConfig, target: Mapping[str, Any]) -> TargetNeeds:
        """The distributions alone."""
        return TargetNeeds()

    def make(self, config: HeadsConfig, parts: TargetParts, start: Path | None) -> Any:
        """A new model with tied embeddings, or `start`."""
        from speccompile.speculators.draft_model.trainable import TrainableDraft, make_model

        return TrainableDraft(make_model(config, parts, start), parts.folder, config.chain)
