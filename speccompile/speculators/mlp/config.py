# SPDX-License-Identifier: Apache-2.0
"""Recipe fields of drafting with an MLP speculator."""

from __future__ import annotations

from dataclasses import dataclass

from speccompile.drafting.heads_config import HeadsFields


@dataclass(frozen=True)
class Config(HeadsFields):
    """An MLP speculator as IBM trains and publishes them.

    Args:
        model: checkpoint folder or hub id of the speculator.

    Raises:
        RecipeError: a value is out of range.
    """

    model: str
