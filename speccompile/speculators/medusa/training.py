# SPDX-License-Identifier: Apache-2.0
"""How Medusa heads are trained. Needs no torch before `make`."""

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
        num_heads: tokens guessed behind the root.
        num_layers: residual blocks of a head.
        lm_head: `target`: all heads end in the target's own LM head, frozen and not stored; `own`: each has its own.
    """

    num_heads: int = 4
    num_layers: int = 1
    lm_head: str = "own"

    def __post_init__(self) -> None:
        if self.lm_head not in ("own", "target"):
            raise RecipeError("training.heads.lm_head", repr(self.lm_head), "own or target", "Correct the recipe.")
        for name in ("num_heads", "num_layers"):
            if not 1 <= getattr(self, name) <= 64:
                raise RecipeError(f"training.heads.{name}", f"{getattr(self, name)}", "1 to 64", "Correct the recipe.")


class MedusaTrainer:
    """See `speccompile.core.training.Trainer`."""

    def needs(self, config: HeadsConfig, target: Mapping[str, Any]) -> TargetNeeds:
        """The final-normed states."""
        return TargetNeeds(hidden=True)

    def make(self, config: HeadsConfig, parts: TargetParts, start: Path | None) -> Any:
        """Blocks that change nothing at first, LM heads as the target's."""
        from speccompile.export.heads_file import read_heads
        from speccompile.speculators.medusa.heads import HeadsSizes, MedusaHeads
        from speccompile.speculators.medusa.trainable import TrainableMedusa

        vocab, hidden = parts.lm_head.shape
        heads = MedusaHeads(HeadsSizes(hidden, vocab, config.num_heads, config.num_layers, config.lm_head == "target"))
        for name, parameter in heads.named_parameters():
            parameter.data.zero_()
            if parameter.shape[0] == vocab and name.endswith(f"{config.num_layers}.weight"):
                parameter.data.copy_(parts.lm_head)
        if start is not None:
            heads.load_state_dict(read_heads(start, heads.state_dict()))
        return TrainableMedusa(heads, parts.lm_head)
