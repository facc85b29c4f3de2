# SPDX-License-Identifier: Apache-2.0
"""Draft trees of a batch in arrays, level by level, and one expansion of them: the inputs of one run of the draft.

A draft with a KV cache writes the nodes of an expansion after the root's row. Cached rows of a tree need its mask, so
an expansion feeds the nodes to expand and their ancestors again. Ancestors that all share, with rows in path order,
form a chain, need no mask, and are not fed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.tree import Bools, Floats, Ints, TokenTree, chain_mask, mask_from_bits

Probs = NDArray[np.float64]
LEAST = 1e-300  # probability of a path


class DraftTrees:
    """The candidates of a batch. Node 0 of each sequence is its root; parents come before their children.

    `tokens`, `parents` and `ranks` (among the candidates after the same node) are [slots, nodes] int64. `probs` [slots,
    nodes] float64 are of acceptance given that the parent is accepted; `paths`, of the whole path, are 0 where there is
    no such candidate. A sequence gets at most `most` of them.
    """

    def __init__(self, roots: Ints | Sequence[int], most: int) -> None:
        # The last column is never used: what comes after node -1 has probability 0.
        self.tokens, self.parents, self.ranks = np.zeros((3, len(roots), most + 2), dtype=np.int64)
        self.probs, self.paths = np.zeros((2, len(roots), most + 2))
        self.tokens[:, 0], self.parents[:, 0], self.probs[:, 0], self.paths[:, 0] = roots, -1, 1, 1
        self.num_nodes = 1  # columns in use
        self._slots = np.arange(len(roots))[:, None]

    def add(self, parents: Ints, tokens: Ints, probs: Probs, most: int, floor: float = 0.0) -> int:
        """Adds the children of some nodes, the most probable path first; returns the first new node.

        Args:
            parents: [slots, parents] int64; -1: none.
            tokens: [slots, parents, candidates] int64.
            probs: [slots, parents, candidates] float64.
            most: children that each sequence keeps, at most.
            floor: children whose path has a probability below this are left out.
        """
        num_slots, num_parents, num = tokens.shape
        if num_parents * num == 1:  # as chains grow: for one number of each sequence, arrays take ten times as long
            start, self.num_nodes = self.num_nodes, self.num_nodes + 1
            rows = zip(parents.ravel().tolist(), tokens.ravel().tolist(), probs.ravel().tolist(), strict=True)
            for slot, (parent, token, prob) in enumerate(rows):
                path = self.paths.item(slot, parent) * prob
                self.paths[slot, start] = path if path >= max(floor, LEAST) else 0
                self.tokens[slot, start], self.parents[slot, start], self.probs[slot, start] = token, parent, prob
            return start
        paths = (self.paths[self._slots, parents][:, :, None] * probs).reshape(num_slots, -1)
        paths = np.where(paths >= max(floor, LEAST), paths, 0)  # also where a sequence takes no part and has NaN
        order = (-paths).argsort(axis=1, kind="stable")[:, :most]
        start, self.num_nodes = self.num_nodes, self.num_nodes + order.shape[1]
        new, flat = slice(start, self.num_nodes), order + self._slots * (num_parents * num)
        self.paths[:, new], self.probs[:, new] = paths.take(flat), probs.take(flat)
        self.tokens[:, new], self.parents[:, new], self.ranks[:, new] = (
            tokens.take(flat),
            parents.take(flat // num),
            order % num,
        )
        return start

    def put(
        self,
        slot: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        probs: Sequence[float],
        ranks: int | Sequence[int] = 0,
        *,
        floor: float = 0.0,
        limit: float = np.inf,
    ) -> None:
        """Gives one sequence all candidates, from node 1 on: paths of at least `floor`, at most `limit` drafts."""
        paths, depths = [1.0], [0]
        for parent, prob in zip(parents, probs, strict=True):
            path = paths[parent] * prob
            depths.append(depths[parent] + 1)
            paths.append(path if path >= floor and depths[-1] <= limit else 0.0)
        new = slice(1, len(paths))
        self.tokens[slot, new], self.parents[slot, new], self.ranks[slot, new] = tokens, parents, ranks
        self.probs[slot, new], self.paths[slot, new] = probs, paths[1:]
        self.num_nodes = max(self.num_nodes, len(paths))

    def ranked(self, most: int) -> list[list[float]]:
        """Returns the probabilities of the most probable paths of each sequence, falling, `most` of them at most."""
        rows: list[list[float]] = self.paths[:, 1 : self.num_nodes].tolist()
        for row in rows:
            row.sort(reverse=True)
            del row[most:]
        return rows

    def gains(self, most: int) -> list[float]:
        """Returns the tokens that the first, the second ... draft token brings, all sequences together."""
        return list(map(sum, zip(*self.ranked(most), strict=True)))

    def frontier(
        self,
        start: int,
        width: int,
        depth: int,
        last_depths: Sequence[int],
        falling: Sequence[Sequence[float]],
        most: int,
    ) -> tuple[list[list[int]], float]:
        """Returns by slot the nodes of the last level to expand, and the sum of their probabilities.

        Args:
            width: nodes that each sequence expands, at most.
            depth: of that level; a sequence whose last depth is less expands none.
            falling: see `ranked`; a child could not be scored after a path that is not among the first `most`.
        """
        frontiers, reach = [], 0.0
        for slot, paths in enumerate(self.paths[:, start : min(start + width, self.num_nodes)].tolist()):
            nodes, bound = list[int](), falling[slot][-1] if len(falling[slot]) == most else 0.0
            for node, path in enumerate(paths if last_depths[slot] >= depth else (), start):
                if path > 0 and path >= bound:
                    nodes.append(node)
                    reach += path
            frontiers.append(nodes)
        return frontiers, reach

    def count(self, slot: int) -> int:
        """Returns the number of candidates of a sequence."""
        paths: list[float] = self.paths[slot, 1 : self.num_nodes].tolist()
        return len(paths) - paths.count(0.0)

    def path(self, slot: int, node: int) -> list[int]:
        """Returns the draft tokens from the root's child to a node."""
        tokens = list[int]()
        while node > 0:
            tokens.append(int(self.tokens[slot, node]))
            node = int(self.parents[slot, node])
        return tokens[::-1]

    def best(self, num: int) -> tuple[TokenTree, list[list[int]]]:
        """Returns the tree of the `num` most probable candidates of every sequence, and the candidate of each node.

        The path of the most probable children comes first: its rows need not move in the target's cache. The others
        follow by index.
        """
        held, parents = self.paths[:, : self.num_nodes].tolist(), self.parents[:, : self.num_nodes].tolist()
        kept = []
        for slot, paths in enumerate(held):
            order = sorted(range(1, len(paths)), key=paths.__getitem__, reverse=True)[:num]
            while order and paths[order[-1]] <= 0:
                order.pop()
            kept.append(_first_path_first(sorted(order), parents[slot]))
        return self.tree_of(kept), kept

    def tree_of(self, kept: Sequence[Sequence[int]], draft_probs: Floats | None = None) -> TokenTree:
        """Returns the tree to score.

        Args:
            kept: by slot, the candidate of each node, parents before their children.
            draft_probs: [slots, nodes, vocab] by candidate, of a drawn tree.
        """
        nums = list(map(len, kept))
        size, num_nodes = max(nums), np.array(nums, dtype=np.int64)
        end = 1 + max(map(max, kept))
        known, above = self.tokens[:, :end].tolist(), self.parents[:, :end].tolist()
        tokens, parents, is_chain = list[list[int]](), list[list[int]](), True
        for slot, chosen in enumerate(kept):
            node_of = dict(zip(chosen, range(size), strict=False))
            links = list(map(node_of.__getitem__, map(above[slot].__getitem__, chosen[1:])))
            missing = size - len(chosen)
            tokens.append([*map(known[slot].__getitem__, chosen), *[0] * missing])
            parents.append([-1, *links, *[-1] * missing])
            is_chain = is_chain and links == list(range(len(links)))
        probs = None
        if draft_probs is not None:
            probs = np.zeros((len(kept), size, draft_probs.shape[2]), dtype=np.float32)
            for slot, chosen in enumerate(kept):
                probs[slot, : len(chosen)] = draft_probs[slot, chosen]
        if is_chain:
            return TokenTree.chain(np.array(tokens, dtype=np.int64), num_nodes, probs)
        return TokenTree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64), num_nodes, probs)


def _first_path_first(chosen: Sequence[int], parents: Sequence[int]) -> list[int]:
    path, rest = [0], []
    for node in chosen:
        if parents[node] == path[-1]:
            path.append(node)
        else:
            rest.append(node)
    return path + rest


@dataclass(frozen=True, eq=False)
class Expansion:
    """Inputs of one expansion. A slot that takes no part has padding: token 0, which attends to itself alone."""

    depth: int  # of the expanded nodes; the root has depth 0
    tokens: Ints  # [batch, nodes] int64
    tree_mask: Bools  # [batch, nodes, nodes] bool
    scored_nodes: Ints  # [batch, scored] int64, columns of the expanded nodes, 0 at padding
    num_in_place: Sequence[int]  # by slot, drafts that the cache already holds after the root; these rows follow
    nodes: Sequence[Sequence[int]]  # by slot, the candidate index of each column; empty: the slot takes no part
    parents: Sequence[Sequence[int]]  # by slot, the candidate index of each column's parent; 0 is the root
    warp: Mapping[str, NDArray[Any]]  # temperature, top_k and top_p where drafts are drawn; otherwise empty

    def mask_without_idle(self) -> Bools:
        """Returns the mask in which slots that take no part see each position alone, so that none has a high one."""
        if all(self.nodes):
            return self.tree_mask
        mask = self.tree_mask.copy()
        for slot, nodes in enumerate(self.nodes):
            if not nodes:
                mask[slot] = np.eye(mask.shape[1], dtype=np.bool_)
        return mask


class DraftLayout:
    """Which drafts the draft's KV cache holds after each root.

    An expansion has `max_nodes` columns at most, at least one more than the greatest depth that is expanded.
    """

    __slots__ = ("chains", "columns", "max_nodes")

    def __init__(self, num_slots: int, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self.chains: list[list[int]] = [[] for _ in range(num_slots)]  # by slot, rows in path order that stay
        self.columns: list[list[int]] = [[]] * num_slots  # by slot, rows of the last expansion, replaced by the next

    def plan(self, slot: int, parents: Sequence[int], frontier: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns a slot's next columns: the nodes to feed, in index order, and those of `frontier` that fit.

        Args:
            frontier: nodes to expand, the most probable first; all descend from those of the last expansion. Empty: the
                slot takes no part, and padding overwrites its last columns.
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
            if top in map(parents.__getitem__, columns[1:]):
                break
            top = columns[0]
            chain.append(top)
            columns, fed = columns[1:], fed[1:]
        self.columns[slot] = columns
        return columns, taken

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
    tokens: Ints,
    parents: Ints,
    frontiers: Sequence[Sequence[int]],
    layout: DraftLayout,
    warp: Mapping[str, NDArray[Any]],
) -> tuple[Expansion, Ints]:
    """Returns the inputs that expand `frontiers`, and the nodes that are scored, [slots, scored] int64, -1: none.

    `tokens` and `parents` of the trees are [slots, nodes] int64; an empty frontier takes no part.
    """
    feds, takens, links, width, num_scored = [], [], parents.tolist(), 0, 0
    for slot, frontier in enumerate(frontiers):
        fed, taken = layout.plan(slot, links[slot], frontier)
        feds.append(fed)
        takens.append(taken)
        width, num_scored = max(width, len(fed)), max(num_scored, len(taken))
    fed_tokens, scored, columns, bits, above = [], [], [], list[int](), []
    for slot, (fed, taken) in enumerate(zip(feds, takens, strict=True)):
        at: dict[int, int] = {}
        seen: list[int] = []
        above.append(list(map(links[slot].__getitem__, fed)))
        for column, (node, parent) in enumerate(zip(fed, above[-1], strict=True)):
            at[node] = column
            seen.append(1 << column | (seen[at[parent]] if parent in at else 0))
        for column in range(len(fed), width):
            seen.append(1 << column)
        bits += seen
        fed_tokens.append(tokens[slot, fed].tolist() + [0] * (width - len(fed)))
        scored.append(taken + [-1] * (num_scored - len(taken)))
        columns.append(list(map(at.__getitem__, taken)) + [0] * (num_scored - len(taken)))
    level = Expansion(
        depth,
        np.array(fed_tokens, dtype=np.int64),
        mask_from_bits(bits, width).reshape(len(feds), width, width) if width > 1 else chain_mask(len(feds), 1),
        np.array(columns, dtype=np.int64),
        list(map(len, layout.chains)),
        feds,
        above,
        warp,
    )
    return level, np.array(scored, dtype=np.int64)


def padding_mask(lengths: Ints, counts: Sequence[int], width: int, max_seq_len: int) -> Bools:
    """Returns the mask of chains whose padding attends to itself alone, so that no position exceeds the last one.

    Args:
        lengths: [batch] int64, rows before the chains.
        counts: by slot, columns of its chain; the others are padding, as those beyond the last position.
    """
    used = np.arange(width) < np.minimum(counts, max_seq_len - lengths)[:, None]
    mask: Bools = chain_mask(len(counts), width) & used[:, :, None]
    return mask | np.eye(width, dtype=np.bool_)
