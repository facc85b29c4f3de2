# SPDX-License-Identifier: Apache-2.0
"""Drafting with a Prophet transformer: recipe fields, and what the build and the runtime ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from speccompile.common.parameters import HeadsTraining, parameter
from speccompile.core.jobs import GraphJob, MethodContext, TargetOutputs
from speccompile.core.proposer import Proposer
from speccompile.core.protocols import Engine
from speccompile.core.registry import Method
from speccompile.drafting.heads_config import HeadsFields
from speccompile.errors import RecipeError
from speccompile.graph_kinds.heads import FormOptions

HEADS = "heads"  # the graph's name in the bundle
SOURCE = "speccompile.speculators.prophet.checkpoint:ProphetSource"

MODEL_TYPE = "prophet"


@dataclass(frozen=True)
class ProphetSizes:
    """Sizes; the fields are those of config.json."""

    vocab_size: int
    target_hidden_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    horizon: int
    rope_theta: float = 10000.0  # base of its positions; the target's state stands at position 0
    rms_norm_eps: float = 1e-5
    uses_target_embeddings: bool = True  # embeddings and LM head are the target's, and not in the checkpoint
    tie_word_embeddings: bool = False  # otherwise, whether its LM head is its embeddings
    model_type: str = MODEL_TYPE
    num_params: int = 0  # parameters in the graph; 0 before the export

    def config_from_sizes(self) -> dict[str, Any]:
        """Returns the config.json of a checkpoint."""
        return {name: value for name, value in asdict(self).items() if name != "num_params"}


@dataclass(frozen=True)
class ProphetConfig(HeadsFields):
    """A small causal transformer that starts from the target's hidden state.

    Args:
        model: checkpoint folder or hub id of the transformer.
        max_draft_tokens: tokens of a chain where `num_draft_tokens` is `auto`; all of them are drafted in every step.
    """

    model: str
    max_draft_tokens: int = parameter(4, ge=1, le=64)


@dataclass(frozen=True)
class ProphetTraining(HeadsTraining):
    """Sizes and settings of the training. `starts`: share of positions that are starts in a step, drawn anew."""

    num_layers: int = parameter(2, ge=1)
    num_heads: int = parameter(6, ge=1)
    num_kv_heads: int = parameter(2, ge=1)
    intermediate_size: int = parameter(1024, ge=1)
    horizon: int = parameter(8, ge=1)  # drafts trained from every start; longer than the drafts that will be used
    starts: float = parameter(0.25, gt=0, le=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_kv_heads:
            got = f"{self.num_kv_heads} for {self.num_heads} heads"
            raise RecipeError("training.heads.num_kv_heads", got, "a divisor of num_heads", "Correct the recipe.")


class ProphetMethod(Method):
    """The speculation method of a `ProphetConfig`."""

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
