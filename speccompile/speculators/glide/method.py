# SPDX-License-Identifier: Apache-2.0
"""GLIDE as a method: a small decoder that reads the target's last cache where it lies."""

from __future__ import annotations

from collections.abc import Mapping

from speccompile.core.jobs import CandidateOptions, GraphJob, MethodContext
from speccompile.core.method import Method
from speccompile.core.protocols import Engine
from speccompile.drafting.cached_drafts import CachedDraftProposer
from speccompile.speculators.glide.config import Config as GlideConfig
from speccompile.speculators.glide.rows import GlideRows
from speccompile.speculators.glide.training import HeadsConfig

DRAFT = "draft"  # the graph's name in the bundle
SOURCE = "speccompile.speculators.glide.source:GlideSource"


class GlideMethod(Method):
    """See `speccompile.core.method.Method`."""

    name = "glide"
    Config = GlideConfig
    TrainingConfig = HeadsConfig
    formats = "speccompile.speculators.glide.formats:FORMATS"
    trainer = "speccompile.speculators.glide.training:GlideTrainer"

    def graph_jobs(self, config: GlideConfig) -> tuple[GraphJob, ...]:
        """The drafter."""
        options = CandidateOptions(config.guesses_needed, config.has_laws)
        return (GraphJob(DRAFT, config.model, config.quantization, SOURCE, options, config.config),)

    def make_proposer(
        self, config: GlideConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> CachedDraftProposer:
        """The proposer over the drafter's engine; how far it drafts depends on the measured costs."""
        engine, max_rows = engines[DRAFT], context.seq_lens.get(DRAFT, context.max_seq_len)
        rows = GlideRows(engine, max_rows, context.max_draft_nodes)
        return CachedDraftProposer(rows, *config.make_drafts(rows, engine, DRAFT, context))
