# SPDX-License-Identifier: Apache-2.0
"""Drafting with the target's own weights on a coarser grid: recipe fields, and what the build and the runtime ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from speccompile.common.parameters import parameter
from speccompile.core.jobs import AS_TARGET, CandidateOptions, GraphJob, MethodContext
from speccompile.core.protocols import Engine
from speccompile.core.registry import Method
from speccompile.drafting.proposer import DraftProposer
from speccompile.drafting.shared_rows import SharedRows
from speccompile.drafting.tree_config import MAX_DEPTH, CachedDraftFields

DRAFT = "self_draft"  # the graph's name in the bundle, beside which other methods have a `draft`
SOURCE = "speccompile.speculators.self_draft.checkpoint:SelfDraftSource"
THE_TARGET = "target"


@dataclass(frozen=True, kw_only=True)
class SelfDraftConfig(CachedDraftFields):
    """The target's own weights draft, on a coarser grid and on the target's caches.

    Args:
        quantization: of the draft's weights, coarser than the target's; `target`: the target's own, for a draft with
            fewer layers, so that they are shared.
        num_layers: decoder layers of the target that run; those left out are spread evenly between the first and the
            last one. `all`: every layer.
        confidence_odds: see `CachedDraftFields`; the same weights agree more often than their confidences say.
        min_gain: see `bundle.choices.why_left_out`; 0: the draft is built in any case.

    Raises:
        RecipeError: a value is out of range.
    """

    quantization: str = "int4"
    num_layers: int | Literal["all"] = parameter("all", ge=2, words=("all",))
    tree_depth: int = parameter(10, ge=1, le=MAX_DEPTH)
    confidence_odds: float = parameter(8.0, ge=0.02, le=50)
    min_gain: float = parameter(0.0, ge=0, le=10)


@dataclass(frozen=True)
class SelfDraftOptions(CandidateOptions):
    """Options of the draft's graph; see `SelfDraftConfig`."""

    num_layers: int | Literal["all"] = "all"


class SelfDraftMethod(Method):
    """The speculation method of a `SelfDraftConfig`."""

    name = "self_draft"
    Config = SelfDraftConfig
    default_section = "speccompile.speculators.self_draft.checkpoint:section_for_target"

    def graph_jobs(self, config: SelfDraftConfig) -> tuple[GraphJob, ...]:
        quantization = AS_TARGET if config.quantization == THE_TARGET else config.quantization
        options = SelfDraftOptions(config.candidates_needed, config.has_probs, num_layers=config.num_layers)
        return (GraphJob(DRAFT, AS_TARGET, quantization, SOURCE, options, min_gain=config.min_gain),)

    def make_proposer(
        self, config: SelfDraftConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> DraftProposer:
        engine = engines[DRAFT]
        rows = SharedRows(engine, context.max_seq_len)
        return DraftProposer(rows, *config.make_drafts(rows, engine, DRAFT, context))
