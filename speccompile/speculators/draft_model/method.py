# SPDX-License-Identifier: Apache-2.0
"""Drafting by a small model as a method: one more decoder graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speccompile.core.jobs import GraphJob, MethodContext
from speccompile.core.protocols import Engine
from speccompile.core.specs import chain_rows, is_unrolled
from speccompile.speculators.draft_model.config import Config as DraftModelConfig
from speccompile.speculators.draft_model.policy import LengthPolicy
from speccompile.speculators.draft_model.proposer import DraftModelProposer
from speccompile.speculators.draft_model.unrolled import UnrolledProposer

DRAFT = "draft"  # the graph's name in the bundle


class DraftModelMethod:
    """See `speccompile.core.protocols.Method`."""

    name = "draft_model"
    Config = DraftModelConfig

    def target_outputs(self, config: DraftModelConfig) -> dict[str, Any]:
        """Nothing besides the verdicts."""
        return {}

    def graph_jobs(self, config: DraftModelConfig) -> tuple[GraphJob, ...]:
        """The draft model."""
        options = (("num_steps", config.num_steps),) if config.engine_form == "unrolled" else ()
        return (GraphJob(DRAFT, config.model, config.quantization, options=options, config=config.config),)

    def make_proposer(
        self, config: DraftModelConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> DraftModelProposer:
        """The proposer for the form that the draft was built in; its length policy reads the measured costs."""
        engine, costs = engines[DRAFT], context.costs
        form = UnrolledProposer if is_unrolled(engine.spec) else DraftModelProposer
        draft_costs = costs[DRAFT].shared_by(chain_rows(engine.spec) + 1) if DRAFT in costs else None
        policy = LengthPolicy(config, costs.get("target"), draft_costs, context.max_draft_nodes)
        max_rows = context.seq_lens.get(DRAFT, context.max_seq_len)
        return form(engine, policy, max_rows, may_sample=config.drafts != "greedy")
