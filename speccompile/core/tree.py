# SPDX-License-Identifier: Apache-2.0
"""TokenTree, the tokens that one target forward scores for a batch of slots, and Verdict, which of them are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.errors import RuntimeFault

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@lru_cache(maxsize=128)
def chain_parents(batch: int, nodes: int) -> Ints:
    """Returns the parents of full chains, [batch, nodes] int64: -1, 0, 1, ... Shared and read-only."""
    parents = np.ascontiguousarray(np.broadcast_to(np.arange(-1, nodes - 1, dtype=np.int64), (batch, nodes)))
    parents.flags.writeable = False
    return parents


@lru_cache(maxsize=32)
def chain_mask(batch: int, nodes: int) -> Bools:
    """Returns the tree mask of chains, [batch, nodes, nodes] bool, lower triangular. Shared and read-only."""
    mask = np.ascontiguousarray(np.broadcast_to(np.tri(nodes, dtype=np.bool_), (batch, nodes, nodes)))
    mask.flags.writeable = False
    return mask


@lru_cache(maxsize=128)
def _full(batch: int, nodes: int) -> Ints:
    num_nodes = np.full(batch, nodes, dtype=np.int64)
    num_nodes.flags.writeable = False
    return num_nodes


def mask_from_bits(rows: Sequence[int], nodes: int) -> Bools:
    """Returns [len(rows), nodes] bool: entry i of a row is bit i of its number; cheaper than filling an array."""
    width = (nodes + 7) // 8
    packed = np.frombuffer(b"".join([row.to_bytes(width, "little") for row in rows]), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(rows), width), axis=1, count=nodes, bitorder="little")
    return bits.view(np.bool_)


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A ragged batch of token trees. Node 0 is the root; children come after their parents.

    Use `chain` or `tree` to make one.

    Args:
        draft_probs: [batch, nodes, vocab] float32, row c is the distribution that node c was drawn from, as its
            siblings (row 0 is not read); None when the drafts are deterministic.
        is_chain: every node's parent is its predecessor, so full `parents` and `mask()` are neutral and need no feed.
    """

    tokens: Ints  # [batch, nodes] int64; values at padding do not matter
    parents: Ints  # [batch, nodes] int64; -1 at the root and at padding
    num_nodes: Ints  # [batch] int64, at least 1; nodes from there on are padding
    draft_probs: Floats | None = None
    is_chain: bool = False

    @classmethod
    def chain(cls, tokens: Ints, num_nodes: Ints | None = None, draft_probs: Floats | None = None) -> TokenTree:
        """Returns chains of the tokens [batch, nodes]; `num_nodes` [batch] says where each ends (None: all are full).

        Parents and masks of full chains are made once per shape. Nothing is checked.
        """
        batch, nodes = tokens.shape
        parents = chain_parents(batch, nodes)
        if num_nodes is None:
            return cls(tokens, parents, _full(batch, nodes), draft_probs, True)
        if int(num_nodes.min()) < nodes:
            parents = np.where(np.arange(nodes) < num_nodes[:, None], parents, -1)
        return cls(tokens, parents, num_nodes, draft_probs, True)

    @classmethod
    def roots(cls, tokens: Ints | Sequence[int]) -> TokenTree:
        """Returns the tree without drafts of each slot; tokens: [batch] int64. This is plain decoding."""
        roots = np.empty((len(tokens), 1), dtype=np.int64)  # filled one by one: of a list, it takes twice as long
        for slot, token in enumerate(tokens):
            roots[slot, 0] = token
        return cls.chain(roots)

    @classmethod
    def tree(
        cls,
        tokens: Ints | Sequence[Sequence[int]],
        parents: Ints | Sequence[Sequence[int]],
        num_nodes: Ints | None = None,
        draft_probs: Floats | None = None,
    ) -> TokenTree:
        """Returns a checked tree of any form. Raises RuntimeFault: it is none (see `validate`).

        Args:
            tokens: [batch, nodes] int64.
            parents: [batch, nodes] int64.
            num_nodes: [batch] int64; None: up to the last node that has a parent.
        """
        tokens, parents = np.asarray(tokens, dtype=np.int64), np.asarray(parents, dtype=np.int64)
        if num_nodes is None:
            linked = parents >= 0
            num_nodes = (linked * np.arange(parents.shape[-1])).max(axis=-1) + 1
        made = cls(tokens, parents, np.asarray(num_nodes, dtype=np.int64), draft_probs)
        made.validate()
        return made

    @classmethod
    def ragged(
        cls,
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None = None,
        draft_probs: Floats | None = None,
    ) -> TokenTree:
        """Returns trees of different sizes, padded: by slot the token and the parent (None: a chain) of each node."""
        nums = list(map(len, tokens))
        size, num_nodes = max(nums), np.array(nums, dtype=np.int64)
        padded = np.array([[*row, *[0] * (size - len(row))] for row in tokens], dtype=np.int64)
        if parents is None or all(list(row) == list(range(-1, len(row) - 1)) for row in parents):
            return cls.chain(padded, num_nodes, draft_probs)
        links = np.array([[*row, *[-1] * (size - len(row))] for row in parents], dtype=np.int64)
        return cls(padded, links, num_nodes, draft_probs)

    def nodes_of(self, slot: int) -> tuple[list[int], list[int]]:
        """Returns the token and the parent of each node of a slot."""
        num = int(self.num_nodes[slot])
        return self.tokens[slot, :num].tolist(), self.parents[slot, :num].tolist()

    @property
    def batch(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def nodes(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def num_draft_tokens(self) -> Ints:
        """[batch] int64: nodes that are neither root nor padding."""
        return self.num_nodes - 1

    def without_drafts(self, slots: Sequence[int]) -> TokenTree:
        """Returns the tree, in the same shape, with only the root in these slots; padding repeats the root."""
        tokens, parents, num_nodes = self.tokens.copy(), self.parents.copy(), self.num_nodes.copy()
        for slot in slots:
            tokens[slot], parents[slot], num_nodes[slot] = tokens[slot, 0], -1, 1
        return TokenTree(tokens, parents, num_nodes, self.draft_probs, self.is_chain)

    def mask(self) -> Bools:
        """Returns [batch, nodes, nodes] bool: row i is true at i and at its ancestors.

        A padding node sees itself (and, in a chain, the nodes before it), so no row is empty.
        """
        if self.is_chain:
            return chain_mask(self.batch, self.nodes)
        rows = []
        for parents in self.parents.tolist():
            above: list[int] = []  # by node: bits of the node and its ancestors
            for node, parent in enumerate(parents):
                above.append(1 << node | (above[parent] if parent >= 0 else 0))
            rows += above
        return mask_from_bits(rows, self.nodes).reshape(self.batch, self.nodes, self.nodes)

    def depths(self) -> Ints:
        """Returns [batch, nodes] int64: distance to the root; without meaning at padding."""
        if self.is_chain:
            return np.tile(np.arange(self.nodes, dtype=np.int64), (self.batch, 1))
        rows = []
        for parents in self.parents.tolist():
            depths: list[int] = []
            for parent in parents:
                depths.append(depths[parent] + 1 if parent >= 0 else 0)
            rows.append(depths)
        return np.array(rows, dtype=np.int64)

    def children(self, slot: int, node: int) -> list[int]:
        return [int(c) for c in np.flatnonzero(self.parents[slot] == node) if c > 0]

    def tokens_on(self, slot: int, path: Sequence[int] | Ints) -> list[int]:
        """Returns the tokens of the nodes of a path; stops at the first -1."""
        tokens: list[int] = []
        for node in path:
            if node < 0:
                break
            tokens.append(int(self.tokens[slot, node]))
        return tokens

    def show(self, slot: int = 0, texts: Sequence[str] = (), path: Sequence[int] = ()) -> None:
        """Prints the tree of one slot by `texts` or token ids, with the nodes of `path` marked; see `tree_lines`."""
        tokens, parents = self.nodes_of(slot)
        names = list(map(repr, texts[: len(tokens)])) or list(map(str, tokens))
        print("\n".join(tree_lines(names, parents, path)))

    def validate(self, vocab_size: int | None = None) -> None:
        """Checks the invariants. Raises RuntimeFault, which names the wrong shape, dtype, parent or token."""
        _check_shapes(self)
        index = np.arange(self.nodes)
        used = index < self.num_nodes[:, None]
        low, high = np.where(used & (index > 0), 0, -1), np.where(used, index - 1, -1)
        _check_range("parents", self.parents, low, high, "A parent precedes its children; root and padding have -1.")
        if vocab_size is not None:
            top = np.where(used, vocab_size - 1, np.iinfo(np.int64).max)
            low = np.where(used, 0, np.iinfo(np.int64).min)
            _check_range("tokens", self.tokens, low, top, "Draft and target must share one vocabulary.")


def tree_lines(names: Sequence[str], parents: Sequence[int], path: Sequence[int] = ()) -> list[str]:
    """Returns a tree as text: a chain on one line, branches below it, and `*` after the nodes of `path`."""
    children: list[list[int]] = [[] for _ in names]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    lines, left = [], [(0, "", "")]  # node, what its line begins with, and those below it
    while left:
        node, head, indent = left.pop()
        chain = [node]
        while len(children[chain[-1]]) == 1:
            chain += children[chain[-1]]
        lines.append(head + " > ".join(names[n] + "*" * (n in path) for n in chain))
        for n in reversed(branches := children[chain[-1]]):
            mark, bar = ("└─ ", "   ") if n == branches[-1] else ("├─ ", "│  ")
            left.append((n, indent + mark, indent + bar))
    return lines


def _check_shapes(tree: TokenTree) -> None:
    batch, nodes = tree.tokens.shape if tree.tokens.ndim == 2 else (0, 0)
    wanted: list[tuple[str, NDArray[Any] | None, tuple[int, ...], str]] = [
        ("tokens", tree.tokens, (max(batch, 1), max(nodes, 1)), "int64"),
        ("parents", tree.parents, (batch, nodes), "int64"),
        ("num_nodes", tree.num_nodes, (batch,), "int64"),
    ]
    for name, array, shape, dtype in wanted:
        if array is not None and (array.shape != shape or array.dtype != dtype):
            raise RuntimeFault(
                f"TokenTree.{name}", f"{array.dtype}{list(array.shape)}", f"{dtype}{list(shape)}", "Fix the proposer."
            )
    probs = tree.draft_probs
    if probs is not None and (probs.ndim != 3 or probs.shape[:2] != (batch, nodes) or probs.dtype != np.float32):
        raise RuntimeFault(
            "TokenTree.draft_probs",
            f"{probs.dtype}{list(probs.shape)}",
            f"float32[{batch}, {nodes}, vocab]",
            "Give one distribution per node, or None for deterministic drafts.",
        )
    if tree.num_nodes.min() < 1 or tree.num_nodes.max() > nodes:
        raise RuntimeFault("TokenTree.num_nodes", f"{tree.num_nodes.tolist()}", f"1 to {nodes}", "Fix the proposer.")


def _check_range(name: str, array: Ints, low: Ints, high: Ints, todo: str) -> None:
    wrong = np.argwhere((array < low) | (array > high))
    if len(wrong):
        slot, node = (int(i) for i in wrong[0])
        raise RuntimeFault(
            f"TokenTree.{name}[{slot}, {node}]",
            str(int(array[slot, node])),
            f"{int(low[slot, node])} to {int(high[slot, node])}",
            todo,
        )


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
