# SPDX-License-Identifier: Apache-2.0
"""How an early-exit head is trained. Needs no torch before `make`."""

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
        num_exit_layers: decoder layers of the target that run before the head.
        intermediate_size: of the adapter; 0: the target's.
        chain: drafts of a chain, for the estimated acceptance.
    """

    num_exit_layers: int = 2
    intermediate_size: int = 0
    chain: int = 4

    def __post_init__(self) -> None:
        for name in ("num_exit_layers", "chain"):
            if getattr(self, name) < 1:
                raise RecipeError(f"training.heads.{name}", f"{getattr(self, name)}", "1 or more", "Raise it.")


class EarlyExitTrainer:
    """See `speccompile.core.training.Trainer`."""

    def needs(self, config: HeadsConfig, target: Mapping[str, Any]) -> TargetNeeds:
        """The stream behind the last layer that runs."""
        num_layers = int(target["num_hidden_layers"])
        if config.num_exit_layers >= num_layers:
            got, expected = f"{config.num_exit_layers}", f"less than the target's {num_layers}"
            raise RecipeError("training.heads.num_exit_layers", got, expected, "Lower it.")
        return TargetNeeds(layers=(config.num_exit_layers - 1,))

    def make(self, config: HeadsConfig, parts: TargetParts, start: Path | None) -> Any:
        """An adapter that changes little and the target's final norm, or `start`."""
        from speccompile.export.heads_file import read_heads
        from speccompile.speculators.early_exit.heads import ExitHead, ExitSizes
        from speccompile.speculators.early_exit.trainable import TrainableExit

        vocab, hidden = parts.lm_head.shape
        inner = config.intermediate_size or int(parts.config.get("intermediate_size") or 4 * hidden)
        eps = float(parts.config.get("rms_norm_eps", 1e-5))
        head = ExitHead(ExitSizes(hidden, vocab, config.num_exit_layers, inner, eps))
        if parts.norm is not None:
            head.norm.weight.data.copy_(parts.norm)
        if start is not None:
            head.load_state_dict(read_heads(start, head.state_dict()))
        return TrainableExit(head, parts, config.chain)
