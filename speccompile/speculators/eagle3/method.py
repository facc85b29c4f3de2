# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 as a method: the drafter's graph, and the one that fuses three of the target's states to its features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speccompile.core.jobs import GraphJob, MethodContext, TargetOutputs
from speccompile.core.method import Method
from speccompile.core.protocols import Engine, Outputs
from speccompile.core.specs import FEATURES
from speccompile.drafting.feature_drafts import FeatureProposer
from speccompile.speculators.eagle3.config import Config as Eagle3Config
from speccompile.speculators.eagle3.config import DraftOptions, FusedLayers, FusionOptions
from speccompile.speculators.eagle3.training import HeadsConfig

DRAFT, FUSION = "draft", "fusion"  # the graphs' names in the bundle
SOURCES = "speccompile.speculators.eagle3.source"


class Eagle3Method(Method):
    """See `speccompile.core.method.Method`."""

    name = "eagle3"
    Config = Eagle3Config
    TrainingConfig = HeadsConfig
    formats = "speccompile.speculators.eagle3.formats:FORMATS"
    trainer = "speccompile.speculators.eagle3.training:Eagle3Trainer"

    def target_outputs(self, config: Eagle3Config) -> TargetOutputs:
        """Three residual streams; which of them depends on the checkpoint and on the target's number of layers."""
        return TargetOutputs(hidden_layers=FusedLayers(config.model, config.config, config.chosen_layers))

    def graph_jobs(self, config: Eagle3Config) -> tuple[GraphJob, ...]:
        """Drafter and fusion."""
        own, layers = (config.model, config.quantization), config.chosen_layers
        options = DraftOptions(config.guesses_needed, config.has_laws, layers)
        return (
            GraphJob(DRAFT, *own, f"{SOURCES}:DraftSource", options, config.config),
            GraphJob(FUSION, *own, f"{SOURCES}:FusionSource", FusionOptions(layers), config.config),
        )

    def make_proposer(
        self, config: Eagle3Config, engines: Mapping[str, Engine], context: MethodContext
    ) -> FeatureProposer:
        """The proposer over both engines."""
        fusion = engines[FUSION]
        names = [t.name for t in fusion.spec.inputs]

        def fuse(outputs: Outputs) -> Any:
            return fusion.run({name: outputs[name] for name in names})[FEATURES]

        return config.make_proposer(engines[DRAFT], fuse, DRAFT, context)
