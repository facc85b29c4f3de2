# SPDX-License-Identifier: Apache-2.0
"""Drafting with an EAGLE-1 or EAGLE-2 drafter: recipe fields, and what the build and the runtime ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from speccompile.core.jobs import CandidateOptions, GraphJob, MethodContext, TargetOutputs
from speccompile.core.protocols import Engine
from speccompile.core.registry import Method
from speccompile.core.specs import HIDDEN
from speccompile.drafting.feature_config import FeatureFields
from speccompile.drafting.proposer import DraftProposer

DRAFT = "draft"  # the graph's name in the bundle
SOURCE = "speccompile.speculators.eagle.checkpoint:DraftSource"


@dataclass(frozen=True)
class EagleConfig(FeatureFields):
    """An EAGLE-1 or 2 drafter; the two differ in how trees are drafted, not in what is trained.

    Args:
        model: checkpoint folder or hub id of the drafter. Its other fields are `FeatureFields`.
    """

    model: str


class EagleMethod(Method):
    """The speculation method of a `EagleConfig`."""

    name = "eagle"
    Config = EagleConfig
    formats = "speccompile.speculators.eagle.checkpoint:FORMATS"

    def target_outputs(self, config: EagleConfig) -> TargetOutputs:
        return TargetOutputs(hidden=True)

    def graph_jobs(self, config: EagleConfig) -> tuple[GraphJob, ...]:
        options = CandidateOptions(config.candidates_needed, config.has_probs)
        return (GraphJob(DRAFT, config.model, config.quantization, SOURCE, options, config.config),)

    def make_proposer(
        self, config: EagleConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> DraftProposer:
        return config.make_proposer(engines[DRAFT], lambda outputs: outputs[HIDDEN], (HIDDEN,), DRAFT, context)
