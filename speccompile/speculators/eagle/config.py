# SPDX-License-Identifier: Apache-2.0
"""Recipe fields of drafting with an EAGLE-1 or EAGLE-2 drafter."""

from __future__ import annotations

from dataclasses import dataclass

from speccompile.drafting.feature_config import FeatureFields


@dataclass(frozen=True)
class Config(FeatureFields):
    """An EAGLE-1 or 2 drafter; the two differ in how trees are drafted, not in what is trained.

    Args:
        model: checkpoint folder or hub id of the drafter. Its other fields are `FeatureFields`.

    Raises:
        RecipeError: a value is out of range.
    """

    model: str
