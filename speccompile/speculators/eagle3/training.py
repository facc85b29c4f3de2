# SPDX-License-Identifier: Apache-2.0
"""How an EAGLE-3 drafter is trained. Needs no torch before `make`."""

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
        layers: decoder layers of the target, from 0, whose residual streams are fused; empty: an early one, the
            middle one and a late one.
        draft_vocab_size: the most frequent tokens of the text, which alone can be drafted; 0: all.
        intermediate_size: of the MLP; 0: the target's.
        unrolled_steps: drafts of a chain that are trained on the drafter's own features.
        starts: share of the text's positions from which chains are unrolled in a step, drawn anew each time.
    """

    layers: tuple[int, ...] = ()
    draft_vocab_size: int = 0
    intermediate_size: int = 0
    unrolled_steps: int = 5
    starts: float = 0.25

    def __post_init__(self) -> None:
        if self.layers and len(self.layers) != 3:
            raise RecipeError("training.heads.layers", f"{self.layers}", "three layers", "Correct the recipe.")
        if not 0 < self.starts <= 1:
            raise RecipeError("training.heads.starts", f"{self.starts}", "above 0, at most 1", "Correct the recipe.")
        if self.unrolled_steps < 1:
            got = f"{self.unrolled_steps}"
            raise RecipeError("training.heads.unrolled_steps", got, "1 or more", "Correct the recipe.")

    def chosen_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers, at a target of that many.

        Raises:
            RecipeError: the target has no such layer, or too few.
        """
        # The published choice: the states in front of layers 2, n / 2 and n - 3.
        layers = self.layers or (1, num_layers // 2 - 1, num_layers - 4)
        if len(set(layers)) < 3 or min(layers) < 0 or max(layers) >= num_layers:
            expected = f"three different layers of the target's {num_layers}"
            raise RecipeError("training.heads.layers", f"{layers}", expected, "Name three layers.")
        return layers


class Eagle3Trainer:
    """See `speccompile.core.training.Trainer`."""

    def needs(self, config: HeadsConfig, target: Mapping[str, Any]) -> TargetNeeds:
        """Three residual streams."""
        return TargetNeeds(layers=config.chosen_layers(int(target["num_hidden_layers"])))

    def make(self, config: HeadsConfig, parts: TargetParts, start: Path | None) -> Any:
        """A layer like the target's last one behind its last fused stream, or `start`."""
        from speccompile.export.heads_file import read_heads
        from speccompile.speculators.eagle3.heads import EagleSizes
        from speccompile.speculators.eagle3.trainable import TrainableEagle3, begin_heads

        vocab, hidden = parts.lm_head.shape
        target = parts.config
        heads, num_draft = int(target["num_attention_heads"]), config.draft_vocab_size or vocab
        if num_draft > vocab:
            expected = f"at most {vocab}, as the target has"
            raise RecipeError("training.heads.draft_vocab_size", f"{num_draft}", expected, "Lower it.")
        sizes = EagleSizes(
            hidden_size=hidden,
            target_hidden_size=hidden,
            intermediate_size=config.intermediate_size or int(target.get("intermediate_size") or 4 * hidden),
            num_attention_heads=heads,
            num_key_value_heads=int(target.get("num_key_value_heads") or heads),
            head_dim=int(target.get("head_dim") or hidden // heads),
            vocab_size=vocab,
            draft_vocab_size=num_draft,
            layers=config.chosen_layers(int(target["num_hidden_layers"])),
            rms_norm_eps=float(target.get("rms_norm_eps", 1e-5)),
        )
        drafter = begin_heads(sizes, parts)
        if start is not None:
            drafter.load_state_dict(read_heads(start, drafter.state_dict()))
        return TrainableEagle3(drafter, parts, config.unrolled_steps, config.starts)
