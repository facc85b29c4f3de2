# SPDX-License-Identifier: Apache-2.0
"""Graphs of heads that draft more than a chain from the target's hidden state; they have no caches."""

from __future__ import annotations

from speccompile.core.specs import (
    CONFIDENCES,
    DRAFT_PARENTS,
    GUESS_PROBS,
    GUESSES,
    HIDDEN,
    SAMPLED_TOKENS,
    START_NODES,
    TOKENS,
    GraphSpec,
    TensorSpec,
)


def tree_heads_spec(
    name: str, hidden_size: int, vocab_size: int, num_drafts: int, *, gives_parents: bool = False
) -> GraphSpec:
    """The spec of heads that draft a tree in one run. Its drafts are the likeliest tokens: nothing is drawn.

    Args:
        name: the graph's name.
        hidden_size: of the target's `hidden`; `start_nodes` picks a row of each slot.
        vocab_size: of tokens.
        num_drafts: nodes behind the root in `tokens`; parents stand before children.
        gives_parents: the tree's shape is decided in the graph; otherwise it is known beforehand.
    """
    tree = [TensorSpec(SAMPLED_TOKENS, ("batch", num_drafts), "int64")]
    tree += [TensorSpec(CONFIDENCES, ("batch", num_drafts), "float32")]
    if gives_parents:
        tree += [TensorSpec(DRAFT_PARENTS, ("batch", num_drafts), "int64")]
    inputs = (*_start(hidden_size), TensorSpec(TOKENS, ("batch", 1), "int64"))
    return GraphSpec(name, inputs, tuple(tree), (), vocab_size)


def guessing_heads_spec(name: str, hidden_size: int, vocab_size: int, num_heads: int, num_guesses: int) -> GraphSpec:
    """The spec of heads that each guess the token of one depth, whatever stands before it.

    Args:
        name: the graph's name.
        hidden_size: see `tree_heads_spec`.
        vocab_size: of tokens.
        num_heads: depths.
        num_guesses: tokens a head.
    """
    rows = ("batch", num_heads, num_guesses)
    outputs = (TensorSpec(GUESSES, rows, "int64"), TensorSpec(GUESS_PROBS, rows, "float32"))
    return GraphSpec(name, _start(hidden_size), outputs, (), vocab_size)


def _start(hidden_size: int) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec(HIDDEN, ("batch", "nodes", hidden_size), "float32"),
        TensorSpec(START_NODES, ("batch",), "int64"),
    )


def beam_drafts(depth: int, width: int, num_guesses: int) -> int:
    """Drafts of a tree in which `width` nodes of each depth are expanded to `num_guesses` tokens each."""
    total, level = num_guesses, num_guesses
    for _ in range(depth - 1):
        level = min(width, level) * num_guesses
        total += level
    return total
