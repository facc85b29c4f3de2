# SPDX-License-Identifier: Apache-2.0
"""Trees of the heads' candidates: fixed, or the likeliest products."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from speccompile.core.jobs import StepCosts
from speccompile.core.protocols import Engine
from speccompile.core.specs import CANDIDATES
from speccompile.drafting.budget import Budget
from speccompile.drafting.heads import HeadsProposer

if TYPE_CHECKING:
    from speccompile.speculators.medusa.config import MedusaConfig


class MedusaProposer(HeadsProposer):
    """See `speccompile.core.protocols.Proposer`.

    The candidates of a head do not depend on those before, so every product of candidates is a path: the likeliest
    ones are found without drafting again. With one candidate per head they are a chain, as they are where a chain is
    asked of heads that were built for trees.

    Args:
        max_draft_nodes: draft tokens one step may score at most.
        heads: measured costs of a run; without both, time is not weighed.
    """

    def __init__(
        self,
        config: MedusaConfig,
        engine: Engine,
        max_draft_nodes: int,
        target: StepCosts | None,
        heads: StepCosts | None,
    ) -> None:
        num_heads, num_candidates = engine.spec.output(CANDIDATES).dims[1:]
        assert isinstance(num_heads, int) and isinstance(num_candidates, int)
        depth = num_heads if config.tree != "auto" else min(num_heads, config.tree_depth)
        num_candidates = 1 if config.tree == "chain" else num_candidates
        budget = Budget(max_draft_nodes, depth, num_candidates, target, heads or StepCosts(), num_runs=1)
        odds = math.log(config.confidence_odds)
        super().__init__(engine, budget, config.shape, odds, num_candidates=num_candidates)
