# SPDX-License-Identifier: Apache-2.0
"""Drafting with an EAGLE-3 drafter: recipe fields, and what the build and the runtime ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from speccompile.common.parameters import HeadsTraining, parameter
from speccompile.core.jobs import CandidateOptions, GraphJob, MethodContext, TargetOutputs
from speccompile.core.protocols import Engine
from speccompile.core.registry import Method
from speccompile.drafting.feature_config import FusedFields, FusedLayers, FusionOptions
from speccompile.drafting.feature_drafts import fused_features
from speccompile.drafting.proposer import DraftProposer
from speccompile.errors import RecipeError

DRAFT, FUSION = "draft", "fusion"  # the graphs' names in the bundle
SOURCES = "speccompile.speculators.eagle3.checkpoint"
RULE = f"{SOURCES}:layers_of_target"  # reads the checkpoint, which decoding does not need


@dataclass(frozen=True)
class Eagle3Config(FusedFields):
    """An EAGLE-3 or P-EAGLE drafter. Its other fields are `FeatureFields`.

    Args:
        model: checkpoint folder or hub id of the drafter.
        layers: decoder layers of the target, from 0, whose residual streams are read, in the order of the drafter's
            `fc`; `auto`: as its config.json says, else the published choice for the target's number of layers.
        parallel_drafting: draft all tokens of a path in one run, from masks, as P-EAGLE trains it; `auto`: where the
            drafter's config.json names its mask token.
    """

    model: str
    layers: tuple[int, ...] | Literal["auto"] = "auto"
    parallel_drafting: bool | Literal["auto"] = field(default="auto", kw_only=True)


@dataclass(frozen=True)
class DraftOptions(CandidateOptions):
    """Options of the drafter's graph."""

    layers: tuple[int, ...] | None  # of the target, see `Eagle3Config.chosen_layers`


@dataclass(frozen=True)
class Eagle3Training(HeadsTraining):
    """Sizes and settings of the training.

    Args:
        layers: decoder layers of the target, from 0, whose streams are fused; empty: an early, the middle, a late one.
        draft_vocab_size: size of the draft vocabulary, the most frequent tokens of the text; 0: all tokens.
        unrolled_steps: drafts of a chain that are trained: on the drafter's own features, or from masks.
        starts: share of the text's positions from which chains are drafted in a step, drawn anew each time.
        mask_token_id: a token that texts do not have, whose embedding is trained; -1: the target's padding.
    """

    layers: tuple[int, ...] = ()
    draft_vocab_size: int = parameter(0, ge=0)
    intermediate_size: int = parameter(0, ge=0)  # of the MLP; 0: the target's
    unrolled_steps: int = parameter(5, ge=1)
    starts: float = parameter(0.25, gt=0, le=1)
    fc_norm: bool = False  # a norm of its own for each of the three streams, as EAGLE-3.1 has
    norm_output: bool = False  # the next draft reads what the LM head reads, after the norm, as in EAGLE-3.1
    head_rank: int = parameter(0, ge=0)  # inner width of an LM head that is two products; 0: one product
    num_layers: int = parameter(1, ge=1)  # of the drafter; P-EAGLE usually has four
    parallel_drafting: bool = False  # all drafts of a chain in one run, the later ones from masks, as in P-EAGLE
    mask_token_id: int = parameter(-1, ge=-1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers and len(self.layers) != 3:
            raise RecipeError("training.heads.layers", f"{self.layers}", "three layers", "Correct the recipe.")
        if self.parallel_drafting and self.unrolled_steps < 2:
            got, expected = f"{self.unrolled_steps}", "2 or more with parallel_drafting: a mask for each but the first"
            raise RecipeError("training.heads.unrolled_steps", got, expected, "Raise it.")

    def chosen_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layers for a target of `num_layers` layers. Raises RecipeError: it lacks one, or has too few."""
        # The published choice: the states before layers 2, n / 2 and n - 3.
        layers = self.layers or (1, num_layers // 2 - 1, num_layers - 4)
        if len(set(layers)) < 3 or min(layers) < 0 or max(layers) >= num_layers:
            expected = f"three different layers of the target's {num_layers}"
            raise RecipeError("training.heads.layers", f"{layers}", expected, "Name three layers.")
        return layers


class Eagle3Method(Method):
    """The speculation method of a `Eagle3Config`."""

    name = "eagle3"
    Config = Eagle3Config
    TrainingConfig = Eagle3Training
    formats = "speccompile.speculators.eagle3.layouts:FORMATS"
    trainer = "speccompile.speculators.eagle3.trainer:Eagle3Trainer"

    def target_outputs(self, config: Eagle3Config) -> TargetOutputs:
        return TargetOutputs(hidden_layers=FusedLayers(RULE, config.model, config.config, config.chosen_layers))

    def graph_jobs(self, config: Eagle3Config) -> tuple[GraphJob, ...]:
        own, layers = (config.model, config.quantization), config.chosen_layers
        masks = config.parallel_drafting
        options = DraftOptions(
            config.candidates_needed,
            config.has_probs,
            layers,
            max_parallel=config.depth_asked if masks else 1,
            is_parallel=masks is True,
        )
        return (
            GraphJob(DRAFT, *own, f"{SOURCES}:DraftSource", options, config.config),
            GraphJob(FUSION, *own, f"{SOURCES}:FusionSource", FusionOptions(layers), config.config),
        )

    def make_proposer(
        self, config: Eagle3Config, engines: Mapping[str, Engine], context: MethodContext
    ) -> DraftProposer:
        draft, masks = engines[DRAFT], config.parallel_drafting
        has_masks = draft.spec.mask_token is not None
        if masks is True and not has_masks:
            got, todo = "a drafter built without a mask token", "Build a bundle whose recipe says so."
            raise RecipeError("speculator.parallel_drafting", got, "a drafter that reads masks", todo)
        fuse, names = fused_features(engines[FUSION])
        return config.make_proposer(draft, fuse, names, DRAFT, context, has_masks=has_masks and bool(masks))
