# SPDX-License-Identifier: Apache-2.0
"""Recipe fields of drafting with a Prophet transformer."""

from __future__ import annotations

from dataclasses import dataclass

from speccompile.drafting.heads_config import HeadsFields
from speccompile.errors import RecipeError


@dataclass(frozen=True)
class Config(HeadsFields):
    """A small causal transformer that starts from the target's hidden state.

    Args:
        model: checkpoint folder or hub id of the transformer.
        max_draft_tokens: tokens of a chain where `num_draft_tokens` is `auto`; all of them are drafted in every step.

    Raises:
        RecipeError: a value is out of range.
    """

    model: str
    max_draft_tokens: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.max_draft_tokens <= 64:
            got = repr(self.max_draft_tokens)
            raise RecipeError("speculator.max_draft_tokens", got, "1 to 64", "Correct the recipe.")
