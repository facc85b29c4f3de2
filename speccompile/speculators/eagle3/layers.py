# SPDX-License-Identifier: Apache-2.0
"""Which decoder layers of the target are read. Needs no torch.

Layers are counted from 0, and what is read is the residual stream behind them. The published choice for n layers are
the streams in front of layers 2, n / 2 and n - 3. A checkpoint that names others does so in one of two ways: those of
one family of trainers say "in front of", those of another "behind"; they are told apart by the first number, which
is 1 where it means "behind" and 2 or more where it means "in front of" (SGLang reads them by the same rule).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speccompile.checkpoints.checkpoint import read_config
from speccompile.checkpoints.folders import find_folder
from speccompile.checkpoints.tensor_files import SPECULATOR_FILES
from speccompile.core.jobs import GraphJob
from speccompile.errors import CheckpointError, RecipeError
from speccompile.speculators.eagle3.formats import layer_ids

NUM_STREAMS = 3


def layers_of_target(
    model: str, config: str | None, asked: Sequence[int] | None, num_layers: int, weights: str
) -> tuple[int, ...]:
    """The layers of a target, for its own graph and the speculator's.

    Args:
        model: of the speculator.
        config: see `GraphJob`.
        asked: by the recipe; None: as the checkpoint says, else the published choice.
        num_layers: of the target.
        weights: "checkpoint" or "random"; a random target may have fewer layers than the checkpoint's, which are then
            chosen anew.

    Raises:
        CheckpointError: the checkpoint names layers that the target does not have.
        RecipeError: the recipe does, or the target has too few.
    """
    if asked is not None:
        if len(set(asked)) != NUM_STREAMS or not all(0 <= i < num_layers for i in asked):
            expected = f"{NUM_STREAMS} different layers of the target's {num_layers}"
            raise RecipeError("speculator.layers", f"{list(asked)}", expected, "Correct the recipe.")
        return tuple(asked)
    folder = find_folder(GraphJob("draft", model, config=config), weights, SPECULATOR_FILES)
    named = layers_from_config(folder, read_config(folder))
    if named is None:
        return default_layers(num_layers, is_random=weights == "random")
    if max(named) < num_layers:
        return named
    if weights == "random":
        return default_layers(num_layers, is_random=True)
    got, expected = f"the stream behind layer {max(named)}", f"one of the target's {num_layers} layers"
    todo = "It was trained for another target: give the model that it belongs to."
    raise CheckpointError(str(folder / "config.json"), got, expected, todo)


def layers_from_config(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers that a config names; None where it names none.

    Raises:
        CheckpointError: they are not three different layers.
    """
    ids = layer_ids(config)
    if not ids:
        return None
    is_list = isinstance(ids, list) and all(type(i) is int and i >= 1 for i in ids)
    if not is_list or len(set(ids)) != NUM_STREAMS or len(ids) != NUM_STREAMS:
        expected = f"{NUM_STREAMS} different numbers from 1 on"
        todo = "Name the layers with speculator.layers; the embeddings themselves cannot be read."
        raise CheckpointError(f"{folder / 'config.json'} (eagle_aux_hidden_state_layer_ids)", repr(ids), expected, todo)
    return tuple(ids) if ids[0] == 1 else tuple(i - 1 for i in ids)


def default_layers(num_layers: int, *, is_random: bool = False) -> tuple[int, ...]:
    """The published choice; small random targets have the first, a middle and the last layer.

    Raises:
        RecipeError: there are too few layers.
    """
    published = (1, num_layers // 2 - 1, num_layers - 4)
    if published[0] < published[1] < published[2]:
        return published
    if is_random and num_layers >= NUM_STREAMS:
        return (0, num_layers // 2, num_layers - 1)
    expected = f"{NUM_STREAMS if is_random else 7} layers or more"
    raise RecipeError("speculator.layers", f"a target of {num_layers} layers", expected, "Name three layers.")
