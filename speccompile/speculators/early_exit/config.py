# SPDX-License-Identifier: Apache-2.0
"""Drafting with the target's own first layers: recipe fields, and what the build and the runtime ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from speccompile.common.parameters import HeadsTraining, parameter
from speccompile.core.jobs import AS_TARGET, CandidateOptions, GraphJob, MethodContext
from speccompile.core.protocols import Engine
from speccompile.core.registry import Method
from speccompile.drafting.proposer import DraftProposer
from speccompile.drafting.shared_rows import SharedRows
from speccompile.drafting.tree_config import CachedDraftFields

DRAFT = "draft"  # the graph's name in the bundle
MODEL_TYPE = "early_exit"  # of a head's config.json
SOURCE = "speccompile.speculators.early_exit.checkpoint:ExitSource"
THE_TARGET = "target"


@dataclass(frozen=True)
class ExitConfig(CachedDraftFields):
    """The target's own first layers draft, followed by a trained head or by the target's final norm.

    Args:
        config: folder with the head's config.json, where the hub cannot be reached; for random weights.
        model: checkpoint folder or hub id of a trained head; None: the target's final norm follows the layers.
        num_exit_layers: decoder layers of the target that run; None: as the head was trained, without one half of all.
        quantization: `target`: as the target's own layers, so that their weights are shared; or a form of its own.
    """

    model: str | None = None
    num_exit_layers: int | None = parameter(None, ge=1)
    quantization: str = field(default="target", kw_only=True)
    config: str | None = None


@dataclass(frozen=True)
class ExitOptions(CandidateOptions):
    """Options of the graph of the first layers."""

    has_head: bool  # the job's model is a trained head; otherwise it is not read
    num_exit_layers: int | None


@dataclass(frozen=True)
class ExitTraining(HeadsTraining):
    """Sizes and settings of the training."""

    num_exit_layers: int = parameter(2, ge=1)  # decoder layers of the target that run before the head
    intermediate_size: int = parameter(0, ge=0)  # of the adapter; 0: the target's
    chain: int = parameter(4, ge=1)


class EarlyExitMethod(Method):
    """The speculation method of a `ExitConfig`."""

    name = "early_exit"
    Config = ExitConfig
    TrainingConfig = ExitTraining
    formats = "speccompile.speculators.early_exit.checkpoint:FORMATS"
    trainer = "speccompile.speculators.early_exit.trainer:EarlyExitTrainer"

    def graph_jobs(self, config: ExitConfig) -> tuple[GraphJob, ...]:
        quantization = AS_TARGET if config.quantization == THE_TARGET else config.quantization
        head = (config.model is not None, config.num_exit_layers)
        options = ExitOptions(config.candidates_needed, config.has_probs, *head)
        return (GraphJob(DRAFT, config.model or THE_TARGET, quantization, SOURCE, options, config.config),)

    def make_proposer(self, config: ExitConfig, engines: Mapping[str, Engine], context: MethodContext) -> DraftProposer:
        engine = engines[DRAFT]
        rows = SharedRows(engine, context.max_seq_len)
        return DraftProposer(rows, *config.make_drafts(rows, engine, DRAFT, context))
