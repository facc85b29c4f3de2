# SPDX-License-Identifier: Apache-2.0
"""Recipe fields of drafting with the target's own first layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from speccompile.core.jobs import CandidateOptions
from speccompile.drafting.cached_drafts import CachedDraftFields
from speccompile.errors import RecipeError


@dataclass(frozen=True)
class Config(CachedDraftFields):
    """The target's own first layers draft, with a trained head behind them or with the target's final norm.

    Args:
        model: checkpoint folder or hub id of a trained head; None: the target's final norm stands behind the layers.
        num_exit_layers: decoder layers of the target that run; None: those that the head was trained behind, and
            without a head half of the target's.
        quantization: `target`: as the target's own layers, so that their weights are shared; or a form of its own.
        config: folder with the head's config.json, where the hub's is not at hand; for random weights.
        num_draft_tokens, drafts, confidence_odds: see `drafting.cached_drafts.CachedDraftFields`.
        tree, tree_width, tree_depth, num_guesses: see `drafting.tree_config.TreeFields`.

    Raises:
        RecipeError: a value is out of range.
    """

    model: str | None = None
    num_exit_layers: int | None = None
    quantization: str = field(default="target", kw_only=True)
    config: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_exit_layers is not None and self.num_exit_layers < 1:
            got = f"{self.num_exit_layers}"
            raise RecipeError("speculator.num_exit_layers", got, "1 or more", "Correct the recipe.")


@dataclass(frozen=True)
class ExitOptions(CandidateOptions):
    """Of the graph of the first layers.

    Args:
        has_head: the job's model is a trained head; otherwise it is not read.
        num_exit_layers: see `Config`.
    """

    has_head: bool
    num_exit_layers: int | None
