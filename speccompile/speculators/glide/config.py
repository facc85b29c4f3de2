# SPDX-License-Identifier: Apache-2.0
"""Drafting with GLIDE: recipe fields, and what the build and the runtime ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from speccompile.common.parameters import check_parameters, parameter
from speccompile.core.jobs import CandidateOptions, GraphJob, MethodContext
from speccompile.core.method import Method
from speccompile.core.protocols import Engine
from speccompile.drafting.cached_drafts import CachedDraftFields
from speccompile.drafting.proposer import DraftProposer
from speccompile.speculators.glide.proposer import GlideRows

DRAFT = "draft"  # the graph's name in the bundle
SOURCE = "speccompile.speculators.glide.checkpoint:GlideSource"


@dataclass(frozen=True)
class GlideConfig(CachedDraftFields):
    """A GLIDE drafter: a small decoder that also reads the cache of the target's last layer.

    Args:
        model: checkpoint folder or hub id of the drafter.
        config: folder with the drafter's config.json, where the hub cannot be reached; for random weights.
    """

    model: str
    config: str | None = None


@dataclass(frozen=True)
class GlideTraining:
    """Sizes of the training. Drafts of a `block` see the rows of the target's cache before its root."""

    num_layers: int = parameter(1, ge=1)
    intermediate_size: int = parameter(0, ge=0)  # of its MLPs; 0: the target's
    block: int = parameter(5, ge=1)

    def __post_init__(self) -> None:
        check_parameters(self, "training.heads")


class GlideMethod(Method):
    """The speculation method of a `GlideConfig`."""

    name = "glide"
    Config = GlideConfig
    TrainingConfig = GlideTraining
    formats = "speccompile.speculators.glide.checkpoint:FORMATS"
    trainer = "speccompile.speculators.glide.trainer:GlideTrainer"

    def graph_jobs(self, config: GlideConfig) -> tuple[GraphJob, ...]:
        options = CandidateOptions(config.candidates_needed, config.has_probs)
        return (GraphJob(DRAFT, config.model, config.quantization, SOURCE, options, config.config),)

    def make_proposer(
        self, config: GlideConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> DraftProposer:
        engine, max_rows = engines[DRAFT], context.seq_lens.get(DRAFT, context.max_seq_len)
        rows = GlideRows(engine, max_rows, context.max_draft_nodes)
        return DraftProposer(rows, *config.make_drafts(rows, engine, DRAFT, context))
