# SPDX-License-Identifier: Apache-2.0
"""Drafting with an MLP speculator: recipe fields, and what the build and the runtime ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from speccompile.common.parameters import check_parameters, parameter
from speccompile.core.jobs import GraphJob, MethodContext, TargetOutputs
from speccompile.core.proposer import Proposer
from speccompile.core.protocols import Engine
from speccompile.core.registry import Method
from speccompile.core.specs import GraphSpec
from speccompile.drafting.heads_config import HeadsFields
from speccompile.graph_kinds.heads import heads_spec

HEADS = "heads"  # the graph's name in the bundle
SOURCE = "speccompile.speculators.mlp.checkpoint:HeadsSource"

MODEL_TYPE = "mlp_speculator"
# (template, dims of all heads but the first of the projections, the first head of those that may share it)
WEIGHTS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("emb.{}.weight", ("vocab", "inner"), 0),
    ("proj.{}.weight", ("inner", "inner"), 1),
    ("head.{}.weight", ("vocab", "inner"), 0),
    ("ln.{}.weight", ("inner",), 0),
    ("ln.{}.bias", ("inner",), 0),
)


@dataclass(frozen=True)
class HeadsSizes:
    """Sizes and switches of a speculator."""

    model_type: str
    vocab_size: int
    hidden_size: int
    inner_size: int  # of the heads' own state (`inner_dim`)
    num_heads: int  # heads in the checkpoint (`n_predict`); the state's weight depends on it
    num_drafts: int
    is_tied: bool  # heads share embedding, LM head and norm; projections from the second on are one
    scales_input: bool  # the target's state is normalised first
    num_params: int = 0

    def spec(self, name: str) -> GraphSpec:
        """Returns the inputs and outputs of the graph."""
        return heads_spec(name, self.hidden_size, self.vocab_size, self.num_drafts)

    def shares(self, kind: str, head: int) -> int:
        """Returns the head whose weight of that kind `head` uses."""
        first = 1 if kind.startswith("proj") else 0
        return first if self.is_tied and head > first else head


@dataclass(frozen=True)
class MlpConfig(HeadsFields):
    """An MLP speculator as IBM trains and publishes them.

    Args:
        model: checkpoint folder or hub id of the speculator.
    """

    model: str


@dataclass(frozen=True)
class MlpTraining:
    """Sizes and settings of the training."""

    num_heads: int = parameter(4, ge=1, le=64)
    inner_size: int = parameter(0, ge=0)  # width of the heads' state; 0: the target's
    tie_weights: bool = True  # heads share embedding, LM head and norm; all projections but the first are one
    scale_input: bool = True  # the target's state is normalised first

    def __post_init__(self) -> None:
        check_parameters(self, "training.heads", num_heads=(2 if self.tie_weights else 1, 64))


class MlpMethod(Method):
    """The speculation method of a `MlpConfig`."""

    name = "mlp"
    Config = MlpConfig
    vllm_names = ("mlp_speculator",)
    TrainingConfig = MlpTraining
    formats = "speccompile.speculators.mlp.checkpoint:FORMATS"
    trainer = "speccompile.speculators.mlp.trainer:MlpTrainer"

    def target_outputs(self, config: MlpConfig) -> TargetOutputs:
        return TargetOutputs(hidden=True)

    def graph_jobs(self, config: MlpConfig) -> tuple[GraphJob, ...]:
        return (GraphJob(HEADS, config.model, config.quantization, SOURCE, config.form_options(), config.config),)

    def make_proposer(self, config: MlpConfig, engines: Mapping[str, Engine], context: MethodContext) -> Proposer:
        return config.make_proposer(engines[HEADS], HEADS, context)
