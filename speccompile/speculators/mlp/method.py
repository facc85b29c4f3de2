# SPDX-License-Identifier: Apache-2.0
"""The MLP speculator as a method: one graph of all heads, fed with the target's hidden state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from speccompile.core.cutoff import Cutoff
from speccompile.core.jobs import GraphJob, MethodContext, StepCosts
from speccompile.core.protocols import Engine
from speccompile.core.specs import SAMPLED_TOKENS
from speccompile.speculators.mlp.config import Config as MlpConfig
from speccompile.speculators.mlp.proposer import MlpProposer

HEADS = "heads"  # the graph's name in the bundle
SOURCE = "speccompile.speculators.mlp.source:HeadsSource"


class MlpMethod:
    """See `speccompile.core.protocols.Method`."""

    name = "mlp"
    Config = MlpConfig

    def target_outputs(self, config: MlpConfig) -> dict[str, Any]:
        """What the LM head reads: the state behind the final norm, which the heads were trained on."""
        return {"hidden": True}

    def graph_jobs(self, config: MlpConfig) -> tuple[GraphJob, ...]:
        """The heads."""
        num_drafts = None if config.num_draft_tokens == "auto" else config.num_draft_tokens
        options = (("num_drafts", num_drafts),)
        return (GraphJob(HEADS, config.model, config.quantization, SOURCE, options, config.config),)

    def make_proposer(self, config: MlpConfig, engines: Mapping[str, Engine], context: MethodContext) -> MlpProposer:
        """The proposer over the heads' engine; what it cuts off depends on the measured costs."""
        engine, costs = engines[HEADS], context.costs
        built = engine.spec.output(SAMPLED_TOKENS).dims[1]
        assert isinstance(built, int)
        is_auto, floor = config.num_draft_tokens == "auto", config.min_confidence
        cutoff = Cutoff(
            built if config.num_draft_tokens == "auto" else min(built, config.num_draft_tokens),
            is_fixed=not is_auto or floor != "auto",
            min_confidence=0.0 if floor == "auto" else floor,
            target=costs.get("target", StepCosts()),
            heads=costs.get(HEADS, StepCosts()),
        )
        return MlpProposer(engine, cutoff, math.log(config.confidence_odds), may_sample=config.drafts != "greedy")
