# SPDX-License-Identifier: Apache-2.0
"""Prophet as a method: one graph of the whole transformer, unrolled over the drafts, fed with the target's state."""

from __future__ import annotations

from collections.abc import Mapping

from speccompile.core.heads_specs import FormOptions
from speccompile.core.jobs import GraphJob, MethodContext, TargetOutputs
from speccompile.core.method import Method
from speccompile.core.protocols import Engine, Proposer
from speccompile.speculators.prophet.config import Config as ProphetConfig
from speccompile.speculators.prophet.training import HeadsConfig

HEADS = "heads"  # the graph's name in the bundle
SOURCE = "speccompile.speculators.prophet.source:ProphetSource"


class ProphetMethod(Method):
    """See `speccompile.core.method.Method`."""

    name = "prophet"
    Config = ProphetConfig
    TrainingConfig = HeadsConfig
    formats = "speccompile.speculators.prophet.formats:FORMATS"
    trainer = "speccompile.speculators.prophet.training:ProphetTrainer"

    def target_outputs(self, config: ProphetConfig) -> TargetOutputs:
        """What the LM head reads: the state behind the final norm."""
        return TargetOutputs(hidden=True)

    def graph_jobs(self, config: ProphetConfig) -> tuple[GraphJob, ...]:
        """The transformer."""
        options = config.form_options()
        if options == FormOptions():  # a chain whose length the recipe leaves open
            options = FormOptions(max_depth=config.max_draft_tokens)
        return (GraphJob(HEADS, config.model, config.quantization, SOURCE, options, config.config),)

    def make_proposer(self, config: ProphetConfig, engines: Mapping[str, Engine], context: MethodContext) -> Proposer:
        """The proposer over the transformer's engine."""
        return config.make_proposer(engines[HEADS], HEADS, context)
