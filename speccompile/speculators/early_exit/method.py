# SPDX-License-Identifier: Apache-2.0
"""Self-speculation as a method: one more graph of the target's first layers, on the target's caches."""

from __future__ import annotations

from collections.abc import Mapping

from speccompile.core.jobs import AS_TARGET, GraphJob, MethodContext
from speccompile.core.method import Method
from speccompile.core.protocols import Engine
from speccompile.drafting.cached_drafts import CachedDraftProposer
from speccompile.speculators.early_exit.config import Config as ExitConfig
from speccompile.speculators.early_exit.config import ExitOptions
from speccompile.speculators.early_exit.rows import SharedRows
from speccompile.speculators.early_exit.training import HeadsConfig

DRAFT = "draft"  # the graph's name in the bundle
SOURCE = "speccompile.speculators.early_exit.source:ExitSource"
THE_TARGET = "target"


class EarlyExitMethod(Method):
    """See `speccompile.core.method.Method`."""

    name = "early_exit"
    Config = ExitConfig
    TrainingConfig = HeadsConfig
    formats = "speccompile.speculators.early_exit.formats:FORMATS"
    trainer = "speccompile.speculators.early_exit.training:EarlyExitTrainer"

    def graph_jobs(self, config: ExitConfig) -> tuple[GraphJob, ...]:
        """The first layers."""
        quantization = AS_TARGET if config.quantization == THE_TARGET else config.quantization
        head = (config.model is not None, config.num_exit_layers)
        options = ExitOptions(config.guesses_needed, config.has_laws, *head)
        return (GraphJob(DRAFT, config.model or THE_TARGET, quantization, SOURCE, options, config.config),)

    def make_proposer(
        self, config: ExitConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> CachedDraftProposer:
        """The proposer over the first layers; how far it drafts depends on the measured costs."""
        engine = engines[DRAFT]
        rows = SharedRows(engine, context.max_seq_len)
        return CachedDraftProposer(rows, *config.make_drafts(rows, engine, DRAFT, context))
