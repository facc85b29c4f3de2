# SPDX-License-Identifier: Apache-2.0
"""Recipe fields of drafting by a small model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from speccompile.drafting.tree_config import TreeFields
from speccompile.errors import RecipeError


@dataclass(frozen=True)
class Config(TreeFields):
    """A draft model.

    With `tree` the draft's engine guesses behind every node of a tree; num_draft_tokens, max_draft_tokens
    and min_confidence are those of chains and are not read then.

    Args:
        model: checkpoint folder or hub id of the draft.
        quantization: `none`, `int8` or `int4`.
        num_draft_tokens: a fixed draft length, or `auto`: as long as a further token is worth its time.
        max_draft_tokens: upper bound of `auto`.
        drafts: `greedy` (deterministic), `sampled` (from the draft's own law at the request's temperature), or
            `auto`: sampled where the request samples and the tree, if any, has a fixed shape: one that is grown
            follows the draft's confidences, which drawn tokens must not.
        min_confidence: draft no further behind a path that the draft itself believes in less than this;
            `auto`: 0 with a fixed draft length, and the measured costs decide otherwise.
        confidence_odds: the odds that a draft token is accepted, over the odds that the draft's confidence in it
            means, before a slot's own verdicts are known; above 1 for a draft that is too modest.
        allow_tokenizer_mismatch: build although draft and target have different tokenizers.
        config: folder with the draft's config.json, where the hub's is not at hand; for random weights.
        tree, tree_width, tree_depth, num_guesses: see `drafting.tree_config.TreeFields`.

    Raises:
        RecipeError: a value is out of range.
    """

    # Fields that bundles of earlier builds name, with the values that ask for what is done now.
    RETIRED_FIELDS: ClassVar[Mapping[str, tuple[str, ...]]] = {"engine_form": ("auto", "stepwise")}

    model: str
    quantization: str = "none"
    num_draft_tokens: int | Literal["auto"] = "auto"
    max_draft_tokens: int = 10
    drafts: Literal["auto", "greedy", "sampled"] = "auto"
    min_confidence: float | Literal["auto"] = "auto"
    confidence_odds: float = 2.7
    allow_tokenizer_mismatch: bool = False
    config: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        length, floor = self.num_draft_tokens, self.min_confidence
        checks = (
            ("num_draft_tokens", length == "auto" or 1 <= int(length) <= 64, length, "auto, or 1 to 64"),
            ("max_draft_tokens", 1 <= self.max_draft_tokens <= 64, self.max_draft_tokens, "1 to 64"),
            ("drafts", self.drafts in ("auto", "greedy", "sampled"), self.drafts, "auto, greedy or sampled"),
            ("min_confidence", floor == "auto" or 0 <= float(floor) < 1, floor, "auto, or 0 to below 1"),
            ("confidence_odds", 0.02 <= self.confidence_odds <= 50, self.confidence_odds, "0.02 to 50"),
        )
        for name, is_right, got, expected in checks:
            if not is_right:
                raise RecipeError(f"speculator.{name}", repr(got), expected, "Correct the recipe.")
        if self.tree == "auto" and self.drafts == "sampled":
            expected = "greedy or auto with speculator.tree: auto"
            raise RecipeError("speculator.drafts", "'sampled'", expected, "Give the tree a fixed shape.")

    @property
    def leaves_length(self) -> bool:
        """See `TreeFields.leaves_length`."""
        return super().leaves_length and (self.tree == "auto" or "auto" == self.num_draft_tokens == self.min_confidence)

    @property
    def has_laws(self) -> bool:
        """Whether the draft's engine must give the laws that trees are drawn from."""
        return self.shape is not None and self.drafts != "greedy"

    @property
    def max_length(self) -> int:
        """Longest draft that this configuration can make."""
        return self.max_draft_tokens if self.num_draft_tokens == "auto" else self.num_draft_tokens
