# SPDX-License-Identifier: Apache-2.0
"""Drafting with Medusa heads: recipe fields, and what the build and the runtime ask."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from speccompile.common.parameters import HeadsTraining, parameter
from speccompile.core.jobs import GraphJob, MethodContext, StepCosts, TargetOutputs
from speccompile.core.protocols import Engine
from speccompile.core.registry import Method
from speccompile.core.specs import CANDIDATES, GraphSpec
from speccompile.drafting.budget import Budget
from speccompile.drafting.heads import HeadsProposer
from speccompile.drafting.tree_config import Tree, TreeFields
from speccompile.graph_kinds.heads import candidate_heads_spec

HEADS = "heads"  # the graph's name in the bundle
SOURCE = "speccompile.speculators.medusa.checkpoint:HeadsSource"


@dataclass(frozen=True)
class HeadsSizes:
    """Sizes of the heads."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int
    uses_target_lm_head: bool  # all heads end in the target's LM head
    draft_vocab_size: int = 0  # tokens that the heads draft; 0: all
    num_drafts: int = 0  # heads in the graph; 0: all of the checkpoint
    num_candidates: int = 0
    num_params: int = 0  # parameters in the graph; 0 before the export
    model_type: str = "medusa"

    def spec(self, name: str) -> GraphSpec:
        return candidate_heads_spec(name, self.hidden_size, self.vocab_size, self.num_drafts, self.num_candidates)

    def config(self) -> dict[str, Any]:
        """Returns the config.json of a checkpoint, with the published names."""
        return {
            "model_type": self.model_type,
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "original_lm_head": self.uses_target_lm_head,
        }


@dataclass(frozen=True)
class MedusaConfig(TreeFields):
    """Medusa heads. Their drafts are deterministic at any temperature.

    Args:
        model: checkpoint folder or hub id of the heads.
        quantization: `none`, `int8` or `int4`; `auto`: what the backend has for drafts of such a target.
        config: folder with the heads' config.json, where the hub cannot be reached; for random weights.
        num_heads: heads that are used; `auto`: as many as config.json says, which may differ from the files.
        confidence_odds: initial odds that a candidate is accepted, over the odds that the head's confidence means.
        tree: see `TreeFields`; with `auto` the likeliest products of the heads' candidates, as far as they gain time.
    """

    model: str
    quantization: str = "auto"
    num_heads: int | Literal["auto"] = parameter("auto", ge=1, le=64, words=("auto",))
    confidence_odds: float = parameter(1.0, ge=0.02, le=50)
    config: str | None = None
    tree: Tree = field(default="auto", kw_only=True)


@dataclass(frozen=True)
class HeadsOptions:
    """Options of the heads' graph."""

    num_heads: int | None  # heads in the graph; None: all
    num_candidates: int
    least_heads: int = field(default=0, compare=False)  # heads that the recipe's tree needs: fewer are refused


@dataclass(frozen=True)
class MedusaTraining(HeadsTraining):
    """Sizes and settings of the training.

    Args:
        lm_head: `target`: all heads end in the target's own LM head, frozen and not stored; `own`: each has its own.
    """

    num_heads: int = parameter(4, ge=1, le=64)
    num_layers: int = parameter(1, ge=1, le=64)
    lm_head: str = parameter("own", words=("own", "target"))


class MedusaMethod(Method):
    """The speculation method of a `MedusaConfig`."""

    name = "medusa"
    Config = MedusaConfig
    TrainingConfig = MedusaTraining
    formats = "speccompile.speculators.medusa.checkpoint:FORMATS"
    trainer = "speccompile.speculators.medusa.trainer:MedusaTrainer"

    def target_outputs(self, config: MedusaConfig) -> TargetOutputs:
        return TargetOutputs(hidden=True)

    def graph_jobs(self, config: MedusaConfig) -> tuple[GraphJob, ...]:
        options = HeadsOptions(
            num_heads=None if config.num_heads == "auto" else config.num_heads,
            num_candidates=1 if config.tree == "chain" else config.candidates_needed,
            least_heads=0 if config.shape is None else config.shape.max_depth,
        )
        return (GraphJob(HEADS, config.model, config.quantization, SOURCE, options, config.config),)

    def make_proposer(
        self, config: MedusaConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> HeadsProposer:
        engine, costs = engines[HEADS], context.costs
        num_heads, num_candidates = engine.spec.output(CANDIDATES).dims[1:]
        assert isinstance(num_heads, int) and isinstance(num_candidates, int)
        depth = num_heads if config.tree != "auto" else min(num_heads, config.tree_depth)
        num_candidates = 1 if config.tree == "chain" else num_candidates  # of heads that were built for trees
        run_costs = costs.get(HEADS) or StepCosts()
        budget = Budget(context.max_draft_nodes, depth, num_candidates, costs.get("target"), run_costs, num_runs=1)
        odds = math.log(config.confidence_odds)
        return HeadsProposer(engine, budget, config.shape, odds, num_candidates=num_candidates)
