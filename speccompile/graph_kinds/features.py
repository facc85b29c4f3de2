# SPDX-License-Identifier: Apache-2.0
"""Graphs of drafts that read features: one vector per position, first the target's, then the draft's own.

Row t of such a draft's cache belongs to the feature of position t and the token at t + 1, so a draft that has read n
rows drafts the token at n + 1. Its output `hidden.next` is its next input: `feature_nodes` picks the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from speccompile.core.dims import ModelDims
from speccompile.core.specs import FEATURE_NODES, FEATURES, NEXT_FEATURES, GraphSpec, TensorSpec, hidden_name
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec

STATES, NEXT_STATES = "states", "next_states"  # dims: rows of features in; 1 + nodes out
FIRST_POSITIONS = "first_positions"  # [batch] int64: position of cache row 0, where rows before a window are dropped
NO_FEATURE = -1  # in `feature_nodes`: a mask, for which a draft that reads some has a feature of its own


@dataclass(frozen=True)
class FeatureDims(ModelDims):
    """Sizes of a draft that reads features; `vocab_size` is the target's.

    Args:
        layers: decoder layers of the target whose states are fused; empty: the feature is what the LM head reads.
    """

    target_hidden_size: int = 0
    intermediate_size: int = 0
    draft_vocab_size: int = 0
    layers: tuple[int, ...] = ()
    head_rank: int = 0  # inner width of an LM head that is two products; 0: one product


def feature_draft_spec(
    name: str, dims: FeatureDims, num_candidates: int, dists: bool, max_rows: int, windows: Sequence[int] = ()
) -> GraphSpec:
    """Returns the spec of a draft with a cache of its own, tail included.

    Args:
        dists: see `candidate_spec`; they are distributions over the target's vocabulary.
        windows: of each layer's attention, 0: none; empty: none has one.
    """
    plain = decoder_spec(name, dims, logits=False)
    num = len(plain.caches)
    slides = bool(windows) and all(0 < window < max_rows for window in windows)
    first = (TensorSpec(FIRST_POSITIONS, ("batch",), "int64"),) if slides else ()
    features = (
        TensorSpec(FEATURES, ("batch", STATES, dims.hidden_size), "float32", "states"),
        TensorSpec(FEATURE_NODES, ("batch", "nodes"), "int64", "nodes"),
    )
    following = TensorSpec(NEXT_FEATURES, ("batch", NEXT_STATES, dims.hidden_size), "float32")
    extended = replace(
        plain,
        inputs=(*plain.inputs[:-num], *features, *first, *plain.inputs[-num:]),
        outputs=(following, *plain.outputs),
        max_rows=max_rows,
        window=max(windows) if slides else 0,
    )
    # The tail is none: the module projects to the vocabulary itself.
    return replace(candidate_spec(extended, num_candidates, dists), tail="none")


def fusion_spec(name: str, dims: FeatureDims) -> GraphSpec:
    """Returns the spec of the graph that makes features of the target's states, without caches and tokens."""
    rows = ("batch", "nodes", dims.target_hidden_size)
    states = [TensorSpec(hidden_name(i), rows, "float32", "states") for i in dims.layers]
    features = TensorSpec(FEATURES, ("batch", "nodes", dims.hidden_size), "float32")
    return GraphSpec(name, tuple(states), (features,), reads_prompts=True)
