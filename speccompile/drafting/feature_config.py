# SPDX-License-Identifier: Apache-2.0
"""Shared by methods whose draft reads features of the target: recipe fields, fused layers, the proposer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from speccompile.core.jobs import MethodContext
from speccompile.core.protocols import Engine, Outputs
from speccompile.core.registry import find_class
from speccompile.drafting.feature_drafts import FeatureCache
from speccompile.drafting.mask_drafts import MaskFeatureCache
from speccompile.drafting.proposer import DraftProposer
from speccompile.drafting.tree_config import CachedDraftFields, Tree
from speccompile.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class FeatureFields(CachedDraftFields):
    """Recipe fields; a method's `Config` inherits them. Raises RecipeError: a value is out of range.

    Args:
        tree: see `TreeFields`; with `auto` the tree follows the draft's confidences and is longer than its chain.
    """

    config: str | None = None  # folder with the speculator's config.json, used instead of the hub's; for random weights
    tree: Tree = "auto"

    def make_proposer(
        self,
        engine: Engine,
        make: Callable[[Outputs], Any],
        names: Sequence[str],
        graph: str,
        context: MethodContext,
        *,
        has_masks: bool = False,
    ) -> DraftProposer:
        """Returns the proposer over the draft's engine. Raises RecipeError: the engine was built for less.

        Args:
            make: makes features [batch, nodes, hidden] of the target's outputs.
            names: of the target's outputs that `make` reads.
            has_masks: draft all tokens of a path in one run; the engine reads masks.
        """
        max_rows, block = context.seq_lens.get(graph, context.max_seq_len), engine.spec.num_drafts
        most = context.max_draft_nodes + 1
        if not has_masks:
            cache = FeatureCache(engine, make, names, max_rows, most)
            return DraftProposer(cache, *self.make_drafts(cache, engine, graph, context))
        masked = MaskFeatureCache(engine, make, names, max_rows, most, min(self.depth_asked, block))
        return DraftProposer(masked, *self.make_drafts(masked, engine, graph, context, block, has_masks=True))


class FusedFields(FeatureFields):
    """`FeatureFields` of a draft that reads residual streams of the target; a `Config` declares the field `layers`."""

    layers: tuple[int, ...] | Literal["auto"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers == "auto":
            return
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or len(set(self.layers)) != len(self.layers) or min(self.layers) < 0:
            where, expected = "speculator.layers", "auto, or different layers from 0 on"
            raise RecipeError(where, f"{list(self.layers)}", expected, "Correct the recipe.")

    @property
    def chosen_layers(self) -> tuple[int, ...] | None:
        """The layers; None: auto."""
        return None if self.layers == "auto" else self.layers


@dataclass(frozen=True)
class FusionOptions:
    """Options of the graph that fuses residual streams of the target."""

    layers: tuple[int, ...] | None  # of the target, from 0; None: as the checkpoint says


@dataclass(frozen=True)
class FusedLayers:
    """A `core.jobs.LayersRule` that depends on the checkpoint and the target's number of layers.

    Args:
        rule: import string of a function of the other fields, the target's number of layers and "checkpoint" or
            "random", that returns the layers; decoding does not need it.
    """

    rule: str
    model: str
    config: str | None
    asked: tuple[int, ...] | None  # by the recipe; None: as the checkpoint says

    def layers(self, num_layers: int, weights: str) -> tuple[int, ...]:
        layers: tuple[int, ...] = find_class(self.rule)(self.model, self.config, self.asked, num_layers, weights)
        return layers
