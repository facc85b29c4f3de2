# SPDX-License-Identifier: Apache-2.0
"""Recipe fields of drafting with an MLP speculator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from speccompile.errors import RecipeError


@dataclass(frozen=True)
class Config:
    """An MLP speculator as IBM trains and publishes them.

    Args:
        model: checkpoint folder or hub id of the speculator.
        quantization: `none`, `int8` or `int4`.
        num_draft_tokens: heads that are used, at most as many as the speculator has, all of them in every step; or
            `auto`: all, as far as a further token is worth its time.
        drafts: `greedy` (deterministic), `sampled` (from the heads' own law at the request's temperature), or
            `auto`: sampled where the request samples.
        min_confidence: score no further behind a path that is accepted with less than this; `auto`: 0, and the
            measured costs decide.
        confidence_odds: the odds that a draft token is accepted, over the odds that the head's confidence in it
            means, before a slot's own verdicts are known.
        config: folder with the speculator's config.json, where the hub's is not at hand; for random weights.

    Raises:
        RecipeError: a value is out of range.
    """

    model: str
    quantization: str = "none"
    num_draft_tokens: int | Literal["auto"] = "auto"
    drafts: Literal["auto", "greedy", "sampled"] = "auto"
    min_confidence: float | Literal["auto"] = "auto"
    confidence_odds: float = 1.0
    config: str | None = None

    def __post_init__(self) -> None:
        length, floor = self.num_draft_tokens, self.min_confidence
        checks = (
            ("num_draft_tokens", length == "auto" or 1 <= int(length) <= 64, length, "auto, or 1 to 64"),
            ("drafts", self.drafts in ("auto", "greedy", "sampled"), self.drafts, "auto, greedy or sampled"),
            ("min_confidence", floor == "auto" or 0 <= float(floor) < 1, floor, "auto, or 0 to below 1"),
            ("confidence_odds", 0.02 <= self.confidence_odds <= 50, self.confidence_odds, "0.02 to 50"),
        )
        for name, is_right, got, expected in checks:
            if not is_right:
                raise RecipeError(f"speculator.{name}", repr(got), expected, "Correct the recipe.")
