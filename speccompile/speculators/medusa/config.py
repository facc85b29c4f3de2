# SPDX-License-Identifier: Apache-2.0
"""Recipe fields of drafting with Medusa heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from speccompile.drafting.tree_config import Tree, TreeFields
from speccompile.errors import RecipeError


@dataclass(frozen=True)
class Config(TreeFields):
    """Medusa heads. What they draft is never drawn: the text is the target's at any temperature.

    Args:
        model: checkpoint folder or hub id of the heads.
        quantization: `none`, `int8` or `int4`.
        num_heads: heads that are used; `auto`: as many as config.json says. Where a published config states another
            number than its files hold, the files are believed if the number is given here.
        confidence_odds: the odds that a guess is right, over the odds that the head's confidence in it means, before
            a slot's own verdicts are known.
        config: folder with the heads' config.json, where the hub's is not at hand; for random weights.
        tree: see `TreeFields`; with `auto` the likeliest products of the heads' guesses, as far as they pay.

    Raises:
        RecipeError: a value is out of range.
    """

    model: str
    quantization: str = "none"
    num_heads: int | Literal["auto"] = "auto"
    confidence_odds: float = 1.0
    config: str | None = None
    tree: Tree = field(default="auto", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        heads, odds = self.num_heads, self.confidence_odds
        checks = (
            ("num_heads", heads == "auto" or 1 <= int(heads) <= 64, heads, "auto, or 1 to 64"),
            ("confidence_odds", 0.02 <= odds <= 50, odds, "0.02 to 50"),
        )
        for name, is_right, got, expected in checks:
            if not is_right:
                raise RecipeError(f"speculator.{name}", repr(got), expected, "Correct the recipe.")


@dataclass(frozen=True)
class HeadsOptions:
    """Of the heads' graph.

    Args:
        num_heads: heads in the graph; None: all.
        num_candidates: most probable tokens of each.
        least_heads: heads that the recipe's tree needs: fewer are refused.
    """

    num_heads: int | None
    num_candidates: int
    least_heads: int = field(default=0, compare=False)
