# SPDX-License-Identifier: Apache-2.0
"""Recipe fields of drafting with an EAGLE-3 drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from speccompile.core.jobs import CandidateOptions
from speccompile.core.registry import find_class
from speccompile.drafting.feature_config import FeatureFields
from speccompile.errors import RecipeError

# Needs the checkpoint, which this module does not: it is imported where a graph is made.
RULE = "speccompile.speculators.eagle3.layers:layers_of_target"


@dataclass(frozen=True)
class Config(FeatureFields):
    """An EAGLE-3 drafter. Its other fields are `FeatureFields`.

    Args:
        model: checkpoint folder or hub id of the drafter.
        layers: decoder layers of the target, from 0, whose residual streams are read, in the order of the drafter's
            `fc`; `auto`: as its config.json says, else the published choice for the target's number of layers.

    Raises:
        RecipeError: a value is out of range.
    """

    model: str
    layers: tuple[int, int, int] | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers == "auto":
            return
        object.__setattr__(self, "layers", tuple(self.layers))
        if len(set(self.layers)) != 3 or min(self.layers) < 0:
            where, expected = "speculator.layers", "auto, or three different layers from 0 on"
            raise RecipeError(where, f"{list(self.layers)}", expected, "Correct the recipe.")

    @property
    def chosen_layers(self) -> tuple[int, ...] | None:
        """The layers; None: auto."""
        return None if self.layers == "auto" else self.layers


@dataclass(frozen=True)
class DraftOptions(CandidateOptions):
    """Of the drafter's graph.

    Args:
        layers: of the target, see `Config.chosen_layers`.
    """

    layers: tuple[int, ...] | None


@dataclass(frozen=True)
class FusionOptions:
    """Of the graph that fuses the target's states.

    Args:
        layers: of the target, see `Config.chosen_layers`.
    """

    layers: tuple[int, ...] | None


@dataclass(frozen=True)
class FusedLayers:
    """See `speccompile.core.jobs.LayersRule`: they depend on the checkpoint and on the target's number of layers.

    Args:
        model: of the drafter.
        config: see `GraphJob`.
        asked: see `Config.chosen_layers`.
    """

    model: str
    config: str | None
    asked: tuple[int, ...] | None

    def layers(self, num_layers: int, weights: str) -> tuple[int, ...]:
        """Three of them."""
        layers: tuple[int, ...] = find_class(RULE)(self.model, self.config, self.asked, num_layers, weights)
        return layers
