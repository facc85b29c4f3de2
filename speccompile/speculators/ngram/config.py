# SPDX-License-Identifier: Apache-2.0
"""Drafting by prompt lookup: recipe fields, and what the build and the runtime ask. It has no graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from speccompile.core import registry
from speccompile.core.jobs import DraftBounds, MethodContext
from speccompile.core.method import Method
from speccompile.core.proposer import Proposer
from speccompile.core.protocols import Engine
from speccompile.errors import RecipeError

PROPOSER = "speccompile.speculators.ngram.proposer:NgramProposer"


@dataclass(frozen=True)
class NgramConfig:
    """Prompt lookup.

    Args:
        min_match: least number of tokens that must match.
        max_match: longest match that is looked for; longer matches are tried first.
        tokens_per_match: draft length per matched token: a longer match gives a longer draft. `auto`: from the
            acceptance after matches of that length in this sequence so far, and the measured costs.

    Raises:
        RecipeError: a value is out of range.
    """

    num_draft_tokens: int = 15
    min_match: int = 1
    max_match: int = 10
    tokens_per_match: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        bounds = (
            ("num_draft_tokens", self.num_draft_tokens, 1, 64),
            ("min_match", self.min_match, 1, 16),
            ("max_match", self.max_match, self.min_match, 32),
            ("tokens_per_match", 1 if self.tokens_per_match == "auto" else self.tokens_per_match, 1, 64),
        )
        for name, got, low, high in bounds:
            if not low <= got <= high:
                raise RecipeError(f"speculator.{name}", str(got), f"{low} to {high}", "Correct the recipe.")

    @property
    def draft_bounds(self) -> DraftBounds:
        return DraftBounds(self.num_draft_tokens, is_open=self.tokens_per_match == "auto")


class NgramMethod(Method):
    """See `speccompile.core.method.Method`."""

    name = "ngram"
    Config = NgramConfig
    vllm_names = ("ngram_gpu",)
    vllm_keys = MappingProxyType({"prompt_lookup_min": "min_match", "prompt_lookup_max": "max_match"})

    def make_proposer(self, config: NgramConfig, engines: Mapping[str, Engine], context: MethodContext) -> Proposer:
        """Returns the lookup; it never drafts more tokens than a step may score."""
        proposer: Proposer = registry.find_class(PROPOSER)(config, context)
        return proposer
