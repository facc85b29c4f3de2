# SPDX-License-Identifier: Apache-2.0
"""EAGLE-1 and 2 as a method: one graph, whose features are what the target's LM head reads."""

from __future__ import annotations

from collections.abc import Mapping

from speccompile.core.jobs import CandidateOptions, GraphJob, MethodContext, TargetOutputs
from speccompile.core.method import Method
from speccompile.core.protocols import Engine
from speccompile.core.specs import HIDDEN
from speccompile.drafting.feature_drafts import FeatureProposer
from speccompile.speculators.eagle.config import Config as EagleConfig

DRAFT = "draft"  # the graph's name in the bundle
SOURCE = "speccompile.speculators.eagle.source:DraftSource"


class EagleMethod(Method):
    """See `speccompile.core.method.Method`."""

    name = "eagle"
    Config = EagleConfig
    formats = "speccompile.speculators.eagle.formats:FORMATS"

    def target_outputs(self, config: EagleConfig) -> TargetOutputs:
        """What the LM head reads, behind the final norm: the drafter's own features stand in its place."""
        return TargetOutputs(hidden=True)

    def graph_jobs(self, config: EagleConfig) -> tuple[GraphJob, ...]:
        """The drafter."""
        options = CandidateOptions(config.guesses_needed, config.has_laws)
        return (GraphJob(DRAFT, config.model, config.quantization, SOURCE, options, config.config),)

    def make_proposer(
        self, config: EagleConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> FeatureProposer:
        """The proposer; the target's states are handed on as they come."""
        return config.make_proposer(engines[DRAFT], lambda outputs: outputs[HIDDEN], DRAFT, context)
