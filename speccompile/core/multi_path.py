# SPDX-License-Identifier: Apache-2.0
"""Greedy multi-path block verification: a rule for drawn trees whose siblings are independent draws.

Thomas and Pal 2026, arXiv 2602.16961. Block verification is exact for a chain from any known distribution. So it is for
one path of a tree that is chosen by the target's distributions, if the draft's are taken as those of the choice.
Engines verify drawn trees by `core.acceptance`, with siblings drawn without replacement; this rule is a reference.
"""

from __future__ import annotations

import numpy as np

from speccompile.core.acceptance import Dists, keep_block
from speccompile.core.sampling import draw
from speccompile.core.tree import Floats, Ints

RATIO_EDGES = (2**-1.5, 2**-0.5, 2**0.5, 2**1.5)  # of target / draft; not 1, where a draft equals its target


def ratio_classes(target_probs: Floats, draft_probs: Floats) -> Ints:
    """Returns how many of `RATIO_EDGES` target / draft exceeds, by element, int64."""
    exceeded = [target_probs > draft_probs.dtype.type(edge) * draft_probs for edge in RATIO_EDGES]
    classes: Ints = np.sum(exceeded, axis=0, dtype=np.int64)
    return classes


def chosen_probs(target_probs: Floats, draft_probs: Floats, num: int) -> Floats:
    """Returns the distribution of the first draw of the highest class among `num` independent draws.

    With m the mass of a class and a that of the classes above it, it is the highest one that is drawn with probability
    (1 - a)^num - (1 - a - m)^num; within it, the first draw follows the draft's distribution.

    Args:
        target_probs: [vocab] float32.
        draft_probs: [vocab] float32, of each draw.
    """
    if num == 1:
        return draft_probs
    classes = ratio_classes(target_probs, draft_probs)
    mass = np.bincount(classes, draft_probs, minlength=len(RATIO_EDGES) + 1)
    none_from = np.maximum(1 - np.cumsum(mass[::-1])[::-1], 0) ** num  # no draw from this class or one above
    shares = np.append(none_from[1:], 1) - none_from
    factors = np.divide(shares, mass, out=np.zeros_like(mass), where=mass > 0)
    probs: Floats = draft_probs * factors.astype(draft_probs.dtype)[classes]
    return probs


def choose_path(tokens: Ints, parents: Ints, target_probs: Dists, draft_probs: Floats) -> tuple[list[int], Floats]:
    """Chooses one path of a tree.

    Nodes with equal tokens after one prefix are one node with the children of all. Of these, which are independent
    draws, the first one of the highest class of target / draft is chosen. The paper sorts all tokens by that ratio;
    five classes keep as many drafts and need no sort.

    Args:
        tokens: [nodes] int64.
        parents: [nodes] int64.
        target_probs: [nodes, vocab] float32, warped; the rows of chosen nodes alone are read.
        draft_probs: [nodes, vocab] float32, the distribution each node was drawn from.

    Returns:
        The nodes from the root on; [len(path), vocab] float32, the distribution that each was chosen from.
    """
    path, probs, same = [0], [np.zeros_like(draft_probs[0])], {0}
    while children := [n for n in range(1, len(tokens)) if parents[n] < n and int(parents[n]) in same]:
        dist, drawn = target_probs[path[-1]], tokens[children]
        best = children[int(np.argmax(ratio_classes(dist[drawn], draft_probs[children, drawn])))]
        probs.append(chosen_probs(dist, draft_probs[best], len(children)))
        path.append(best)
        same = {n for n in children if tokens[n] == tokens[best]}
    return path, np.stack(probs)


def keep_path(
    tokens: Ints, parents: Ints, target_probs: Dists, uniforms: Floats, draft_probs: Floats
) -> tuple[list[int], Floats]:
    """Decides one tree; arguments as of `acceptance.accept_slot`. All nodes of one depth may share their uniforms.

    Returns:
        The path, and what the next token is drawn from, [vocab] float32, which need not be normalised.
    """
    nodes, probs = choose_path(tokens, parents, target_probs, draft_probs)
    rows, links = np.stack([target_probs[node] for node in nodes]), np.arange(len(nodes)) - 1
    kept, rests = keep_block(tokens[nodes][None], links[None], rows[None], probs[None], uniforms[nodes][None])
    path = [nodes[int(kept[0])]]
    while path[0] > 0:  # a chosen node may be the child of an equal one
        path.insert(0, int(parents[path[0]]))
    return path, rests[0]


def accept_paths(
    tokens: Ints, parents: Ints, target_probs: Dists, uniforms: Floats, draft_probs: Floats
) -> tuple[list[int], int]:
    """Decides one tree, with the arguments of `acceptance.accept_slot`; returns the path and the next token."""
    path, rest = keep_path(tokens, parents, target_probs, uniforms, draft_probs)
    return path, int(draw(rest, uniforms[path[-1], 1]))
