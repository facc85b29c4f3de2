# SPDX-License-Identifier: Apache-2.0
"""Sizes of Medusa heads in a graph: from config.json and the headers of the weights. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.checkpoints.checkpoint import read_config
from speccompile.core.heads_specs import guessing_heads_spec
from speccompile.core.jobs import WeightCounts
from speccompile.core.specs import GraphSpec, ModelDims
from speccompile.doctor.doctor import open_known
from speccompile.errors import CheckpointError
from speccompile.speculators.medusa.formats import FORMATS

_HEADS, _LAYERS = ("medusa_num_heads", "num_heads"), ("medusa_num_layers", "num_hidden_layers")


@dataclass(frozen=True)
class GraphSizes:
    """Sizes of the heads in a graph.

    Args:
        model_type: of the checkpoint's layout.
        vocab_size: of the target.
        hidden_size: of the target.
        num_heads: heads in the checkpoint.
        num_layers: residual blocks of a head.
        uses_target_lm_head: all heads end in the target's LM head.
        num_drafts: heads in the graph.
        num_guesses: tokens that each guesses.
        num_params: parameters in the graph.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_layers: int
    uses_target_lm_head: bool
    num_drafts: int
    num_guesses: int
    num_params: int = 0

    def spec(self, name: str) -> GraphSpec:
        """Inputs and outputs of the graph."""
        return guessing_heads_spec(name, self.hidden_size, self.vocab_size, self.num_drafts, self.num_guesses)

    def counts(self) -> WeightCounts:
        """Weights of the graph, in which heads that share an LM head have one copy of it."""
        blocks = self.num_drafts * self.num_layers
        heads = 1 if self.uses_target_lm_head else self.num_drafts
        linear = blocks * self.hidden_size**2 + heads * self.vocab_size * self.hidden_size
        return WeightCounts(linear + blocks * self.hidden_size, linear, blocks * self.hidden_size)


def read_sizes(
    folder: Path, target: ModelDims, *, has_weights: bool, num_drafts: int | None, num_guesses: int
) -> GraphSizes:
    """The sizes of a checkpoint; what its config leaves out, its weights or the target tell.

    Args:
        folder: of the checkpoint, or with a config.json alone.
        target: sizes of the target.
        has_weights: the folder has weights, whose headers are read. Their number of heads is believed: published
            configs are known to state another.
        num_drafts: heads wanted in the graph; None: all.
        num_guesses: tokens that each guesses.

    Raises:
        CheckpointError: no Medusa heads, or nothing tells how many.
    """
    known: dict[str, Any] = {}
    if has_weights:
        case = open_known(folder, FORMATS, None)
        known = {name: size for name, size in case.sizes.items() if size is not None}
    config = read_config(folder)
    num_heads = known.get("num_heads") or _first(config, _HEADS)
    if not isinstance(num_heads, int):
        todo = "Give the speculator's own config."
        raise CheckpointError(f"{folder / 'config.json'} ({_HEADS[0]})", "nothing", "a number of heads", todo)
    uses_target = known.get("uses_target_head", config.get("original_lm_head", False))
    return GraphSizes(
        model_type="medusa",
        vocab_size=known.get("vocab") or config.get("vocab_size") or target.vocab_size,
        hidden_size=known.get("hidden") or config.get("hidden_size") or target.hidden_size,
        num_heads=num_heads,
        num_layers=known.get("num_layers") or _first(config, _LAYERS) or 1,
        uses_target_lm_head=bool(uses_target),
        num_drafts=num_drafts or num_heads,
        num_guesses=num_guesses,
    )


def _first(config: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)
