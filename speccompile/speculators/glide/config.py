# SPDX-License-Identifier: Apache-2.0
"""Recipe fields of drafting with GLIDE."""

from __future__ import annotations

from dataclasses import dataclass

from speccompile.drafting.cached_drafts import CachedDraftFields


@dataclass(frozen=True)
class Config(CachedDraftFields):
    """A GLIDE drafter: a small decoder that also reads the cache of the target's last layer.

    Args:
        model: checkpoint folder or hub id of the drafter.
        config: folder with the drafter's config.json, where the hub's is not at hand; for random weights.
        quantization, num_draft_tokens, drafts, confidence_odds: see `drafting.cached_drafts.CachedDraftFields`.
        tree, tree_width, tree_depth, num_guesses: see `drafting.tree_config.TreeFields`.

    Raises:
        RecipeError: a value is out of range.
    """

    model: str
    config: str | None = None
