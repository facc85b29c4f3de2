# SPDX-License-Identifier: Apache-2.0
"""Medusa as a method: one graph of all heads, fed with the target's hidden state."""

from __future__ import annotations

from collections.abc import Mapping

from speccompile.core.jobs import GraphJob, MethodContext, TargetOutputs
from speccompile.core.method import Method
from speccompile.core.protocols import Engine
from speccompile.speculators.medusa.config import Config as MedusaConfig
from speccompile.speculators.medusa.config import HeadsOptions
from speccompile.speculators.medusa.proposer import MedusaProposer
from speccompile.speculators.medusa.training import HeadsConfig

HEADS = "heads"  # the graph's name in the bundle
SOURCE = "speccompile.speculators.medusa.source:HeadsSource"


class MedusaMethod(Method):
    """See `speccompile.core.method.Method`."""

    name = "medusa"
    Config = MedusaConfig
    TrainingConfig = HeadsConfig
    formats = "speccompile.speculators.medusa.formats:FORMATS"
    trainer = "speccompile.speculators.medusa.training:MedusaTrainer"

    def target_outputs(self, config: MedusaConfig) -> TargetOutputs:
        """What the LM head reads: the state behind the final norm, which the heads were trained on."""
        return TargetOutputs(hidden=True)

    def graph_jobs(self, config: MedusaConfig) -> tuple[GraphJob, ...]:
        """The heads."""
        options = HeadsOptions(
            num_heads=None if config.num_heads == "auto" else config.num_heads,
            num_candidates=1 if config.tree == "chain" else config.guesses_needed,
            least_heads=0 if config.shape is None else config.shape.max_depth,
        )
        return (GraphJob(HEADS, config.model, config.quantization, SOURCE, options, config.config),)

    def make_proposer(
        self, config: MedusaConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> MedusaProposer:
        """The proposer over the heads' engine."""
        costs = context.costs
        return MedusaProposer(config, engines[HEADS], context.max_draft_nodes, costs.get("target"), costs.get(HEADS))
