# SPDX-License-Identifier: Apache-2.0
"""One expansion of draft trees: the draft's inputs, and the outputs that it must give.

A draft with a KV cache writes the nodes of an expansion after the root's row. Cached rows can be used as a tree only
with its mask, so an expansion feeds the nodes to expand and, once more, their ancestors. Ancestors that all these nodes
share and whose rows are already in path order form a chain, need no mask, and are not fed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from speccompile.core.protocols import Batch, Outputs, TokenSequence
from speccompile.core.tree import Bools, Ints, chain_mask, mask_from_bits
from speccompile.drafting.candidates import Candidates


@dataclass(frozen=True, eq=False)
class Expansion:
    """Inputs of one expansion. A slot that takes no part has padding: token 0, which attends to itself alone.

    Args:
        depth: of the expanded nodes; the root has depth 0.
        tokens: [batch, nodes] int64.
        tree_mask: [batch, nodes, nodes] bool.
        scored_nodes: [batch, scored] int64, columns of the expanded nodes, 0 at padding.
        num_in_place: by slot, how many drafts the cache already holds after the root; this expansion's rows follow.
        nodes: by slot, the candidate index of each column; empty: the slot takes no part.
        parents: by slot, the candidate index of each column's parent; 0 is the root.
        warp: temperature, top_k and top_p where drafts are drawn; otherwise empty.
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
    """A draft that gives candidates after nodes, and owns the rows of its cache.

    `begin` and `expand` return `candidates` and `candidate_probs` [batch, scored, candidates], and `node_probs` where
    the draft gives distributions. Rows of slots that take no part are undefined; all outputs are valid until the next
    call.
    """

    def room(self, slot: int, sequence: TokenSequence) -> int:
        """Returns how many drafts on a path the cache has rows for after the root; below 0: it cannot draft at all."""
        ...

    def begin(self, batch: Batch, slots: Sequence[int], warp: Mapping[str, NDArray[Any]]) -> Outputs:
        """Reads the new tokens of these slots, the root last; returns candidates after the root: `scored` is 1."""
        ...

    def expand(self, batch: Batch, level: Expansion) -> Outputs: ...


class DraftLayout:
    """Which drafts the draft's KV cache holds after each root.

    Args:
        max_nodes: most columns of an expansion; at least one more than the greatest depth that is expanded.
    """

    __slots__ = ("chains", "columns", "max_nodes")

    def __init__(self, num_slots: int, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self.chains: list[list[int]] = [[] for _ in range(num_slots)]  # by slot, rows in path order that stay
        self.columns: list[list[int]] = [[] for _ in range(num_slots)]  # by slot, rows of the last expansion

    def plan(self, slot: int, parents: Sequence[int], frontier: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns the columns of a slot's next expansion, and moves the layout on.

        Args:
            frontier: nodes to expand, the likeliest first; all descend from those of the last expansion.

        Returns:
            The nodes to feed, in index order, and those of the frontier that fit.
        """
        chain, fed = self.chains[slot], self.columns[slot]
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
        self.columns[slot] = columns
        return columns, taken

    def skip(self, slot: int) -> tuple[list[int], list[int]]:
        """Returns no columns for an expansion without this slot: padding overwrites its last columns."""
        self.columns[slot] = []
        return [], []

    def num_kept(self, slot: int, path: Sequence[int]) -> int:
        """Returns how many drafts of an accepted path (without the root) have their rows in the cache, in order."""
        held, num = self.chains[slot] + self.columns[slot], 0
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
    """Returns the inputs that expand `frontiers`, and by slot the nodes that are scored.

    Args:
        frontiers: by slot, see `DraftLayout.plan`; empty: the slot takes no part.
        rows: layout of the draft's cache; updated.
    """
    columns, scored = [], []
    for slot, (tree, frontier) in enumerate(zip(trees, frontiers, strict=True)):
        fed, taken = rows.plan(slot, tree.parents, frontier) if frontier else rows.skip(slot)
        columns.append(fed)
        scored.append(taken)
    nodes, num_scored = max(map(len, columns)), max(map(len, scored))
    tokens, bits, scored_columns = [], [], []
    for tree, fed, taken in zip(trees, columns, scored, strict=True):
        at = {node: column for column, node in enumerate(fed)}
        seen: list[int] = []
        for column, node in enumerate(fed):
            above = at.get(tree.parents[node])
            seen.append(1 << column | (0 if above is None else seen[above]))
        missing = nodes - len(fed)
        tokens.append([tree.tokens[node] for node in fed] + [0] * missing)
        bits += seen + [1 << column for column in range(len(fed), nodes)]
        scored_columns.append([at[node] for node in taken] + [0] * (num_scored - len(taken)))
    level = Expansion(
        depth,
        np.array(tokens, dtype=np.int64),
        mask_from_bits(bits, nodes).reshape(len(trees), nodes, nodes),
        np.array(scored_columns, dtype=np.int64),
        [len(chain) for chain in rows.chains],
        columns,
        [[tree.parents[node] for node in fed] for tree, fed in zip(trees, columns, strict=True)],
        warp,
    )
    return level, scored


def padding_mask(lengths: Ints, counts: Sequence[int], width: int, max_seq_len: int) -> Bools:
    """Returns the mask of chains whose padding attends to itself alone, so that no position exceeds the last one.

    Args:
        lengths: [batch] int64, rows before the chains.
        counts: by slot, columns of its chain; the others are padding, and so are those beyond the last position.
    """
    used = np.arange(width) < np.minimum(counts, max_seq_len - lengths)[:, None]
    mask: Bools = chain_mask(len(counts), width) & used[:, :, None]
    return mask | np.eye(width, dtype=np.bool_)
