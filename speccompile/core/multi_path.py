# SPDX-License-Identifier: Apache-2.0
"""Which path of a drawn tree is verified: greedy multi-path block verification (Thomas and Pal 2026, arXiv 2602.16961).

Siblings are independent draws from one distribution. A path that is chosen by the target's distributions is verified as
a chain, if the draft's distributions are taken as those of the choice. A chain is the tree with one path.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from speccompile.core.tree import Floats, Ints

RATIO_EDGES = (2**-1.5, 2**-0.5, 2**0.5, 2**1.5)  # of target / draft; not 1, where a draft equals its target
RowsAt = Callable[[Ints, Ints], Floats]  # [some] slots and a node of each -> the target's warped rows, [some, vocab]


def ratio_classes(target_probs: Floats, draft_probs: Floats) -> Ints:
    """Returns how many of `RATIO_EDGES` target / draft exceeds, by element, int64."""
    exceeded = [target_probs > draft_probs.dtype.type(edge) * draft_probs for edge in RATIO_EDGES]
    classes: Ints = np.sum(exceeded, axis=0, dtype=np.int64)
    return classes


def chosen_probs(target_probs: Floats, draft_probs: Floats, num: Ints) -> Floats:
    """Returns the distributions of the first draw of the highest class among `num` independent draws.

    With a the mass of the classes below a class and b that with the class, it is the highest one that is drawn with
    probability b^num - a^num; within it, the first draw follows the draft's distribution.

    Args:
        target_probs: [some, vocab] float32.
        draft_probs: [some, vocab] float32, of each draw.
        num: [some] int64.
    """
    if num.max() == 1:
        return draft_probs
    classes = ratio_classes(target_probs, draft_probs)
    above = [np.where(classes > c, draft_probs, 0).sum(axis=-1, dtype=np.float64) for c in range(len(RATIO_EDGES))]
    upto = np.stack((*np.maximum(1 - np.array(above), 0), np.ones(len(num))), axis=-1)
    below = np.concatenate((np.zeros((len(num), 1)), upto[:, :-1]), axis=1)
    factors, power = np.zeros_like(upto), np.ones_like(upto)
    for number in range(int(num.max())):  # (b^num - a^num) / (b - a)
        factors = np.where(number < num[:, None], factors * below + power, factors)
        power = power * upto
    probs: Floats = draft_probs * np.take_along_axis(factors.astype(draft_probs.dtype), classes, axis=-1)
    return probs


def choose_paths(
    tokens: Ints, links: Ints, rows_at: RowsAt, draft_probs: Floats, slots: Ints
) -> tuple[Ints, Floats, Floats]:
    """Chooses one path of each tree: after each node the first child of the highest class of target / draft.

    The paper sorts all tokens by that ratio; five classes keep as many drafts and need no sort.

    Args:
        tokens: [batch, nodes] int64.
        links: [batch, nodes] int64, parents before their nodes, or -1.
        rows_at: called for nodes of the paths alone, as a row may be computed on demand.
        draft_probs: [batch, nodes, vocab] float32, the distribution each node was drawn from, its siblings too.
        slots: [some] int64, those to look at.

    Returns:
        [some, nodes] int64, the nodes from the root on, then -1; their rows of the target and the distributions that
        they were chosen from, [some, nodes, vocab] float32.
    """
    tokens, links, draft_probs = tokens[slots], links[slots], draft_probs[slots]
    path, last = np.full(tokens.shape, -1, dtype=np.int64), np.zeros(len(slots), dtype=np.int64)
    rows, probs = np.zeros((2, *draft_probs.shape), dtype=draft_probs.dtype)
    path[:, 0], rows[:, 0] = 0, rows_at(slots, last)
    for depth in range(1, tokens.shape[1]):
        is_child = links == last[:, None]
        some = np.flatnonzero(is_child.any(axis=1))
        if not len(some):
            break
        is_child, above = is_child[some], rows[some, depth - 1]
        drawn = np.where(is_child, tokens[some], 0)
        drafted = np.take_along_axis(draft_probs[some], drawn[:, :, None], axis=-1)[:, :, 0]
        classes = ratio_classes(np.take_along_axis(above, drawn, axis=-1), drafted)
        last[some] = path[some, depth] = best = np.where(is_child, classes, -1).argmax(axis=1)
        probs[some, depth] = chosen_probs(above, draft_probs[some, best], is_child.sum(axis=1))
        rows[some, depth] = rows_at(slots[some], best)
    return path, rows, probs
