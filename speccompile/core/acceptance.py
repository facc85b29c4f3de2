# SPDX-License-Identifier: Apache-2.0
"""The acceptance rules: which drafts of a scored tree are kept, and which token follows.

Deterministic drafts are kept where they match the target's own draw, a race (`core.race`). Drawn chains are verified as
a block (Sun et al. 2024, arXiv 2403.10444), drawn trees node by node (Chen et al. 2024, "Sequoia": siblings without
replacement). Greedy decoding is the case of one-hot distributions. The emitted tokens follow the target's distribution.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from speccompile.core.sampling import draw, race
from speccompile.core.tree import Bools, Floats, Ints, TokenTree


class Dists(Protocol):
    """The warped distribution after each node, [vocab] float32: an array of rows, or rows computed on demand."""

    def __getitem__(self, node: int, /) -> Any: ...


class Verdict:
    """What acceptance decided.

    `accepted` and `following` are `num_accepted` and `next_token` as lists: a run of a graph evicts numpy's code from
    the CPU's caches, after which a comparison or a reduction of an array takes some 40 us.

    Args:
        path: [batch, nodes] int64, accepted nodes from the root (node 0) on, -1 after the end.
        num_accepted: [batch] int64, accepted draft tokens; the root is not counted.
        next_token: [batch] int64, recovered token after a refusal, bonus token after a whole path; -1 where a row of
            the slot's logits was not finite, and its verdict is void.
    """

    __slots__ = ("accepted", "following", "next_token", "num_accepted", "path")

    def __init__(self, path: Ints, num_accepted: Ints, next_token: Ints) -> None:
        self.path, self.num_accepted, self.next_token = path, num_accepted, next_token
        self.accepted: list[int] = num_accepted.tolist()
        self.following: list[int] = next_token.tolist()

    def spoilt(self) -> list[int]:
        return [slot for slot, token in enumerate(self.following) if token < 0]

    def nodes_kept(self, slot: int) -> list[int]:
        return [int(n) for n in self.path[slot, : int(self.num_accepted[slot]) + 1]]


def residual(target_probs: Floats, draft_probs: Floats) -> Floats:
    """Returns normalise(max(target - draft, 0)) [vocab], the probs after a refusal; the target's if nothing is left."""
    left = np.maximum(target_probs - draft_probs, 0)
    mass = left.sum(dtype=np.float64)
    return (left / mass).astype(target_probs.dtype) if mass > 0 else target_probs


def is_branched(parents: Ints, uniforms: Floats) -> Bools:
    """Returns [batch] bool: drafts are a tree. Its shape must say so: a drawn tree may happen to be a chain.

    Args:
        parents: [batch, nodes] int64.
        uniforms: [batch, nodes, 2] float32; the first number of the root is `sampling.NODE_BY_NODE` for a tree.
    """
    branched: Bools = np.any(((parents >= 0) & (parents < np.arange(parents.shape[1]) - 1))[:, 1:], axis=1)
    return branched | np.less(uniforms[:, 0, 0], 0)


def has_drafts(parents: Ints) -> Bools:
    """Returns [batch] bool: whether any node has a parent; parents: [batch, nodes] int64."""
    linked: Bools = np.any(((parents >= 0) & (parents < np.arange(parents.shape[1])))[:, 1:], axis=1)
    return linked


def keep_block(
    tokens: Ints, parents: Ints, target_probs: Floats, draft_probs: Floats, uniforms: Floats
) -> tuple[Ints, Floats]:
    """Verifies drawn chains as a block: a draft may be kept because of those after it (Sun et al. 2024, algorithm 2).

    The weight of a prefix is w_i = min(1, w_(i-1) target(x_i) / draft(x_i)). With s_i the mass of max(w_i target -
    draft, 0) after it, the prefix passes with probability s_i / (s_i + 1 - w_i), the whole chain with its weight; the
    longest prefix that passes is kept. No rule that is exact for what follows as well keeps more of one drawn chain.

    Args:
        tokens: [batch, nodes] int64.
        parents: [batch, nodes] int64; a chain ends before the first node that does not follow the one before it.
        target_probs: [batch, nodes, vocab] float32, warped.
        draft_probs: [batch, nodes, vocab] float32, the distribution each node was drawn from.
        uniforms: [batch, nodes, 2] float32 in [0, 1): accept draw of the node, draw made at the node.

    Returns:
        [batch] int64, how many drafts are kept; [batch, vocab] float32, unnormalised probs of the next token.
    """
    batch, nodes = tokens.shape
    each, index = np.arange(batch), np.arange(nodes)
    is_linked = np.cumprod(parents[:, 1:] == index[:-1], axis=1).astype(np.bool_)
    ends, drafts = is_linked.sum(axis=1), np.where(is_linked, tokens[:, 1:], 0)
    weights = np.ones((batch, nodes))
    for node in range(1, nodes):
        mass = weights[:, node - 1] * target_probs[each, node - 1, drafts[:, node - 1]]
        drafted = draft_probs[each, node, drafts[:, node - 1]].astype(np.float64)
        weights[:, node] = np.divide(mass, drafted, out=(mass > 0).astype(np.float64), where=mass < drafted)
    scaled = weights[:, :, None].astype(target_probs.dtype) * target_probs
    sums = np.maximum(scaled[:, :-1] - draft_probs[:, 1:], 0).sum(axis=-1, dtype=np.float64)
    sums = np.concatenate((sums, np.zeros((batch, 1))), axis=1)
    passes = np.divide(sums, sums + 1 - weights, out=np.ones_like(sums), where=weights < 1)
    passes = np.where(index == ends[:, None], weights, passes)
    is_passed = (uniforms[:, :, 0] < passes) & (index <= ends[:, None])
    kept: Ints = np.where(is_passed, index, 0).max(axis=1)
    rests = scaled[each, kept]
    for slot in np.flatnonzero(kept < ends):  # row by row, so that the sums are those of one slot to the last bit
        rests[slot] = residual(rests[slot], draft_probs[slot, kept[slot] + 1])
    return kept, np.where((kept < ends)[:, None], rests, target_probs[each, kept])


def accept_slot(
    tokens: Ints, parents: Ints, target_probs: Dists, uniforms: Floats, draft_probs: Floats | None
) -> tuple[list[int], int]:
    """Decides one tree; returns the path and the next token.

    Args:
        tokens: [nodes] int64.
        parents: [nodes] int64.
        target_probs: [nodes, vocab] float32, warped; a row is read when the walk reaches its node, and all those of a
            drawn chain.
        uniforms: [nodes, 2] float32 in [0, 1): accept draw of the node, draw made at the node; those of the race at the
            node where drafts are deterministic, or there are none.
        draft_probs: [nodes, vocab] float32, the distribution each node was drawn from; None or [nodes, 1] when the
            drafts are deterministic. Then the token is drawn first and the child that has it is kept, so the text does
            not depend on the drafts.
    """
    is_deterministic = draft_probs is None or draft_probs.shape[-1] == 1 or not has_drafts(parents[None])[0]
    if draft_probs is not None and not is_deterministic and not is_branched(parents[None], uniforms[None])[0]:
        rows = np.stack([target_probs[node] for node in range(len(tokens))])
        kept, rest = keep_block(tokens[None], parents[None], rows[None], draft_probs[None], uniforms[None])
        last = int(kept[0])
        return list(range(last + 1)), int(draw(rest[0], uniforms[last, 1]))
    path, dist = [0], target_probs[0]
    drawn = int(race(dist, uniforms[0])) if is_deterministic else -1
    for node in range(1, len(tokens)):  # children come after their parents, so one pass is a walk
        if parents[node] != path[-1]:
            continue
        token = int(tokens[node])
        if draft_probs is None or is_deterministic:
            is_kept = token == drawn
        else:
            is_kept = bool(uniforms[node, 0] * draft_probs[node, token] < dist[token])
            dist = target_probs[node] if is_kept else residual(dist, draft_probs[node])
        if is_kept:
            path.append(node)
            drawn = int(race(target_probs[node], uniforms[node])) if is_deterministic else -1
    if is_deterministic:
        return path, drawn
    return path, int(draw(dist, uniforms[path[-1], 1]))


def accept(tree: TokenTree, target_probs: Floats, uniforms: Floats, draft_probs: Floats | None = None) -> Verdict:
    """Decides a batch of scored trees.

    Args:
        target_probs: [batch, nodes, vocab] float32, the warped distribution after each node (`sampling.warp`).
        uniforms: [batch, nodes, 2] float32 (`sampling.tree_uniforms`).
        draft_probs: [batch, nodes, vocab] float32; None takes those of the tree.
    """
    dists = tree.draft_probs if draft_probs is None else draft_probs
    is_deterministic = dists is None or dists.shape[-1] == 1
    path = np.full(tree.tokens.shape, -1, dtype=np.int64)
    path[:, 0] = 0
    last, num_accepted = np.zeros(tree.batch, dtype=np.int64), np.zeros(tree.batch, dtype=np.int64)
    walks = np.ones(tree.batch, dtype=np.bool_) if is_deterministic else is_branched(tree.parents, uniforms)
    drawn = race(target_probs[:, 0], uniforms[:, 0]) if is_deterministic else last
    left = target_probs[:, 0] if is_deterministic else target_probs[:, 0].copy()
    for node in range(1, tree.nodes if walks.any() else 0):  # the walk of `accept_slot`, all slots at once
        slots = np.flatnonzero((tree.parents[:, node] == last) & walks)
        tokens = tree.tokens[slots, node]
        if dists is None or is_deterministic:
            is_kept = tokens == drawn[slots]
        else:
            is_kept = uniforms[slots, node, 0] * dists[slots, node, tokens] < left[slots, tokens]
            for slot in slots[~is_kept]:  # row by row, so that the sums are those of `accept_slot` to the last bit
                left[slot] = residual(left[slot], dists[slot, node])
        kept = slots[is_kept]
        num_accepted[kept] += 1
        path[kept, num_accepted[kept]] = last[kept] = node
        if is_deterministic:
            drawn[kept] = race(target_probs[kept, node], uniforms[kept, node])
        else:
            left[kept] = target_probs[kept, node]
    if dists is not None and not is_deterministic:
        blocks, index = np.flatnonzero(~walks), np.arange(tree.nodes)
        if len(blocks):
            tokens, parents = tree.tokens[blocks], tree.parents[blocks]
            kept, left[blocks] = keep_block(tokens, parents, target_probs[blocks], dists[blocks], uniforms[blocks])
            path[blocks] = np.where(index <= kept[:, None], index, -1)
            num_accepted[blocks] = last[blocks] = kept
        drawn = draw(left, uniforms[np.arange(tree.batch), last, 1])
        plain = np.flatnonzero(~has_drafts(tree.parents))  # the text of a slot is the same beside others that draft
        if len(plain):
            drawn[plain] = race(target_probs[plain, 0], uniforms[plain, 0])
    return Verdict(path, num_accepted, drawn)
