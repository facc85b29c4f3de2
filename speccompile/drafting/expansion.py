# SPDX-License-Identifier: Apache-2.0
"""One expansion of draft trees: what is fed to the draft, and what it must give.

A draft that keeps a cache reads a level behind the root's row. Rows hold a tree only as long as its mask is fed with
it, so a level feeds, besides the nodes to be expanded, their ancestors once more; but those that every node of the
level descends from, and that stand in the right rows, are a chain like any other text, and stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from speccompile.core.protocols import Batch, Outputs, Slot
from speccompile.core.tree import Bools, Ints, mask_from_bits
from speccompile.drafting.candidates import Candidates


@dataclass(frozen=True, eq=False)
class Expansion:
    """Feeds of an expansion. A slot that takes no part has padding: token 0, which sees itself alone.

    Args:
        depth: of the nodes that are expanded; the root's is 0.
        tokens: [batch, nodes] int64.
        tree_mask: [batch, nodes, nodes] bool.
        scored_nodes: [batch, scored] int64: columns of the nodes that are expanded, 0 at padding.
        num_in_place: by slot, how many drafts the cache holds behind the root already; the level's rows follow.
        nodes: by slot, the draft of each column, the number that its tree gives it; empty: takes no part.
        parents: by slot, the parent of each of these; 0 is the root.
        warp: temperature, top_k and top_p where drafts are drawn.
    """

    depth: int
    tokens: Ints
    tree_mask: Bools
    scored_nodes: Ints
    num_in_place: Sequence[int]
    nodes: Sequence[Sequence[int]]
    parents: Sequence[Sequence[int]]
    warp: Mapping[str, NDArray[Any]]


class Scorer(Protocol):
    """A draft that candidates behind nodes, and owns what its cache holds.

    Both calls give `candidates` and `candidate_probs` [batch, scored, candidates], and `node_probs` where the draft
    gives distributions;
    rows of slots that take no part mean nothing, and all are valid until the next call.
    """

    def room(self, place: int, slot: Slot) -> int:
        """How many drafts on a path the draft can read behind the root; below 0: it cannot draft there at all."""
        ...

    def begin(self, batch: Batch, places: Sequence[int], warp: Mapping[str, NDArray[Any]]) -> Outputs:
        """Read what is new of these slots, the root last, and candidate behind it: scored is 1."""
        ...

    def expand(self, batch: Batch, level: Expansion) -> Outputs:
        """Guess behind the level's scored nodes."""
        ...


class DraftLayout:
    """Which drafts stand in the draft's cache behind each root.

    Args:
        num_slots: of the batch.
        max_nodes: most columns of a level, at least one more than the deepest node that is expanded.
    """

    __slots__ = ("chains", "columns", "max_nodes")

    def __init__(self, num_slots: int, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self.chains: list[list[int]] = [[] for _ in range(num_slots)]  # in place, each behind the one before
        self.columns: list[list[int]] = [[] for _ in range(num_slots)]  # of the last level, behind them

    def plan(self, place: int, parents: Sequence[int], frontier: Sequence[int]) -> tuple[list[int], list[int]]:
        """The columns of a slot's next level.

        Args:
            place: of the slot.
            parents: by node.
            frontier: nodes to expand, the likeliest first; all descend from the last level's.

        Returns:
            The nodes to feed, in index order, and those of the frontier that fit.
        """
        chain, fed = self.chains[place], self.columns[place]
        top = chain[-1] if chain else 0
        needed: set[int] = set()
        taken = []
        for node in frontier:
            lacking = []
            above = node
            while above != top and above not in needed:
                lacking.append(above)
                above = parents[above]
            if len(needed) + len(lacking) <= self.max_nodes:
                needed.update(lacking)
                taken.append(node)
        columns = sorted(needed)
        while columns and fed and columns[0] == fed[0] and columns[0] not in taken:
            if any(parents[node] == top for node in columns[1:]):
                break
            top = columns[0]
            chain.append(top)
            columns, fed = columns[1:], fed[1:]
        self.columns[place] = columns
        return columns, taken

    def skip(self, place: int) -> tuple[list[int], list[int]]:
        """A level that the slot takes no part in: padding is written over the last columns."""
        self.columns[place] = []
        return [], []

    def num_kept(self, place: int, path: Sequence[int]) -> int:
        """How many drafts of an accepted path (the root left out) stand in their rows."""
        held, num = self.chains[place] + self.columns[place], 0
        for node, there in zip(path, held, strict=False):
            if node != there:
                break
            num += 1
        return num


def make_expansion(
    depth: int,
    trees: Sequence[Candidates],
    frontiers: Sequence[Sequence[int]],
    rows: DraftLayout,
    warp: Mapping[str, NDArray[Any]],
) -> tuple[Expansion, list[list[int]]]:
    """The feeds that expand `frontiers`, and which nodes they score.

    Args:
        depth: of the frontiers.
        trees: of all slots.
        frontiers: by slot, see `DraftLayout.plan`; empty: takes no part.
        rows: of the drafts; moved on.
        warp: see `Expansion`.
    """
    columns, scored = [], []
    for place, (tree, frontier) in enumerate(zip(trees, frontiers, strict=True)):
        fed, taken = rows.plan(place, tree.parents, frontier) if frontier else rows.skip(place)
        columns.append(fed)
        scored.append(taken)
    nodes, num_scored = max(map(len, columns)), max(map(len, scored))
    tokens, bits, places = [], [], []
    for tree, fed, taken in zip(trees, columns, scored, strict=True):
        at = {node: column for column, node in enumerate(fed)}
        seen: list[int] = []
        for column, node in enumerate(fed):
            above = at.get(tree.parents[node])
            seen.append(1 << column | (0 if above is None else seen[above]))
        missing = nodes - len(fed)
        tokens.append([tree.tokens[node] for node in fed] + [0] * missing)
        bits += seen + [1 << column for column in range(len(fed), nodes)]
        places.append([at[node] for node in taken] + [0] * (num_scored - len(taken)))
    level = Expansion(
        depth,
        np.array(tokens, dtype=np.int64),
        mask_from_bits(bits, nodes).reshape(len(trees), nodes, nodes),
        np.array(places, dtype=np.int64),
        [len(chain) for chain in rows.chains],
        columns,
        [[tree.parents[node] for node in fed] for tree, fed in zip(trees, columns, strict=True)],
        warp,
    )
    return level, scored
