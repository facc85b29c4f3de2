# SPDX-License-Identifier: Apache-2.0
"""Drafting with a block drafter: recipe fields, and what the build and the runtime ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from speccompile.common.parameters import HeadsTraining, declared, parameter
from speccompile.core.jobs import GraphJob, MethodContext, TargetOutputs
from speccompile.core.protocols import Engine
from speccompile.core.registry import Method, find_class
from speccompile.drafting.block_drafts import BlockCache
from speccompile.drafting.feature_config import FusedFields, FusedLayers, FusionOptions
from speccompile.drafting.feature_drafts import fused_features
from speccompile.drafting.proposer import DraftProposer
from speccompile.drafting.tree_config import MAX_CANDIDATES, MAX_DEPTH
from speccompile.errors import RecipeError

DRAFT, FUSION, STEP = "draft", "fusion", "step"  # the graphs' names in the bundle
SOURCES = "speccompile.speculators.dflash.checkpoint"
RULE = f"{SOURCES}:layers_of_target"  # reads the checkpoint, which decoding does not need
PUBLISHED = "speccompile.speculators.dflash.layouts:published_layers"


@dataclass(frozen=True)
class DflashConfig(FusedFields):
    """A block drafter: DFlash, DFlash 2, DSpark, LiLiCorr, Domino. Its other fields are `FeatureFields`.

    Args:
        model: checkpoint folder or hub id of the drafter.
        layers: decoder layers of the target, from 0, whose residual streams are read, in the order of the drafter's
            `fc`; `auto`: as its config.json says.
        tree_depth: as in `TreeFields`; no deeper than the drafter's block.
        slot_candidates: tokens of a slot that may be drafted; `auto`: as its config.json says (LiLiCorr's most), else
            16.
        sample_from_anchor: whether the root's row of a block drafts as well; `auto`: as its config.json says.
    """

    model: str
    layers: tuple[int, ...] | Literal["auto"] = "auto"
    tree_depth: int = field(default=16, kw_only=True, metadata=declared(ge=1, le=MAX_DEPTH))
    slot_candidates: int | Literal["auto"] = field(
        default="auto", kw_only=True, metadata=declared(ge=1, le=MAX_CANDIDATES, words=("auto",))
    )
    sample_from_anchor: bool | Literal["auto"] = field(default="auto", kw_only=True)

    def check_engine(self, engine: Engine, max_draft_nodes: int) -> None:
        todo, spec, shape = "Build a bundle whose recipe says so; at load it is too late.", engine.spec, self.shape
        self.check_depth(engine, max_draft_nodes)
        if shape is not None and spec.num_candidates <= shape.max_rank:
            got, expected = f"a draft built for {spec.num_candidates} candidates a slot", f"{shape.max_rank + 1}"
            raise RecipeError("speculator.tree", got, expected, todo)
        if self.num_tree_drafts > max_draft_nodes:
            got = f"{self.num_tree_drafts} draft tokens"
            expected = f"at most engine.max_draft_nodes = {max_draft_nodes}"
            raise RecipeError("speculator.tree", got, expected, todo)


@dataclass(frozen=True)
class BlockOptions:
    """Options of the drafter's graph; see `DflashConfig`."""

    num_drafts: int
    num_candidates: int  # `slot_candidates`; 0: auto
    starts_at_root: bool | None  # `sample_from_anchor`; None: auto
    layers: tuple[int, ...] | None  # of the target; None: auto
    is_exact: bool = field(default=False, compare=False)
    least_candidates: int = field(default=1, compare=False)  # of a slot, that a tree of a fixed shape needs


@dataclass(frozen=True)
class DflashTraining(HeadsTraining):
    """Sizes and settings of the training: DFlash 2 by default; DFlash with ranks and taps of 0.

    Args:
        layers: decoder layers of the target, from 0, whose residual streams are read; empty: the published five.
        block_size: rows of a block: the root's, and one for each draft.
        mask_token_id: a token that texts do not have, whose embedding masked rows get; -1: the target's padding.
        starts: share of the text's positions from which a block is drafted in a step, drawn anew each time.
    """

    layers: tuple[int, ...] = ()
    num_layers: int = parameter(2, ge=1)
    intermediate_size: int = parameter(0, ge=0)  # of its MLPs; 0: the target's
    block_size: int = parameter(8, ge=2)  # the root and a draft
    mask_token_id: int = parameter(-1, ge=-1)
    conv_kernel_size: int = parameter(2, ge=0)  # taps of the convolutions around attention and MLP; 0: there are none
    conv_group_size: int = parameter(16, ge=1)
    selector_rank: int = parameter(64, ge=0)  # of the pair scores; 0: there are none
    selector_top_k: int = parameter(16, ge=1)
    is_causal: bool = False  # whether rows of a block see the earlier rows alone
    starts: float = parameter(0.1, gt=0, le=1)

    def chosen_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layers for a target of `num_layers` layers. Raises RecipeError: it lacks one, or has too few."""
        layers: tuple[int, ...] = self.layers or find_class(PUBLISHED)(num_layers, 5)
        if len(set(layers)) < len(layers) or min(layers) < 0 or max(layers) >= num_layers:
            expected = f"different layers of the target's {num_layers}"
            raise RecipeError("training.heads.layers", f"{layers}", expected, "Name some of them.")
        return layers


class DflashMethod(Method):
    """The speculation method of a `DflashConfig`."""

    name = "dflash"
    Config = DflashConfig
    TrainingConfig = DflashTraining
    vllm_names = ("dflash2", "dspark")
    formats = "speccompile.speculators.dflash.layouts:FORMATS"
    trainer = "speccompile.speculators.dflash.trainer:DflashTrainer"

    def target_outputs(self, config: DflashConfig) -> TargetOutputs:
        return TargetOutputs(hidden_layers=FusedLayers(RULE, config.model, config.config, config.chosen_layers))

    def graph_jobs(self, config: DflashConfig) -> tuple[GraphJob, ...]:
        own, layers = (config.model, config.quantization), config.chosen_layers
        options = BlockOptions(
            config.depth_asked,
            0 if config.slot_candidates == "auto" else config.slot_candidates,
            None if config.sample_from_anchor == "auto" else config.sample_from_anchor,
            layers,
            config.is_depth_fixed,
            1 if config.shape is None else config.shape.max_rank + 1,
        )
        return (
            GraphJob(DRAFT, *own, f"{SOURCES}:DraftSource", options, config.config),
            GraphJob(FUSION, *own, f"{SOURCES}:FusionSource", FusionOptions(layers), config.config),
            GraphJob(STEP, *own, f"{SOURCES}:StepSource", options, config.config, is_optional=True),
        )

    def make_proposer(
        self, config: DflashConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> DraftProposer:
        draft = engines[DRAFT]
        fuse, names = fused_features(engines[FUSION])
        max_rows = context.seq_lens.get(DRAFT, context.max_seq_len)
        cache = BlockCache(draft, fuse, names, max_rows, context.max_draft_nodes + 1, engines.get(STEP))
        drafts = config.make_drafts(cache, draft, DRAFT, context, draft.spec.num_drafts)
        return DraftProposer(cache, *drafts)
