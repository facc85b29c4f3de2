# SPDX-License-Identifier: Apache-2.0
"""Neutral values of graph inputs, shapes from dims by name, and cache rows of a step, for every engine."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from speccompile.core import specs
from speccompile.core.specs import GraphSpec, TensorSpec
from speccompile.graph_kinds.features import NEXT_STATES, STATES


def shape_from_dims(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[d] if isinstance(d, str) else d for d in spec.dims)


def neutral_value(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Returns the value of a missing input: a chain, every node scored, deterministic drafts, greedy."""
    if name == specs.TREE_MASK:
        is_below = np.arange(shape[1])[:, None] >= np.arange(shape[2])  # `np.tril` takes a tenth of a short step
        return np.ascontiguousarray(np.broadcast_to(is_below, shape))
    if name == specs.PARENTS:
        return np.ascontiguousarray(np.broadcast_to(np.arange(-1, shape[1] - 1), shape))
    if name == specs.SCORED_NODES:
        return np.ascontiguousarray(np.broadcast_to(np.arange(shape[1]), shape))
    if name == specs.TOP_P:
        return np.ones(shape, dtype)
    return np.zeros(shape, dtype)


def sizes_from_feeds(spec: GraphSpec, feeds: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Returns the sizes of the dynamic dims of a step, from its feeds (see `Engine.run`)."""
    fed: dict[str, int] = {}
    for name, value in feeds.items():
        for axis, dim in spec.dynamic_dims.get(name, ()):
            fed[dim] = value.shape[axis]
    nodes = fed.get("nodes", 1)
    draws = spec.gives_probs and specs.TEMPERATURE in feeds and feeds[specs.TEMPERATURE].any()
    sizes = {
        "batch": fed.get("batch", 1),
        "nodes": nodes,
        "scored": fed.get("scored", 1 if spec.scores == "one" else nodes),
        "draft_vocab": fed.get("draft_vocab", spec.dist_width if draws else 1),
    }
    return {**sizes, STATES: fed[STATES], NEXT_STATES: nodes + 1} if STATES in fed else sizes


def bucket_rows(rows: int, max_rows: int) -> int:
    """Returns the rows of the view for `rows`: multiples of 128, from 1024 on of an eighth of the next power of two."""
    step = 128 if rows <= 1024 else max(128, 1 << (rows - 1).bit_length() - 3)
    return min(-(-rows // step) * step, max_rows)
