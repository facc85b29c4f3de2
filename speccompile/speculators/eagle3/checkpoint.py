# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 drafters as the source of two graphs; see `layouts` for those on disk. Needs no torch before the export.

The streams after layers, counted from 0, are read; the published choice for n layers is before layers 2, n / 2 and n -
3. A checkpoint that names others means "after" if its first number is 1, else "before" (SGLang's rule).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.checkpoints.checkpoint import read_config
from speccompile.checkpoints.folders import find_folder
from speccompile.checkpoints.tensor_files import SPECULATOR_FILES
from speccompile.core.jobs import GraphJob, SourceContext
from speccompile.core.specs import GraphSpec
from speccompile.errors import CheckpointError, RecipeError
from speccompile.export.feature_source import FeatureSource, FusionGraph, holds
from speccompile.graph_kinds.features import FeatureDims, feature_draft_spec
from speccompile.speculators.eagle3.layouts import (
    EMBEDDINGS,
    FORMATS,
    HEAD,
    IDS,
    MASK_HIDDEN,
    MASK_TOKENS,
    NUM_STREAMS,
    OUTPUTS,
    layer_ids,
    mask_token,
)
from speccompile.speculators.eagle3.speculators_config import layer_of, windows_of

if TYPE_CHECKING:
    import torch

    from speccompile.speculators.eagle3.config import DraftOptions


def layers_of_target(
    model: str, config: str | None, asked: Sequence[int] | None, num_layers: int, weights: str
) -> tuple[int, ...]:
    """Returns the layers of a target, for its own graph and the speculator's.

    Args:
        asked: by the recipe; None: as the checkpoint says, else the published choice.
        weights: "checkpoint" or "random"; a random target may have fewer layers, which are then chosen anew.
    """
    folder = find_folder(GraphJob("draft", model, config=config), weights, SPECULATOR_FILES)
    named = layers_from_config(folder, read_config(folder))
    if asked is not None:
        num = NUM_STREAMS if named is None else len(named)
        if len(set(asked)) != num or len(asked) != num or not all(0 <= i < num_layers for i in asked):
            expected = f"{num} different layers of the target's {num_layers}"
            raise RecipeError("speculator.layers", f"{list(asked)}", expected, "Correct the recipe.")
        return tuple(asked)
    if named is None:
        return default_layers(num_layers, is_random=weights == "random")
    if max(named) < num_layers:
        return named
    if weights == "random":
        return default_layers(num_layers, is_random=True)
    got, expected = f"the stream after layer {max(named)}", f"one of the target's {num_layers} layers"
    todo = "It was trained for another target: give the model that it belongs to."
    raise CheckpointError(str(folder / "config.json"), got, expected, todo)


def layers_from_config(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Returns the layers that a config names; None where it names none."""
    ids, outputs = layer_ids(config), config.get(OUTPUTS) or None
    given, least, key = (ids, 1, IDS[0]) if outputs is None else (outputs, 0, OUTPUTS)
    if not given:
        return None
    is_list = isinstance(given, list) and all(type(i) is int and i >= least for i in given)
    if not is_list or len(set(given)) != len(given):
        todo = "Name the layers with speculator.layers; the embeddings themselves cannot be read."
        where, expected = f"{folder / 'config.json'} ({key})", f"different numbers from {least} on"
        raise CheckpointError(where, repr(given), expected, todo)
    if outputs is not None:
        return tuple(outputs)
    return tuple(ids) if ids[0] == 1 else tuple(i - 1 for i in ids)


def default_layers(num_layers: int, *, is_random: bool = False) -> tuple[int, ...]:
    """Returns the published choice; small random targets have the first, a middle and the last layer."""
    published = (1, num_layers // 2 - 1, num_layers - 4)
    if published[0] < published[1] < published[2]:
        return published
    if is_random and num_layers >= NUM_STREAMS:
        return (0, num_layers // 2, num_layers - 1)
    expected = f"{NUM_STREAMS if is_random else 7} layers or more"
    raise RecipeError("speculator.layers", f"a target of {num_layers} layers", expected, "Name three layers.")


_OF_FUSION = re.compile(rf"^(fc|input_norm|fc_norm\.\d+)\.weight$|^{MASK_HIDDEN}$")


class _Eagle3Source(FeatureSource):
    """Base of the sources of both graphs."""

    formats = FORMATS
    has_windows = True

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        num, stated = self.target.num_layers, job.options.layers
        layers = layers_of_target(job.model, job.config, stated, num, context.weights)
        self.dims: FeatureDims = replace(self.dims, layers=layers)
        layer = layer_of(self.case.config)
        windows = windows_of(layer, self.dims.num_layers)
        self.windows = windows or ()
        if windows is None:
            where = f"{self.folder / 'config.json'} (layer_types or sliding_window)"
            got = f"{layer.get('layer_types')!r} and a window of {layer.get('sliding_window')!r} tokens"
            todo = "`speccompile doctor` says what readers make of it."
            raise CheckpointError(where, got, f"the kind of each of {self.dims.num_layers} layers", todo)


class DraftSource(_Eagle3Source):
    """A `speccompile.core.protocols.GraphSource`. The job has `DraftOptions`."""

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        self.needs_tables = self.is_random or not all(holds(self.folder, name) for name in (EMBEDDINGS, HEAD))
        self.mask_token = self._mask_token()

    def _mask_token(self) -> int | None:
        options: DraftOptions = self.job.options
        has_masks, token = mask_token({**self.case.config, **self.config})
        if not options.is_parallel and (options.max_parallel == 1 or not has_masks):
            return None
        if type(token) is not int or not 0 <= token < self.dims.vocab_size:
            where = f"{self.folder / 'config.json'} ({' or '.join(MASK_TOKENS)})"
            todo = "Use a drafter that was trained with masks (P-EAGLE), or leave speculator.parallel_drafting out."
            raise CheckpointError(where, repr(token), f"a token of the {self.dims.vocab_size} that it reads", todo)
        return token

    def part_of(self, name: str) -> str:
        return "" if _OF_FUSION.search(name) else super().part_of(name)

    def spec(self) -> GraphSpec:
        options: DraftOptions = self.job.options
        num = min(options.num_candidates, self.dims.draft_vocab_size)
        made = feature_draft_spec(self.job.name, self.dims, num, options.gives_probs, self.max_rows, self.windows)
        if self.mask_token is None:
            return made
        return replace(
            made, num_drafts=min(options.max_parallel, self.context.max_draft_nodes), mask_token=self.mask_token
        )

    def make_module(self) -> torch.nn.Module:
        from speccompile.checkpoints.target_tables import read_tables
        from speccompile.speculators.eagle3.model import make_body

        tables = read_tables(self.context) if self.needs_tables else None
        has_masks = self.mask_token is not None
        return make_body(self.config, self.dims, self.read_weights(), tables, has_masks=has_masks)


class FusionSource(FusionGraph, _Eagle3Source):
    """A `speccompile.core.protocols.GraphSource`. The job has `FusionOptions`."""

    def make_module(self) -> torch.nn.Module:
        from speccompile.speculators.eagle3.model import make_fusion

        return make_fusion(self.config, self.dims, self.read_weights())
