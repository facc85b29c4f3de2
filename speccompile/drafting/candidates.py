# SPDX-License-Identifier: Apache-2.0
"""Candidate tokens of a draft tree under construction, and the tree of those that are scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from speccompile.core.tree import Ints, TokenTree
from speccompile.core.tree_shape import TreeShape


@dataclass
class Candidates:
    """The candidates of one sequence. Candidate 0 is the root.

    Args:
        tokens, parents, probs, paths, depths, ranks: by candidate. `probs` is the probability given the parent, `paths`
            that of the whole path from the root.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    probs: list[float] = field(default_factory=lambda: [1.0])
    paths: list[float] = field(default_factory=lambda: [1.0])
    depths: list[int] = field(default_factory=lambda: [0])
    ranks: list[int] = field(default_factory=lambda: [0])

    @classmethod
    def from_root(cls, token: int) -> Candidates:
        return cls([token])

    def add(
        self, parent: int, tokens: Sequence[int], probs: Sequence[float], floor: float = 0.0, first_rank: int = 0
    ) -> None:
        """Adds children of a candidate, by rank; those whose path is less likely than `floor` are left out."""
        path, ranks = self.paths[parent], list(range(first_rank, first_rank + len(tokens)))
        if floor > 0:
            kept = [i for i, prob in enumerate(probs) if path * prob >= floor]
            tokens, probs, ranks = [tokens[i] for i in kept], [probs[i] for i in kept], [ranks[i] for i in kept]
        self.tokens += tokens
        self.probs += probs
        self.ranks += ranks
        self.paths += [path * prob for prob in probs]
        self.parents += [parent] * len(tokens)
        self.depths += [self.depths[parent] + 1] * len(tokens)

    def likeliest(self, start: int, width: int) -> list[int]:
        return sorted(range(start, len(self.tokens)), key=self.paths.__getitem__, reverse=True)[:width]

    def best(self, num: int) -> list[int]:
        """Returns the root and the `num` likeliest others: first the path of likeliest children, then by index.

        Parents come before children, and siblings keep their order. Where the first path is accepted, nothing has to
        be moved in the target's cache.
        """
        chosen = sorted(self.likeliest(1, num))
        first: dict[int, int] = {}
        for c in chosen:
            first.setdefault(self.parents[c], c)
        path = [0]
        while (c := first.get(path[-1], 0)) > 0:
            path.append(c)
        on_path = set(path)
        return path + [c for c in chosen if c not in on_path]


def tree_from_candidates(
    trees: Sequence[Candidates], num_drafts: int, max_drafts: Sequence[int]
) -> tuple[TokenTree, list[list[int]]]:
    """Returns the tree to score: the best candidates of every sequence.

    Args:
        num_drafts: most draft tokens, see `Budget.size`.
        max_drafts: most draft tokens on a path, by sequence (`TokenSequence.max_drafts`).

    Returns:
        The tree, and for each sequence the candidate index of each of its nodes.
    """
    kept = []
    for tree, limit in zip(trees, max_drafts, strict=True):
        chosen = tree.best(num_drafts) if limit > 0 else [0]
        kept.append(chosen if max(tree.depths) <= limit else [c for c in chosen if tree.depths[c] <= limit])
    if len(trees) == 1:
        return _tree_of_one(trees[0], kept[0]), kept
    nodes = max(map(len, kept))
    tokens: Ints = np.zeros((len(trees), nodes), dtype=np.int64)
    parents: Ints = np.full((len(trees), nodes), -1, dtype=np.int64)
    is_chain = True
    for slot, (tree, chosen) in enumerate(zip(trees, kept, strict=True)):
        node_of = {candidate: node for node, candidate in enumerate(chosen)}
        tokens[slot, : len(chosen)] = [tree.tokens[c] for c in chosen]
        links = [node_of[tree.parents[c]] for c in chosen[1:]]
        parents[slot, 1 : len(chosen)] = links
        is_chain = is_chain and links == list(range(len(links)))
    num_nodes = np.array([len(chosen) for chosen in kept], dtype=np.int64)
    if is_chain:
        return TokenTree.chain(tokens, num_nodes), kept
    return TokenTree(tokens, parents, num_nodes), kept


def _tree_of_one(tree: Candidates, chosen: list[int]) -> TokenTree:
    node_of = {candidate: node for node, candidate in enumerate(chosen)}
    links = [-1, *(node_of[tree.parents[c]] for c in chosen[1:])]
    tokens = np.array([[tree.tokens[c] for c in chosen]], dtype=np.int64)
    if links == list(range(-1, len(links) - 1)):
        return TokenTree.chain(tokens)
    return TokenTree(tokens, np.array([links], dtype=np.int64), np.array([len(chosen)], dtype=np.int64))


def tree_from_shape(shape: TreeShape, roots: Ints, drafts: Ints, limits: Sequence[int]) -> TokenTree:
    """Returns the same shape in every sequence, as deep as each may go.

    Args:
        shape: of the tree; whole depths come first in it.
        roots: [batch] int64.
        drafts: [batch, shape.num_drafts] int64.
        limits: most draft tokens on a path, by sequence.
    """
    depths = shape.depths()
    num_nodes = np.searchsorted(depths, np.array(limits), side="right").astype(np.int64)
    nodes = int(num_nodes.max())
    tokens = np.concatenate((roots[:, None], drafts), axis=1)[:, :nodes]
    if shape.is_chain:
        return TokenTree.chain(tokens, num_nodes)
    used = np.arange(nodes) < num_nodes[:, None]
    return TokenTree(tokens, np.where(used, shape.parents()[:nodes], -1), num_nodes)


def grow_product(
    tree: Candidates,
    tokens: Sequence[Sequence[int]],
    probs: Sequence[Sequence[float]],
    num: int,
    allows: Callable[[int, int], bool] | None = None,
) -> None:
    """Adds the `num` likeliest nodes of a tree whose candidates at a depth are the same for every parent.

    Args:
        allows: whether a token may follow a candidate of the tree; None: all may.
    """
    # A node ranks by its path's probability, so the next best is a sibling or a first child of a node already added.
    heap = [(-probs[0][0], 0, 0, 0)]  # (minus the path's probability, parent, depth of the parent, rank)
    while heap and len(tree.tokens) <= num:
        _, parent, depth, rank = heappop(heap)
        if rank + 1 < len(probs[depth]):
            heappush(heap, (-tree.paths[parent] * probs[depth][rank + 1], parent, depth, rank + 1))
        if allows is not None and not allows(parent, tokens[depth][rank]):
            continue
        tree.add(parent, [tokens[depth][rank]], [probs[depth][rank]], first_rank=rank)
        if depth + 1 < len(probs):
            heappush(heap, (-tree.paths[-1] * probs[depth + 1][0], len(tree.tokens) - 1, depth + 1, 0))
