# SPDX-License-Identifier: Apache-2.0
"""Drafting with a multi-token prediction module: recipe fields, and what the build and the runtime ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from speccompile.common.parameters import HeadsTraining, declared, parameter
from speccompile.core.jobs import AS_TARGET, GraphJob, MethodContext, TargetOutputs
from speccompile.core.protocols import Engine
from speccompile.core.registry import Method
from speccompile.core.specs import HIDDEN, hidden_name
from speccompile.drafting.feature_config import FeatureFields
from speccompile.drafting.proposer import DraftProposer
from speccompile.drafting.tree_config import Tree
from speccompile.graph_kinds.decoder import DraftVocabFields, VocabCandidateOptions

DRAFT = "draft"  # the graph's name in the bundle
SOURCE = "speccompile.speculators.mtp.checkpoint:DraftSource"
Norms = Literal["auto", "w", "1+w"]
Concat = Literal["auto", "embedding_first", "hidden_first"]
Chaining = Literal["auto", "normed", "raw"]
ReadHidden = Literal["after_norm"] | int


@dataclass(frozen=True)
class MtpConfig(DraftVocabFields, FeatureFields):
    """A multi-token prediction module. Others: `FeatureFields`, `DraftVocabFields`.

    Args:
        tree: see `TreeFields`; modules are trained for chains.
        model: folder or hub id of the module, or of a target that has it; none: it is in the target's checkpoint.
        norms: how its norms read their weights, `w` or `1+w`; `auto`: by its checkpoint, else by the architecture.
        concat: order of what the projection reads, `embedding_first` or `hidden_first`; `auto`: by its checkpoint, else
            embedding_first.
        chaining: what the module reads of its own after the first draft: its output after the last norm (`normed`) or
            before it (`raw`); `auto`: by its checkpoint, else by the architecture.
        target_hidden: what it reads of the target: `after_norm`, the state that the LM head reads, or the number of a
            decoder layer, from 0, whose output it reads: with the last one, the state before the final norm.
    """

    model: str | None = None
    tree: Tree = field(default="chain", kw_only=True)
    norms: Norms = field(default="auto", kw_only=True)
    concat: Concat = field(default="auto", kw_only=True)
    chaining: Chaining = field(default="auto", kw_only=True)
    target_hidden: ReadHidden = field(
        default="after_norm", kw_only=True, metadata=declared(ge=0, words=("after_norm",))
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_vocab()

    @property
    def hidden(self) -> str:
        return hidden_name(self.target_hidden) if isinstance(self.target_hidden, int) else HIDDEN


@dataclass(frozen=True)
class MtpOptions(VocabCandidateOptions):
    """Options of the module's graph; see `MtpConfig`. `reads_normed`: the target's final-normed state, as trained."""

    norms: Norms = "auto"
    concat: Concat = "auto"
    chaining: Chaining = "auto"
    reads_normed: bool = field(default=True, compare=False)


@dataclass(frozen=True)
class MtpTraining(HeadsTraining):
    """Settings of the training.

    Args:
        unrolled_steps: drafts of a chain that are trained; the module runs so often on its own output.
        starts: share of the text's positions from which chains are unrolled in a step, drawn anew each time.
        into_target: write the whole target with the module inside, as released models have it; else the module alone.
    """

    unrolled_steps: int = parameter(3, ge=1)
    starts: float = parameter(1.0, gt=0, le=1)
    into_target: bool = False


class MtpMethod(Method):
    """The speculation method of a `MtpConfig`."""

    name = "mtp"
    Config = MtpConfig
    TrainingConfig = MtpTraining
    formats = "speccompile.speculators.mtp.checkpoint:FORMATS"
    trainer = "speccompile.speculators.mtp.trainer:MtpTrainer"
    vllm_names = (
        *("deepseek_mtp", "ernie_mtp", "exaone_moe_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "glm_ocr_mtp"),
        *("mimo_mtp", "nemotron_h_mtp", "pangu_ultra_moe_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "step3p5_mtp"),
    )
    default_section = "speccompile.speculators.mtp.checkpoint:section_for_target"

    def target_outputs(self, config: MtpConfig) -> TargetOutputs:
        if isinstance(config.target_hidden, int):
            return TargetOutputs(hidden_layers=(config.target_hidden,))
        return TargetOutputs(hidden=True)

    def graph_jobs(self, config: MtpConfig) -> tuple[GraphJob, ...]:
        options = MtpOptions(
            config.candidates_needed,
            config.has_probs,
            config.norms,
            config.concat,
            config.chaining,
            config.hidden == HIDDEN,
            vocab=config.draft_vocab,
        )
        model = AS_TARGET if config.model is None else config.model
        return (GraphJob(DRAFT, model, config.quantization, SOURCE, options, config.config),)

    def make_proposer(self, config: MtpConfig, engines: Mapping[str, Engine], context: MethodContext) -> DraftProposer:
        name = config.hidden
        return config.make_proposer(engines[DRAFT], lambda outputs: outputs[name], (name,), DRAFT, context)
