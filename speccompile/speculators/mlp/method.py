# SPDX-License-Identifier: Apache-2.0
"""The MLP speculator as a method: one graph of all heads, fed with the target's hidden state."""

from __future__ import annotations

from collections.abc import Mapping

from speccompile.core.jobs import GraphJob, MethodContext, TargetOutputs
from speccompile.core.method import Method
from speccompile.core.protocols import Engine, Proposer
from speccompile.speculators.mlp.config import Config as MlpConfig
from speccompile.speculators.mlp.training import HeadsConfig

HEADS = "heads"  # the graph's name in the bundle
SOURCE = "speccompile.speculators.mlp.source:HeadsSource"


class MlpMethod(Method):
    """See `speccompile.core.method.Method`."""

    name = "mlp"
    Config = MlpConfig
    TrainingConfig = HeadsConfig
    formats = "speccompile.speculators.mlp.formats:FORMATS"
    trainer = "speccompile.speculators.mlp.training:MlpTrainer"

    def target_outputs(self, config: MlpConfig) -> TargetOutputs:
        """What the LM head reads: the state behind the final norm, which the heads were trained on."""
        return TargetOutputs(hidden=True)

    def graph_jobs(self, config: MlpConfig) -> tuple[GraphJob, ...]:
        """The heads."""
        return (GraphJob(HEADS, config.model, config.quantization, SOURCE, config.form_options(), config.config),)

    def make_proposer(self, config: MlpConfig, engines: Mapping[str, Engine], context: MethodContext) -> Proposer:
        """The proposer over the heads' engine."""
        return config.make_proposer(engines[HEADS], HEADS, context)
