# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: an index of the slot's own tokens, grown token by token."""

from __future__ import annotations

import numpy as np

from speccompile.core.acceptance import Verdict
from speccompile.core.jobs import MethodContext
from speccompile.core.protocols import Batch, Outputs, Slot
from speccompile.core.tree import Ints, TokenTree
from speccompile.speculators.ngram.config import Config


class NgramIndex:
    """Where each run of min_match .. max_match tokens stood last, and so what followed it.

    A token costs max_match - min_match + 1 dictionary entries, once; a lookup costs as many reads.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self.sizes = tuple(range(max_match, min_match - 1, -1))
        self._follower: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0  # every run that ends before this position has its entry

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """Position of what followed the latest earlier occurrence of the longest suffix, and its length; or (0, 0)."""
        self._extend(tokens)
        num = len(tokens)
        for size in self.sizes:
            if size < num:
                position = self._follower.get(tuple(tokens[num - size :]))
                if position is not None:
                    return position, size
        return 0, 0

    def _extend(self, tokens: list[int]) -> None:
        # The suffix itself is left out: its follower is what we are looking for.
        follower, last = self._follower, len(tokens)
        for position in range(self._num_indexed + 1, last):
            for size in self.sizes:
                if size <= position:
                    follower[tuple(tokens[position - size : position])] = position
        self._num_indexed = last - 1


class NgramProposer:
    """See `speccompile.core.protocols.Proposer`. Drafts are deterministic."""

    def __init__(self, config: Config, context: MethodContext) -> None:
        self.config = config
        self.max_drafts = min(config.num_draft_tokens, context.max_draft_nodes)
        self._indices: dict[int, NgramIndex] = {}

    def start(self, slot: int, sequence: Slot) -> None:
        """A fresh index."""
        self._indices[slot] = NgramIndex(self.config.min_match, self.config.max_match)

    def prefill(self, slot: int, tokens: Ints, start: int, outputs: Outputs) -> None:
        """Nothing: the index reads the slot's own tokens."""

    def propose(self, batch: Batch) -> TokenTree:
        """What followed the longest suffix last time, for each slot."""
        rows = [self._draft(place, slot) for place, slot in enumerate(batch.slots)]
        if len(rows) == 1:
            return TokenTree.chain(np.array(rows, dtype=np.int64))
        tokens = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for place, row in enumerate(rows):
            tokens[place, : len(row)] = row
        return TokenTree.chain(tokens, np.array([len(row) for row in rows], dtype=np.int64))

    def _draft(self, place: int, slot: Slot) -> list[int]:
        tokens = slot.tokens
        position, size = self._indices[place].find(tokens)
        num = min(self.max_drafts, slot.max_drafts, size * self.config.tokens_per_match)
        row = [tokens[-1]]
        if num > 0:
            row += tokens[position : position + num]
            while len(row) <= num:  # the match overlaps its own draft: a loop of the text goes on
                row.append(row[position - len(tokens)])
        return row

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        """Nothing: emitted tokens enter the index at the next step."""

    def move(self, source: int, dest: int) -> None:
        """The index goes with its slot."""
        self._indices[dest] = self._indices.pop(source)
