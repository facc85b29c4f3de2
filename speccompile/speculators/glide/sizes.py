# SPDX-License-Identifier: Apache-2.0
"""Sizes of a GLIDE drafter in a graph: from its config.json and the target's sizes. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from speccompile.checkpoints.checkpoint import read_config
from speccompile.core.borrowed_specs import reading_spec
from speccompile.core.jobs import WeightCounts
from speccompile.core.specs import GraphSpec, ModelDims, cache_names, decoder_spec
from speccompile.errors import CheckpointError
from speccompile.speculators.glide.formats import PUBLISHED_THETA


@dataclass(frozen=True)
class GlideDims(ModelDims):
    """Sizes of a drafter; the fields before are those of its self-attention, and `max_positions` is the target's.

    Args:
        intermediate_size: of its MLPs.
        target_heads: query heads of its cross-attention.
        target_kv_heads: key heads of the target's caches.
        target_head_dim: of these.
        target_layer: layer of the target whose caches are read.
        is_tied: the LM head is the embedding.
        rms_norm_eps: of the norms.
        rope_theta: base of its own positions.
        target_rope_theta: base of the positions in the target's caches.
    """

    intermediate_size: int = 0
    target_heads: int = 0
    target_kv_heads: int = 0
    target_head_dim: int = 0
    target_layer: int = 0
    is_tied: bool = True
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    target_rope_theta: float = PUBLISHED_THETA

    def decoder_spec(self, name: str, target: ModelDims) -> GraphSpec:
        """Inputs and outputs without a tail."""
        return reading_spec(decoder_spec(name, self), target, cache_names(self.target_layer))

    def counts(self) -> WeightCounts:
        """Weights of the graph."""
        hidden, cross = self.hidden_size, self.target_heads * self.target_head_dim
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = hidden * (attention + 2 * cross + 3 * self.intermediate_size)
        table = self.vocab_size * hidden
        plain = (2 * self.num_layers + 1) * hidden + table
        linear = self.num_layers * layer + table
        num_params = linear + plain - (table if self.is_tied else 0)
        return WeightCounts(num_params, linear, plain, num_head=table, is_tied=self.is_tied)


def read_sizes(folder: Path, target: ModelDims) -> GlideDims:
    """The sizes in a folder's config.json.

    Args:
        folder: of the drafter.
        target: sizes of the target.

    Raises:
        CheckpointError: a size is missing or wrong, or the config asks for what a drafter cannot have.
    """
    path, config = folder / "config.json", read_config(folder)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    hidden, inner, layers, heads, vocab = (_size(path, config, name) for name in names)
    for name, plain in (("attention_bias", False), ("mlp_bias", False), ("rope_scaling", None)):
        if config.get(name, plain) not in (plain, None):
            todo = "Train it without, or report its config."
            raise CheckpointError(f"{path} ({name})", repr(config[name]), f"{plain!r}: GLIDE drafters have none", todo)
    rope = config.get("rope_parameters") or config
    return GlideDims(
        model_type="glide",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        max_positions=target.max_positions,
        intermediate_size=inner,
        target_heads=target.num_heads,
        target_kv_heads=target.num_kv_heads,
        target_head_dim=target.head_dim,
        target_layer=target.num_layers - 1,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        target_rope_theta=float(config.get("large_rope_theta") or PUBLISHED_THETA),
    )


def with_params(dims: GlideDims) -> GlideDims:
    """With the number of parameters."""
    return replace(dims, num_params=dims.counts().num_params)


def stated_target(path: Path) -> tuple[int | None, int | None]:
    """(hidden size, query heads) of the target that a config.json names; None where it does not."""
    config = read_config(path)
    return config.get("large_hidden_size"), config.get("large_num_attention_heads")


def _size(path: Path, config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{path} ({name})", repr(value), "a positive integer", "Download the file again.")
    return value
