# SPDX-License-Identifier: Apache-2.0
"""Sizes of an MLP speculator: from its config.json, and the weights that follow from them. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.checkpoints.checkpoint import read_config
from speccompile.core.jobs import WeightCounts
from speccompile.core.specs import GraphSpec, heads_spec
from speccompile.errors import CheckpointError

MODEL_TYPE = "mlp_speculator"
PREFIX = "speculator."
# (template, dims of all heads but the first of the projections, the first head of those that may share it)
WEIGHTS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("emb.{}.weight", ("vocab", "inner"), 0),
    ("proj.{}.weight", ("inner", "inner"), 1),
    ("head.{}.weight", ("vocab", "inner"), 0),
    ("ln.{}.weight", ("inner",), 0),
    ("ln.{}.bias", ("inner",), 0),
)


@dataclass(frozen=True)
class HeadsSizes:
    """Sizes and switches of a speculator.

    Args:
        model_type: as config.json says.
        vocab_size: of the target.
        hidden_size: of the target (`emb_dim`).
        inner_size: of the heads' own state (`inner_dim`).
        num_heads: heads in the checkpoint (`n_predict`); the state's weight depends on it.
        num_drafts: heads in the graph.
        is_tied: heads share embedding, LM head and norm; projections from the second on are one.
        scales_input: the target's state is normalised first.
        num_params: parameters in the graph.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    inner_size: int
    num_heads: int
    num_drafts: int
    is_tied: bool
    scales_input: bool
    num_params: int = 0

    def spec(self, name: str) -> GraphSpec:
        """Inputs and outputs of the graph."""
        return heads_spec(name, self.hidden_size, self.vocab_size, self.num_drafts)

    def weights(self) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        """(kind, head, shape) of every weight of all heads, shared ones included."""
        known = {"vocab": self.vocab_size, "inner": self.inner_size}
        for head in range(self.num_heads):
            for kind, dims, first in WEIGHTS:
                shape = tuple(known[d] for d in dims)
                yield kind, head, shape if head >= first else (self.inner_size, self.hidden_size)

    def shares(self, kind: str, head: int) -> int:
        """The head whose weight of that kind `head` uses."""
        first = 1 if kind.startswith("proj") else 0
        return first if self.is_tied and head > first else head

    def counts(self) -> WeightCounts:
        """Weights of the graph. An LM head is a linear of its own even where heads share it."""
        used = {(k, self.shares(k, h)): s for k, h, s in self.weights() if h < self.num_drafts}
        sizes = {key: shape[0] * (shape[1] if len(shape) > 1 else 1) for key, shape in used.items()}
        linear = sum(size for (kind, _), size in sizes.items() if kind.startswith(("proj", "head")))
        return WeightCounts(sum(sizes.values()), linear, sum(sizes.values()) - linear)


def read_sizes(folder: Path, num_drafts: int | None = None) -> HeadsSizes:
    """The sizes in a folder's config.json.

    Args:
        folder: of the checkpoint.
        num_drafts: heads wanted in the graph; None: all.

    Raises:
        CheckpointError: not the config of an MLP speculator, or a size is missing or wrong.
    """
    path, config = folder / "config.json", read_config(folder)
    kind = config.get("model_type")
    if kind != MODEL_TYPE:
        todo = "Give the speculator's own checkpoint, not the target's."
        raise CheckpointError(f"{path} (model_type)", repr(kind), repr(MODEL_TYPE), todo)
    sizes = {name: _size(path, config, name) for name in ("emb_dim", "vocab_size", "n_predict")}
    inner = _size(path, {**config, "inner_dim": config.get("inner_dim") or sizes["emb_dim"]}, "inner_dim")
    flags = {name: _flag(path, config, name) for name in ("tie_weights", "scale_input")}
    if flags["tie_weights"] and sizes["n_predict"] < 2:
        raise CheckpointError(f"{path} (n_predict)", "1 with tie_weights", "at least 2", "Download the file again.")
    return HeadsSizes(
        model_type=MODEL_TYPE,
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["emb_dim"],
        inner_size=inner,
        num_heads=sizes["n_predict"],
        num_drafts=num_drafts or sizes["n_predict"],
        is_tied=flags["tie_weights"],
        scales_input=flags["scale_input"],
    )


def _size(path: Path, config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{path} ({name})", repr(value), "a positive integer", "Download the file again.")
    return value


def _flag(path: Path, config: dict[str, Any], name: str) -> bool:
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise CheckpointError(f"{path} ({name})", repr(value), "true or false", "Download the file again.")
    return value
