# SPDX-License-Identifier: Apache-2.0
"""Shared by methods whose heads draft in one run from the target's hidden state: recipe fields and proposers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from speccompile.common.parameters import parameter
from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.proposer import Proposer
from speccompile.core.protocols import Engine
from speccompile.drafting.budget import Budget
from speccompile.drafting.heads import HeadsProposer
from speccompile.drafting.tree_config import TreeFields
from speccompile.graph_kinds.heads import FormOptions, grown_depth


@dataclass(frozen=True, kw_only=True)
class HeadsFields(TreeFields):
    """Recipe fields; a method's `Config` inherits them. Raises RecipeError: a value is out of range.

    Args:
        num_draft_tokens: length of a chain, the same in every step; or `auto`: as many tokens as are worth their time,
            up to the number of heads. A grown tree is no deeper.
        drafts: of a chain: `greedy` (deterministic), `sampled` (from the heads' own distribution at the request's
            temperature), or `auto`: sampled where the request samples. A tree's drafts are never drawn.
        min_confidence: of a chain: tokens on less likely paths are not scored; `auto`: 0, measured costs decide.
        confidence_odds: initial odds that a draft token is accepted, divided by the odds given by its confidence.
    """

    quantization: str = "auto"  # `none`, `int8` or `int4`; `auto`: what the backend has for drafts of such a target
    num_draft_tokens: int | Literal["auto"] = parameter("auto", ge=1, le=64, words=("auto",))
    drafts: Literal["auto", "greedy", "sampled"] = parameter("auto", words=("auto", "greedy", "sampled"))
    min_confidence: float | Literal["auto"] = parameter("auto", ge=0, lt=1, words=("auto",))
    confidence_odds: float = parameter(1.0, ge=0.02, le=50)
    config: str | None = None  # folder with the speculator's config.json, used instead of the hub's; for random weights

    @property
    def leaves_length(self) -> bool:
        return super().leaves_length and (self.tree == "auto" or "auto" == self.num_draft_tokens == self.min_confidence)

    @property
    def fixed_length(self) -> int:
        return 0 if self.num_draft_tokens == "auto" else self.num_draft_tokens

    def form_options(self) -> FormOptions:
        """Returns the options of the heads' job."""
        shape, length = self.shape, None if self.num_draft_tokens == "auto" else self.num_draft_tokens
        if shape is not None:
            return FormOptions(depth=shape.max_depth, choices=shape.choices)
        if self.tree == "auto":
            return FormOptions(length, self.tree_depth, width=self.tree_width, num_candidates=self.num_candidates)
        return FormOptions(length)

    def make_proposer(
        self, engine: Engine, graph: str, context: MethodContext, kind: type[HeadsProposer] = HeadsProposer
    ) -> Proposer:
        """Returns the proposer over the heads' engine. Raises RecipeError: the engine drafts another tree."""
        costs, shape, built = (
            (context.costs.get("target"), context.costs.get(graph, StepCosts())),
            self.shape,
            engine.spec,
        )
        log_odds, length, floor = math.log(self.confidence_odds), self.num_draft_tokens, self.min_confidence
        if built.gives_probs:
            most = built.num_drafts if length == "auto" else min(built.num_drafts, length)
            budget = Budget(
                most,
                most,
                1,
                *costs,
                is_fixed=length != "auto" or floor != "auto",
                min_path=0.0 if floor == "auto" else floor,
                num_runs=1,
            )
            return kind(engine, budget, None, log_odds, may_draw=self.drafts != "greedy")
        depth = (
            grown_depth(built.num_drafts, self.tree_width, self.num_candidates) if shape is None else shape.max_depth
        )
        budget = Budget(context.max_draft_nodes, depth, self.tree_width, *costs, num_runs=1)
        return kind(engine, budget, shape, log_odds)
