# SPDX-License-Identifier: Apache-2.0
"""The acceptance rules: which drafts of a scored tree are kept, and which token follows.

Deterministic drafts are kept where they match the target's own draw, a race (`core.race`). Of drawn drafts one path is
chosen (`core.multi_path`) and verified as a block (Sun et al. 2024, arXiv 2403.10444). Greedy decoding is the case of
one-hot distributions. The emitted tokens follow the target's distribution.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from speccompile.core.multi_path import RowsAt, choose_paths
from speccompile.core.sampling import draw, race
from speccompile.core.tree import Floats, Ints, TokenTree, Verdict


class Dists(Protocol):
    """The warped distribution after each node, [vocab] float32: an array of rows, or rows computed on demand."""

    def __getitem__(self, node: int, /) -> Any: ...


def residual(target_probs: Floats, draft_probs: Floats) -> Floats:
    """Returns normalise(max(target - draft, 0)) [vocab], the probs after a refusal; the target's if nothing is left."""
    left = np.maximum(target_probs - draft_probs, 0)
    mass = left.sum(dtype=np.float64)
    return (left / mass).astype(target_probs.dtype) if mass > 0 else target_probs


def keep_block(
    tokens: Ints, ends: Ints, target_probs: Floats, draft_probs: Floats, draws: Floats
) -> tuple[Ints, Floats]:
    """Verifies paths as blocks: a draft may be kept because of those after it (Sun et al. 2024, algorithm 2).

    The weight of a prefix is w_i = min(1, w_(i-1) target(x_i) / draft(x_i)). With s_i the mass of max(w_i target -
    draft, 0) after it, the prefix passes with probability s_i / (s_i + 1 - w_i), the whole path with its weight; the
    longest prefix that passes is kept. No rule that is exact for what follows as well keeps more of one drawn chain.

    Args:
        tokens: [batch, nodes] int64 of the paths, from the root on.
        ends: [batch] int64, the last node of each path.
        target_probs: [batch, nodes, vocab] float32, warped.
        draft_probs: [batch, nodes, vocab] float32, the distribution that each node was chosen from.
        draws: [batch, nodes] float32 in [0, 1), the accept draws.

    Returns:
        [batch] int64, how many drafts are kept; [batch, vocab] float32, unnormalised probs of the next token.
    """
    batch, nodes = tokens.shape
    each, index = np.arange(batch), np.arange(nodes)
    weights = np.ones((batch, nodes))
    for node in range(1, nodes):
        mass = weights[:, node - 1] * target_probs[each, node - 1, tokens[:, node]]
        drafted = draft_probs[each, node, tokens[:, node]].astype(np.float64)
        weights[:, node] = np.divide(mass, drafted, out=(mass > 0).astype(np.float64), where=mass < drafted)
    scaled = weights[:, :, None].astype(target_probs.dtype) * target_probs
    sums = np.maximum(scaled[:, :-1] - draft_probs[:, 1:], 0).sum(axis=-1, dtype=np.float64)
    sums = np.concatenate((sums, np.zeros((batch, 1))), axis=1)
    passes = np.divide(sums, sums + 1 - weights, out=np.ones_like(sums), where=weights < 1)
    passes = np.where(index == ends[:, None], weights, passes)
    is_passed = (draws < passes) & (index <= ends[:, None])
    kept: Ints = np.where(is_passed, index, 0).max(axis=1)
    rests = target_probs[each, kept]
    for slot in np.flatnonzero(kept < ends):  # row by row, so that the sums are those of one slot to the last bit
        rests[slot] = residual(scaled[slot, kept[slot]], draft_probs[slot, kept[slot] + 1])
    return kept, rests


def decide(
    tokens: Ints, parents: Ints, rows_at: RowsAt, uniforms: Floats, draft_probs: Floats | None
) -> tuple[Ints, Ints, Ints, Floats | None]:
    """Decides a batch of trees; the arguments are those of `accept`, and `rows_at` gives the target's rows.

    Returns:
        Path, num_accepted and next_token of a `Verdict`; what the drawn slots' next tokens were drawn from.
    """
    index = np.arange(tokens.shape[1])
    links = np.where((parents < index) & (index > 0), parents, -1)
    has_probs = draft_probs is not None and draft_probs.shape[-1] > 1
    is_drawn = (links >= 0).any(axis=1) & has_probs
    path, rest = np.full(tokens.shape, -1, dtype=np.int64), None
    num_accepted, following, last = np.zeros((3, len(tokens)), dtype=np.int64)
    path[:, 0], slots = 0, np.flatnonzero(~is_drawn)
    while len(slots):
        following[slots] = race(rows_at(slots, last[slots]), uniforms[slots, last[slots]])
        is_next = (links[slots] == last[slots, None]) & (tokens[slots] == following[slots, None])
        is_kept = is_next.any(axis=1)
        slots = slots[is_kept]
        num_accepted[slots] += 1
        path[slots, num_accepted[slots]] = last[slots] = is_next[is_kept].argmax(axis=1)
    if draft_probs is not None and is_drawn.any():
        slots = np.flatnonzero(is_drawn)
        chosen, rows, probs = choose_paths(tokens, links, rows_at, draft_probs, slots)
        ends, each = (chosen >= 0).sum(axis=1) - 1, slots[:, None]
        on_path = np.where(chosen > 0, tokens[each, chosen], 0)
        kept, rest = keep_block(on_path, ends, rows, probs, uniforms[each, chosen, 0])
        path[slots], num_accepted[slots] = np.where(index <= kept[:, None], chosen, -1), kept
        following[slots] = draw(rest, uniforms[slots, chosen[np.arange(len(slots)), kept], 1])
    return path, num_accepted, following, rest


def accept_slot(
    tokens: Ints, parents: Ints, target_probs: Dists, uniforms: Floats, draft_probs: Floats | None
) -> tuple[list[int], int]:
    """Decides one tree; returns the path and the next token. Arguments are those of `accept`, without a batch.

    `target_probs` is read where the walk reaches a node.
    """
    dists = None if draft_probs is None else draft_probs[None]
    path, num, following, _ = decide(
        tokens[None], parents[None], lambda _, nodes: target_probs[int(nodes[0])][None], uniforms[None], dists
    )
    return path[0, : int(num[0]) + 1].tolist(), int(following[0])


def accept(tree: TokenTree, target_probs: Floats, uniforms: Floats, draft_probs: Floats | None = None) -> Verdict:
    """Decides a batch of scored trees.

    Args:
        target_probs: [batch, nodes, vocab] float32, the warped distribution after each node (`sampling.warp`).
        uniforms: [batch, nodes, 2] float32 in [0, 1) (`sampling.tree_uniforms`): accept draw of the node, draw made at
            the node; those of the race at the node where drafts are deterministic, or there are none.
        draft_probs: [batch, nodes, vocab] float32, the distribution each node was drawn from, its siblings too; None
            takes those of the tree. Without any, or of one number, drafts are deterministic: the token is drawn first
            and the child that has it is kept, so the text does not depend on the drafts.
    """
    dists = tree.draft_probs if draft_probs is None else draft_probs
    path, num_accepted, following, _ = decide(
        tree.tokens, tree.parents, lambda slots, nodes: target_probs[slots, nodes], uniforms, dists
    )
    return Verdict(path, num_accepted, following)
