# SPDX-License-Identifier: Apache-2.0
"""Neutral values of graph inputs, and shapes from dims by name: what every engine needs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from speccompile.core import specs
from speccompile.core.feature_specs import NEXT_STATES, STATES
from speccompile.core.specs import GraphSpec, TensorSpec


def shape_from_dims(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a tensor whose dynamic dims have `sizes`."""
    return tuple(sizes[d] if isinstance(d, str) else d for d in spec.dims)


def neutral_value(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """The value of an input that is left out: a chain, every node scored, deterministic drafts, greedy."""
    if name == specs.TREE_MASK:
        return np.ascontiguousarray(np.broadcast_to(np.tril(np.ones(shape[1:], bool)), shape))
    if name == specs.PARENTS:
        return np.ascontiguousarray(np.broadcast_to(np.arange(-1, shape[1] - 1), shape))
    if name == specs.SCORED_NODES:
        return np.ascontiguousarray(np.broadcast_to(np.arange(shape[1]), shape))
    if name == specs.TOP_P:
        return np.ones(shape, dtype)
    return np.zeros(shape, dtype)


_SAMPLES = frozenset({specs.SAMPLED_TOKEN, specs.SAMPLED_TOKENS})
_LAWS = frozenset({specs.SAMPLED_PROBS, specs.SAMPLED_LAWS, specs.NODE_LAWS})


def is_sampler(spec: GraphSpec) -> bool:
    """Whether it samples its drafts itself, so that a step scores one node of each slot."""
    return any(t.name in _SAMPLES for t in spec.outputs)


def sizes_from_feeds(spec: GraphSpec, feeds: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Sizes of the dynamic dims of a step, read off its feeds (see `Engine.run`)."""
    if specs.HIDDEN in feeds:  # heads read one token or none, and all nodes of the target's step
        batch, nodes = feeds[specs.HIDDEN].shape[:2]
    else:  # a fusion of states reads no tokens either
        lead = feeds[specs.TOKENS] if specs.TOKENS in feeds else next(iter(feeds.values()))
        batch, nodes = lead.shape[:2]
    gives_laws = any(t.name in _LAWS for t in spec.outputs)
    scored = feeds[specs.SCORED_NODES].shape[1] if specs.SCORED_NODES in feeds else (1 if is_sampler(spec) else nodes)
    draft_vocab = 1
    if specs.DRAFT_PROBS in feeds:
        draft_vocab = feeds[specs.DRAFT_PROBS].shape[2]
    elif gives_laws and specs.TEMPERATURE in feeds and feeds[specs.TEMPERATURE].any():
        draft_vocab = spec.law_width
    sizes = {"batch": batch, "nodes": nodes, "scored": scored, "draft_vocab": draft_vocab}
    if specs.FEATURES in feeds:
        sizes |= {STATES: feeds[specs.FEATURES].shape[1], NEXT_STATES: nodes + 1}
    return sizes
