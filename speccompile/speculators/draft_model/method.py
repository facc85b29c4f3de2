# SPDX-License-Identifier: Apache-2.0
"""Drafting by a small model as a method: one more decoder graph."""

from __future__ import annotations

from collections.abc import Mapping

from speccompile.core.jobs import CandidateOptions, DecoderOptions, GraphJob, MethodContext
from speccompile.core.method import Method
from speccompile.core.protocols import Engine
from speccompile.drafting.kv_cache import DraftCache
from speccompile.drafting.proposer import DraftProposer
from speccompile.speculators.draft_model.config import Config as DraftModelConfig
from speccompile.speculators.draft_model.training import HeadsConfig

DRAFT = "draft"  # the graph's name in the bundle


class DraftModelMethod(Method):
    """See `speccompile.core.method.Method`."""

    name = "draft_model"
    Config = DraftModelConfig
    TrainingConfig = HeadsConfig
    trainer = "speccompile.speculators.draft_model.training:DraftModelTrainer"

    def graph_jobs(self, config: DraftModelConfig) -> tuple[GraphJob, ...]:
        """The draft model."""
        options = DecoderOptions(candidates=CandidateOptions(config.candidates_needed, config.has_probs))
        return (GraphJob(DRAFT, config.model, config.quantization, options=options, config=config.config),)

    def make_proposer(
        self, config: DraftModelConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> DraftProposer:
        """The proposer over the draft's engine; how far it drafts depends on the measured costs."""
        engine, max_rows = engines[DRAFT], context.seq_lens.get(DRAFT, context.max_seq_len)
        rows = DraftCache(engine, max_rows, context.max_draft_nodes)
        return DraftProposer(rows, *config.make_drafts(rows, engine, DRAFT, context))
