# SPDX-License-Identifier: Apache-2.0
"""Graphs of heads that draft from the target's hidden state in one run: chains and trees; they have no caches."""

from __future__ import annotations

from dataclasses import dataclass

from speccompile.core.specs import (
    CANDIDATE_PROBS,
    CANDIDATES,
    CHAIN_PROBS,
    CONFIDENCES,
    DRAFT_PARENTS,
    HIDDEN,
    SAMPLED_TOKENS,
    START_NODES,
    TOKENS,
    UNIFORMS,
    GraphSpec,
    TensorSpec,
)
from speccompile.core.tree_shape import TreeShape
from speccompile.graph_kinds.decoder import WARP

ROOT = TensorSpec(TOKENS, ("batch", 1), "int64", "tokens")  # of heads: the token that their drafts follow


def heads_spec(name: str, hidden_size: int, vocab_size: int, num_drafts: int) -> GraphSpec:
    """Returns the spec of heads on the target's `hidden` (`start_nodes`) that draft a chain in one run; no caches."""
    inputs = (*start_inputs(hidden_size), ROOT, TensorSpec(UNIFORMS, ("batch", num_drafts), "float32"), *WARP)
    drafts = chain_outputs(num_drafts)
    return GraphSpec(name, inputs, drafts, (), vocab_size, scores="one", num_drafts=num_drafts, gives_probs=True)


def start_inputs(hidden_size: int) -> tuple[TensorSpec, TensorSpec]:
    """Returns what heads read of the target: the states of its step, and the node of each slot to start from."""
    return (
        TensorSpec(HIDDEN, ("batch", "nodes", hidden_size), "float32", "states"),
        TensorSpec(START_NODES, ("batch",), "int64", "last_node"),
    )


def chain_outputs(num_drafts: int) -> tuple[TensorSpec, ...]:
    """Returns the outputs of a graph that drafts a whole chain; `draft_vocab` may be 1 when every slot is greedy."""
    return (
        TensorSpec(SAMPLED_TOKENS, ("batch", num_drafts), "int64"),
        TensorSpec(CONFIDENCES, ("batch", num_drafts), "float32"),
        TensorSpec(CHAIN_PROBS, ("batch", num_drafts + 1, "draft_vocab"), "float32"),
    )


def tree_heads_spec(
    name: str, hidden_size: int, vocab_size: int, num_drafts: int, *, gives_parents: bool = False
) -> GraphSpec:
    """Returns the spec of heads that draft a tree in one run. Its drafts are the likeliest tokens: nothing is drawn.

    Args:
        num_drafts: nodes after the root in `tokens`; parents come before children.
        gives_parents: the tree's shape is decided in the graph; otherwise it is fixed at build.
    """
    tree = [TensorSpec(SAMPLED_TOKENS, ("batch", num_drafts), "int64")]
    tree += [TensorSpec(CONFIDENCES, ("batch", num_drafts), "float32")]
    if gives_parents:
        tree += [TensorSpec(DRAFT_PARENTS, ("batch", num_drafts), "int64")]
    inputs = (*start_inputs(hidden_size), ROOT)
    return GraphSpec(name, inputs, tuple(tree), (), vocab_size, scores="one", num_drafts=num_drafts)


def candidate_heads_spec(
    name: str, hidden_size: int, vocab_size: int, num_heads: int, num_candidates: int
) -> GraphSpec:
    """Returns the spec of heads that give candidates for one depth each, independent of the drafts before."""
    rows = ("batch", num_heads, num_candidates)
    outputs = (TensorSpec(CANDIDATES, rows, "int64"), TensorSpec(CANDIDATE_PROBS, rows, "float32"))
    inputs = start_inputs(hidden_size)
    return GraphSpec(name, inputs, outputs, (), vocab_size, scores="one", num_candidates=num_candidates)


@dataclass(frozen=True)
class FormOptions:
    """What a job asks of heads that draft in one run."""

    depth: int | None = None  # draft tokens on the longest path; None: as many as the heads are made for
    max_depth: int = 0  # most of these; 0: without limit
    choices: tuple[tuple[int, ...], ...] = ()
    width: int = 0
    num_candidates: int = 0  # of a grown tree: most probable tokens after each node; 0 otherwise


@dataclass(frozen=True)
class DraftForm:
    """What heads that read the drafts before them draft in one run: a chain, a fixed shape, or a grown tree."""

    depth: int
    choices: tuple[tuple[int, ...], ...] = ()  # of a fixed shape, see `TreeShape`; empty otherwise
    width: int = 0  # of a grown tree: most nodes of one depth that are expanded; 0 otherwise
    num_candidates: int = 0

    @classmethod
    def from_options(cls, options: FormOptions, most: int) -> DraftForm:
        """Returns the form that a job's options ask for."""
        depth = options.depth or most
        if options.max_depth:
            depth = min(depth, options.max_depth)
        return cls(depth, options.choices, options.width, options.num_candidates)

    @property
    def num_drafts(self) -> int:
        if self.choices:
            return len(self.choices)
        return grown_drafts(self.depth, self.width, self.num_candidates) if self.width else self.depth

    def spec(self, name: str, hidden_size: int, vocab_size: int) -> GraphSpec:
        if not self.choices and not self.width:
            return heads_spec(name, hidden_size, vocab_size, self.depth)
        return tree_heads_spec(name, hidden_size, vocab_size, self.num_drafts, gives_parents=bool(self.width))

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.choices)


def grown_drafts(depth: int, width: int, num_candidates: int) -> int:
    """Returns the size of a tree in which `width` nodes of each depth are expanded to `num_candidates` tokens each."""
    total, level = num_candidates, num_candidates
    for _ in range(depth - 1):
        level = min(width, level) * num_candidates
        total += level
    return total


def grown_depth(num_drafts: int, width: int, num_candidates: int) -> int:
    depth = 1
    while grown_drafts(depth, width, num_candidates) < num_drafts:
        depth += 1
    return depth
