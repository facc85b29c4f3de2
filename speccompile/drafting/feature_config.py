# SPDX-License-Identifier: Apache-2.0
"""Shared by methods whose draft reads features of the target: recipe fields and the proposer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from speccompile.core.jobs import MethodContext
from speccompile.core.protocols import Engine, Outputs
from speccompile.drafting.cached_drafts import CachedDraftFields
from speccompile.drafting.feature_drafts import FeatureCache
from speccompile.drafting.proposer import DraftProposer
from speccompile.drafting.tree_config import Tree


@dataclass(frozen=True, kw_only=True)
class FeatureFields(CachedDraftFields):
    """Recipe fields; a method's `Config` inherits them.

    Args:
        config: folder with the speculator's config.json, used instead of the hub's; for random weights.
        tree: see `TreeFields`; with `auto` the tree follows the draft's confidences and is longer than its chain.

    Raises:
        RecipeError: a value is out of range.
    """

    config: str | None = None
    tree: Tree = "auto"

    def make_proposer(
        self, engine: Engine, make: Callable[[Outputs], Any], names: Sequence[str], graph: str, context: MethodContext
    ) -> DraftProposer:
        """Returns the proposer over the draft's engine; how far it drafts depends on the measured costs.

        Args:
            engine: of the draft.
            make: makes features [batch, nodes, hidden] of the target's outputs.
            names: of the target's outputs that `make` reads.
            graph: the draft's name in the bundle.
            context: of the proposer.

        Raises:
            RecipeError: the engine was built for less.
        """
        max_rows = context.seq_lens.get(graph, context.max_seq_len)
        cache = FeatureCache(engine, make, names, max_rows, context.max_draft_nodes + 1)
        return DraftProposer(cache, *self.make_drafts(cache, engine, graph, context))
