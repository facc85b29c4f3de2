# SPDX-License-Identifier: Apache-2.0
"""Drafting with a Prophet transformer: recipe fields, and what the build and the runtime ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from speccompile.core.jobs import GraphJob, MethodContext, TargetOutputs
from speccompile.core.method import Method
from speccompile.core.proposer import Proposer
from speccompile.core.protocols import Engine
from speccompile.drafting.heads_config import HeadsFields
from speccompile.errors import RecipeError
from speccompile.graph_kinds.heads import FormOptions
from speccompile.training_contract import check_positive

HEADS = "heads"  # the graph's name in the bundle
SOURCE = "speccompile.speculators.prophet.checkpoint:ProphetSource"


@dataclass(frozen=True)
class ProphetConfig(HeadsFields):
    """A small causal transformer that starts from the target's hidden state.

    Args:
        model: checkpoint folder or hub id of the transformer.
        max_draft_tokens: tokens of a chain where `num_draft_tokens` is `auto`; all of them are drafted in every step.

    Raises:
        RecipeError: a value is out of range.
    """

    model: str
    max_draft_tokens: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.max_draft_tokens <= 64:
            got = repr(self.max_draft_tokens)
            raise RecipeError("speculator.max_draft_tokens", got, "1 to 64", "Correct the recipe.")


@dataclass(frozen=True)
class ProphetTraining:
    """Sizes and settings of the training.

    Args:
        horizon: drafts trained from every start; longer than the drafts that will be used.
        starts: share of the text's positions that are starts in a step, drawn anew each time.
    """

    num_layers: int = 2
    num_heads: int = 6
    num_kv_heads: int = 2
    intermediate_size: int = 1024
    horizon: int = 8
    starts: float = 0.25

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            got = f"{self.num_kv_heads} for {self.num_heads} heads"
            raise RecipeError("training.heads.num_kv_heads", got, "a divisor of num_heads", "Correct the recipe.")
        if not 0 < self.starts <= 1:
            raise RecipeError("training.heads.starts", f"{self.starts}", "above 0, at most 1", "Correct the recipe.")
        check_positive(self, ("num_layers", "horizon", "intermediate_size"))


class ProphetMethod(Method):
    """See `speccompile.core.method.Method`."""

    name = "prophet"
    Config = ProphetConfig
    TrainingConfig = ProphetTraining
    formats = "speccompile.speculators.prophet.checkpoint:FORMATS"
    trainer = "speccompile.speculators.prophet.trainer:ProphetTrainer"

    def target_outputs(self, config: ProphetConfig) -> TargetOutputs:
        return TargetOutputs(hidden=True)

    def graph_jobs(self, config: ProphetConfig) -> tuple[GraphJob, ...]:
        options = config.form_options()
        if options == FormOptions():  # a chain whose length the recipe leaves open
            options = FormOptions(max_depth=config.max_draft_tokens)
        return (GraphJob(HEADS, config.model, config.quantization, SOURCE, options, config.config),)

    def make_proposer(self, config: ProphetConfig, engines: Mapping[str, Engine], context: MethodContext) -> Proposer:
        return config.make_proposer(engines[HEADS], HEADS, context)
