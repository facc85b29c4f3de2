# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: an index of the slot's own tokens, grown token by token."""

from __future__ import annotations

import numpy as np

from speccompile.core.acceptance import Verdict
from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.protocols import Batch, Outputs, Slot
from speccompile.core.tree import Ints, TokenTree
from speccompile.speculators.ngram.config import Config

FIRST_RATES = (0.3, 0.5, 0.7, 0.8, 0.85, 0.9)  # acceptance rate behind a match of 1, 2, ... tokens, to begin with
MEMORY = 0.9  # weight of the past in it
TOKENS_PER_MATCH = 2  # where nothing was measured


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


class MatchLengths:
    """How far drafts go behind a match of each length, learned from a slot's own verdicts.

    Args:
        costs: of the target's steps, measured.
        max_drafts: longest draft.
    """

    def __init__(self, costs: StepCosts, max_drafts: int) -> None:
        self._rates: dict[int, float] = {}  # by match length: how often a token behind it is accepted
        self._step_ms = [costs.ms(1 + num) for num in range(max_drafts + 1)]

    def num_drafts(self, size: int) -> int:
        """The draft length that promises the most tokens per millisecond; at least 1, so that something is learned."""
        rate = self._rate(size)
        best, best_num, expected, prob = 0.0, 1, 1.0, 1.0
        for num in range(1, len(self._step_ms)):
            prob *= rate
            expected += prob
            speed = expected / self._step_ms[num]
            if speed > best:
                best, best_num = speed, num
        return best_num

    def learn(self, size: int, num_drafts: int, num_accepted: int) -> None:
        """Move the rate of a match length by one verdict."""
        rate = 1 - (1 - self._rate(size)) * MEMORY**num_accepted
        self._rates[size] = rate * MEMORY if num_accepted < num_drafts else rate

    def _rate(self, size: int) -> float:
        return self._rates.get(size, FIRST_RATES[min(size, len(FIRST_RATES)) - 1])


class NgramProposer:
    """See `speccompile.core.protocols.Proposer`. Drafts are deterministic."""

    def __init__(self, config: Config, context: MethodContext) -> None:
        self.config = config
        self.max_drafts = min(config.num_draft_tokens, context.max_draft_nodes)
        self.costs = context.costs.get("target", StepCosts())
        self._indices: dict[int, NgramIndex] = {}
        self._lengths: dict[int, MatchLengths] = {}
        self._matched: list[int] = []  # match length of each slot of the last step

    def start(self, slot: int, sequence: Slot) -> None:
        """A fresh index."""
        self._indices[slot] = NgramIndex(self.config.min_match, self.config.max_match)
        self._lengths[slot] = MatchLengths(self.costs, self.max_drafts)

    def prefill(self, slot: int, tokens: Ints, start: int, outputs: Outputs) -> None:
        """Nothing: the index reads the slot's own tokens."""

    def propose(self, batch: Batch) -> TokenTree:
        """What followed the longest suffix last time, for each slot."""
        self._matched = []
        rows = [self._draft(place, slot) for place, slot in enumerate(batch.slots)]
        if len(rows) == 1:
            return TokenTree.chain(np.array(rows, dtype=np.int64))
        tokens = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for place, row in enumerate(rows):
            tokens[place, : len(row)] = row
        return TokenTree.chain(tokens, np.array([len(row) for row in rows], dtype=np.int64))

    def _draft(self, place: int, slot: Slot) -> list[int]:
        tokens = slot.tokens
        row = tokens[-1:]
        position, size = self._indices[place].find(tokens)
        self._matched.append(size)
        if size == 0:
            return row
        num = min(self._num_drafts(place, size), self.max_drafts, slot.max_drafts)
        if num > 0:
            row += tokens[position : position + num]
            while len(row) <= num:  # the match overlaps its own draft: a loop of the text goes on
                row.append(row[position - len(tokens)])
        return row

    def _num_drafts(self, place: int, size: int) -> int:
        per_match = self.config.tokens_per_match
        if per_match != "auto":
            return size * per_match
        if not self.costs.ms_by_nodes:
            return size * TOKENS_PER_MATCH
        return self._lengths[place].num_drafts(size)

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        """Learn what drafts behind matches are worth; emitted tokens enter the index at the next step."""
        num_nodes, num_accepted = tree.num_nodes.tolist(), verdict.num_accepted.tolist()
        for place, size in enumerate(self._matched):
            if num_nodes[place] > 1:
                self._lengths[place].learn(size, num_nodes[place] - 1, num_accepted[place])

    def move(self, source: int, dest: int) -> None:
        """The index goes with its slot."""
        self._indices[dest] = self._indices.pop(source)
        self._lengths[dest] = self._lengths.pop(source)
