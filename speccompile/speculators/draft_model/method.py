# SPDX-License-Identifier: Apache-2.0
"""Drafting by a small model as a method: one more decoder graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speccompile.core.jobs import GraphJob, MethodContext
from speccompile.core.protocols import Engine
from speccompile.speculators.draft_model.config import Config as DraftModelConfig
from speccompile.speculators.draft_model.policy import LengthPolicy
from speccompile.speculators.draft_model.proposer import DraftModelProposer

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
        return (GraphJob(DRAFT, config.model, config.quantization, config=config.config),)

    def make_proposer(
        self, config: DraftModelConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> DraftModelProposer:
        """The proposer over the draft's engine; its length policy reads the measured costs."""
        costs = context.costs
        policy = LengthPolicy(config, costs.get("target"), costs.get(DRAFT), context.max_draft_nodes)
        max_rows = context.seq_lens.get(DRAFT, context.max_seq_len)
        return DraftModelProposer(engines[DRAFT], policy, max_rows, may_sample=config.drafts != "greedy")
