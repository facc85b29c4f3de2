# SPDX-License-Identifier: Apache-2.0
"""Graphs of drafts that give a block of draft tokens in one run, as a lattice: candidates of every slot, and scores.

A run reads the target's features of accepted positions, and then a block: the root and masks. Row t of the draft's
cache belongs to the feature of position t alone; the next run overwrites the block's rows.

Slot i of a block is the draft token at depth i + 1. Entry [i, a, b] of the scores is the logit of candidate b of slot i
after candidate a of slot i - 1, up to a number that is the same for all b; the rows of slot 0, after the root, are
alike. Independent slots have one row each, as those that depend on the whole path: for these a second graph, the step,
makes the path's state and its scores from further terms, token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

from speccompile.core.dims import ModelDims
from speccompile.core.specs import (
    CANDIDATES,
    FEATURE_NODES,
    FEATURES,
    LENGTHS,
    START_NODES,
    TOKENS,
    GraphSpec,
    TensorSpec,
    cache_names,
    updated_cache_name,
)
from speccompile.graph_kinds.features import STATES

PAIR_SCORES = "pair_scores"  # [batch, drafts, candidates or 1, candidates] float32, see above
# Of drafts whose slots depend on the path. A block gives, and a step reads of one depth:
EMBEDDED = (
    "embedded"  # [batch, 1 + (drafts - 1) candidates, hidden] float32: of the root, then of all slots but the last
)
SLOT_TERMS = "slot_terms"  # [batch, drafts, width] float32
CANDIDATE_ROWS = "candidate_rows"  # [batch, drafts, candidates, width] float32; zero in slots without a correction
PATH_STATES = "path_states"  # [batch, nodes, state] float32: after the tokens before each node
NEXT_STATES = "path_states.next"  # [batch, nodes, state] float32: after the node itself
BASE_SCORES = "base_scores"  # [batch, candidates] float32
PATH_SCORES = "path_scores"  # [batch, nodes, candidates] float32


@dataclass(frozen=True)
class PathSizes:
    """Sizes of what a draft keeps of a path."""

    state: int
    width: int  # of the terms whose product with a candidate's row corrects its score


def block_draft_spec(
    name: str,
    dims: ModelDims,
    max_rows: int,
    *,
    num_drafts: int,
    num_candidates: int,
    is_paired: bool,
    num_masks: int,
    path: PathSizes | None = None,
) -> GraphSpec:
    """Returns the spec.

    Args:
        is_paired: scores depend on the candidate of the slot before.
        num_masks: rows of a block after the root's.
        path: sizes, where a slot depends on the whole path before it.
    """
    caches = tuple(
        TensorSpec(cache, ("batch", dims.num_kv_heads, "max_seq", dims.head_dim), "float32")
        for i in range(dims.num_layers)
        for cache in cache_names(i)
    )
    before = num_candidates if is_paired else 1
    terms: tuple[TensorSpec, ...] = ()
    if path is not None:
        terms = (
            TensorSpec(EMBEDDED, ("batch", 1 + (num_drafts - 1) * num_candidates, dims.hidden_size), "float32"),
            TensorSpec(SLOT_TERMS, ("batch", num_drafts, path.width), "float32"),
            TensorSpec(CANDIDATE_ROWS, ("batch", num_drafts, num_candidates, path.width), "float32"),
        )
    return GraphSpec(
        name,
        (
            TensorSpec(TOKENS, ("batch", 1), "int64", "tokens"),  # the roots
            TensorSpec(LENGTHS, ("batch",), "int64", "lengths"),
            TensorSpec(FEATURES, ("batch", STATES, dims.hidden_size), "float32", "states"),
            TensorSpec(FEATURE_NODES, ("batch", "nodes"), "int64", "nodes"),
            TensorSpec(START_NODES, ("batch",), "int64", "last_node"),  # the last node that is no padding
            *caches,
        ),
        (
            TensorSpec(CANDIDATES, ("batch", num_drafts, num_candidates), "int64"),
            TensorSpec(PAIR_SCORES, ("batch", num_drafts, before, num_candidates), "float32"),
            *terms,
            *(TensorSpec(updated_cache_name(c.name), c.dims, c.dtype) for c in caches),
        ),
        tuple(c.name for c in caches),
        dims.vocab_size,
        max_rows,
        rows_written_ahead=1 + num_masks,
        reads_prompts=True,
        scores="one",
        num_candidates=num_candidates,
        num_drafts=num_drafts,
    )


def path_step_spec(name: str, dims: ModelDims, path: PathSizes, num_candidates: int) -> GraphSpec:
    """Returns the spec of the step, which has no caches: its caller keeps the states."""
    nodes = ("batch", "nodes")
    return GraphSpec(
        name,
        (
            TensorSpec(EMBEDDED, (*nodes, dims.hidden_size), "float32", "states"),
            TensorSpec(PATH_STATES, (*nodes, path.state), "float32", "states"),
            TensorSpec(SLOT_TERMS, ("batch", path.width), "float32", "states"),
            TensorSpec(CANDIDATE_ROWS, ("batch", num_candidates, path.width), "float32", "states"),
            TensorSpec(BASE_SCORES, ("batch", num_candidates), "float32", "states"),
        ),
        (
            TensorSpec(NEXT_STATES, (*nodes, path.state), "float32"),
            TensorSpec(PATH_SCORES, (*nodes, num_candidates), "float32"),
        ),
        (),
        dims.vocab_size,
        num_candidates=num_candidates,
    )
