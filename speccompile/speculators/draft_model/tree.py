# SPDX-License-Identifier: Apache-2.0
"""Drafts trees, level by level, with a small model that keeps a cache of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping

from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.protocols import Engine
from speccompile.drafting.budget import Budget
from speccompile.drafting.cached_drafts import CachedDraftProposer
from speccompile.drafting.dynamic_tree import TreeGrower
from speccompile.drafting.kv_cache import DraftCache
from speccompile.drafting.static_tree import StaticTrees
from speccompile.speculators.draft_model.config import Config


class TreeProposer(CachedDraftProposer):
    """See `speccompile.core.protocols.Proposer`.

    Args:
        config: of the method.
        engine: the draft (`guessing_spec`).
        costs: measured, of `target` and of the draft; empty: time is not looked at.
        draft: name of the draft's costs.
        context: sizes.
    """

    def __init__(
        self, config: Config, engine: Engine, costs: Mapping[str, StepCosts], draft: str, context: MethodContext
    ) -> None:
        max_rows = context.seq_lens.get(draft, context.max_seq_len)
        self.cache = DraftCache(engine, max_rows, context.max_draft_nodes)
        self.drafts: StaticTrees | TreeGrower
        if (shape := config.shape) is not None:
            may_sample = config.drafts != "greedy"
            self.drafts = StaticTrees(self.cache, shape, may_sample=may_sample, vocab_size=engine.spec.vocab_size)
        else:
            none = StepCosts()
            policy = Budget(
                context.max_draft_nodes,
                min(config.tree_depth, context.max_draft_nodes),
                config.tree_width,
                costs.get("target", none),
                costs.get(draft, none),
            )
            self.drafts = TreeGrower(self.cache, policy, math.log(config.confidence_odds))
        super().__init__(self.cache, self.drafts, self.drafts)
