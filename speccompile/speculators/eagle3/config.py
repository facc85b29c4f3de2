# SPDX-License-Identifier: Apache-2.0
"""Recipe fields of drafting with an EAGLE-3 drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from speccompile.drafting.feature_config import FeatureFields
from speccompile.errors import RecipeError


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
