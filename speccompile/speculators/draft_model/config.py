# SPDX-License-Identifier: Apache-2.0
"""Recipe fields of drafting by a small model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from speccompile.drafting.cached_drafts import CachedDraftFields
from speccompile.errors import RecipeError


@dataclass(frozen=True)
class Config(CachedDraftFields):
    """A draft model.

    Args:
        model: checkpoint folder or hub id of the draft.
        max_draft_tokens: longest chain of `num_draft_tokens: auto`.
        min_confidence: draft no further after a path that the draft itself believes in less than this; with a number
            and `num_draft_tokens: auto` nothing else ends a chain. `auto`: the measured costs decide.
        allow_tokenizer_mismatch: build although draft and target have different tokenizers.
        config: folder with the draft's config.json, where the hub's is not at hand; for random weights.
        quantization, num_draft_tokens, drafts, confidence_odds: see `drafting.cached_drafts.CachedDraftFields`.
        tree, tree_width, tree_depth, num_candidates: see `drafting.tree_config.TreeFields`.

    Raises:
        RecipeError: a value is out of range.
    """

    # Fields that bundles of earlier builds name, with the values that ask for what is done now.
    RETIRED_FIELDS: ClassVar[Mapping[str, tuple[str, ...]]] = {"engine_form": ("auto", "stepwise")}

    model: str
    max_draft_tokens: int = 10
    min_confidence: float | Literal["auto"] = "auto"
    confidence_odds: float = field(default=2.7, kw_only=True)
    allow_tokenizer_mismatch: bool = False
    config: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        floor = self.min_confidence
        checks = (
            ("max_draft_tokens", 1 <= self.max_draft_tokens <= 64, self.max_draft_tokens, "1 to 64"),
            ("min_confidence", floor == "auto" or 0 <= float(floor) < 1, floor, "auto, or 0 to below 1"),
        )
        for name, is_right, got, expected in checks:
            if not is_right:
                raise RecipeError(f"speculator.{name}", repr(got), expected, "Correct the recipe.")

    @property
    def leaves_length(self) -> bool:
        """See `TreeFields.leaves_length`."""
        return super().leaves_length and (self.tree == "auto" or self.min_confidence == "auto")

    @property
    def max_length(self) -> int:
        """See `CachedDraftFields.max_length`."""
        return self.max_draft_tokens if self.num_draft_tokens == "auto" else self.num_draft_tokens

    @property
    def min_path(self) -> float:
        """See `CachedDraftFields.min_path`."""
        return 0.0 if self.min_confidence == "auto" else self.min_confidence
