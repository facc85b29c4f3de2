# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: an index of the slot's own tokens, grown token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from speccompile.core.acceptance import Verdict
from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.protocols import Batch, Outputs, Slot
from speccompile.core.tree import Ints, TokenTree
from speccompile.speculators.ngram.config import Config

Floats64 = NDArray[np.float64]

FIRST_RATES = (0.3, 0.5, 0.7, 0.8, 0.85, 0.9)  # acceptance rate behind a match of 1, 2, ... tokens, to begin with
MEMORY = 0.9  # weight of the past in it
RECOVERY = 0.02  # pull towards the first rate in a step without drafts
TOKENS_PER_MATCH = 2  # where nothing was measured


class NgramIndex:
    """Where each run of min_match .. max_match tokens stood last, and so what followed it.

    A token costs max_match - min_match + 1 dictionary entries, once; a lookup costs as many reads. Runs are
    written as strings of one character a token: slices of a string are the cheapest keys there are.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self._sizes, self._max_match = tuple(range(max_match, min_match - 1, -1)), max_match
        self._follower: dict[str, int] = {}
        self._num_indexed = 0  # every run that ends before this position has its entry

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """Position of what followed the latest earlier occurrence of the longest suffix, and its length; or (0, 0)."""
        self._extend(tokens)
        follower, num = self._follower, len(tokens)
        suffix = "".join(map(chr, tokens[-self._max_match :]))
        for size in self._sizes:
            if size < num:
                position = follower.get(suffix[-size:])
                if position is not None:
                    return position, size
        return 0, 0

    def _extend(self, tokens: list[int]) -> None:
        # The suffix itself is left out: its follower is what we are looking for.
        follower, sizes, last = self._follower, self._sizes, len(tokens)
        start = max(self._num_indexed + 1 - self._max_match, 0)
        text = "".join(map(chr, tokens[start:last]))
        for position in range(self._num_indexed + 1, last):
            end = position - start
            for size in sizes:
                if size <= end:
                    follower[text[end - size : end]] = position
        self._num_indexed = last - 1


class MatchRates:
    """How often tokens behind a match of each length are accepted, learned from a slot's own verdicts."""

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}

    def rate(self, size: int) -> float:
        """Acceptance rate of each token behind a match of `size` tokens."""
        return self._rates.get(size, FIRST_RATES[min(size, len(FIRST_RATES)) - 1])

    def learn(self, size: int, num_drafts: int, num_accepted: int) -> None:
        """Move the rate of a match length by one verdict; without drafts it recovers slowly, to be tried again."""
        rate = 1 - (1 - self.rate(size)) * MEMORY**num_accepted
        if num_drafts == 0:
            first = FIRST_RATES[min(size, len(FIRST_RATES)) - 1]
            rate += RECOVERY * (first - rate)
        self._rates[size] = rate * MEMORY if num_accepted < num_drafts else rate


@dataclass(slots=True, eq=False)
class NgramState:
    """The `draft_state` of a sequence.

    Args:
        index: of its tokens.
        rates: what its verdicts have taught.
    """

    index: NgramIndex
    rates: MatchRates = field(default_factory=MatchRates)


class DraftLengths:
    """The draft length that promises a batch the most tokens per millisecond.

    Shorter drafts than the longest are padded, so the slots with a match share one length: what pays for one of
    them costs the others nothing more. Deterministic drafts do not change the text, so neighbours may have a say.

    Args:
        costs: of the target's steps. A batch of b slots and n nodes is taken to cost what one slot of b * n does.
        max_drafts: longest draft.
    """

    def __init__(self, costs: StepCosts, max_drafts: int) -> None:
        self._costs = costs
        powers = (np.arange(101)[:, None] / 100) ** np.arange(1, max_drafts + 1)
        # Row r: tokens expected of drafts of 0, 1, ... tokens that are accepted at r percent each.
        self._expected = np.concatenate((np.zeros((101, 1)), powers.cumsum(axis=1)), axis=1)
        self._step_ms: dict[int, Floats64] = {}
        self._alone: list[int] = np.argmax((1 + self._expected) / self._times(1), axis=1).tolist()

    def _times(self, batch: int) -> Floats64:
        if batch not in self._step_ms:
            nodes = range(1, self._expected.shape[1] + 1)
            self._step_ms[batch] = np.array([self._costs.ms(batch * num) or 1.0 for num in nodes])
        return self._step_ms[batch]

    def best(self, rates: Sequence[float], num_slots: int) -> int:
        """The length for all slots that have a match; 0 where plain decoding promises more.

        Args:
            rates: acceptance rates of these slots, at least one.
            num_slots: all slots.
        """
        if num_slots == 1:
            return self._alone[round(100 * rates[0])]
        expected = self._expected[[round(100 * rate) for rate in rates]].sum(axis=0)
        return int(((num_slots + expected) / self._times(num_slots)).argmax())


class NgramProposer:
    """See `speccompile.core.protocols.Proposer`. Drafts are deterministic."""

    catches_up = True
    caches = ()

    def __init__(self, config: Config, context: MethodContext) -> None:
        self.config = config
        self.max_drafts = min(config.num_draft_tokens, context.max_draft_nodes)
        self.costs = context.costs.get("target", StepCosts())
        self._lengths = DraftLengths(self.costs, self.max_drafts)
        self._matched: list[int] = []  # match length of each slot of the last step

    def start(self, slot: int, sequence: Slot) -> None:
        """A fresh index."""
        sequence.draft_state = NgramState(NgramIndex(self.config.min_match, self.config.max_match))

    def resume(self, slot: int, sequence: Slot, num_rows: int) -> int:
        """A fresh index: to make it costs next to nothing."""
        self.start(slot, sequence)
        return num_rows

    def prefill(self, slot: int, sequence: Slot, tokens: Ints, start: int, outputs: Outputs) -> None:
        """Nothing: the index reads the slot's own tokens."""

    def propose(self, batch: Batch) -> TokenTree:
        """What followed the longest suffix last time, for each slot."""
        slots = batch.slots
        states: list[NgramState] = [slot.draft_state for slot in slots]
        found = [state.index.find(slot.tokens) for state, slot in zip(states, slots, strict=True)]
        self._matched = [size for _, size in found]
        lengths = self._draft_lengths(states)
        rows = [
            _draft(slot.tokens, position, min(length, self.max_drafts, slot.max_drafts))
            for slot, (position, _), length in zip(slots, found, lengths, strict=True)
        ]
        if len(rows) == 1:
            return TokenTree.chain(np.array(rows, dtype=np.int64))
        tokens = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for place, row in enumerate(rows):
            tokens[place, : len(row)] = row
        return TokenTree.chain(tokens, np.array([len(row) for row in rows], dtype=np.int64))

    def _draft_lengths(self, states: Sequence[NgramState]) -> list[int]:
        """By place, from the match lengths; 0 without a match."""
        sizes, per_match = self._matched, self.config.tokens_per_match
        if per_match != "auto" or not self.costs.ms_by_nodes:
            return [size * (TOKENS_PER_MATCH if per_match == "auto" else per_match) for size in sizes]
        rates = [state.rates.rate(size) for state, size in zip(states, sizes, strict=True) if size]
        if not rates:
            return sizes
        length = self._lengths.best(rates, len(sizes))
        return [length if size else 0 for size in sizes]

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        """Learn what drafts behind matches are worth; emitted tokens enter the index at the next step."""
        num_nodes, num_accepted = tree.num_nodes.tolist(), verdict.num_accepted.tolist()
        for place, (slot, size) in enumerate(zip(batch.slots, self._matched, strict=True)):
            if size > 0:
                slot.draft_state.rates.learn(size, num_nodes[place] - 1, num_accepted[place])

    def settle(self) -> None:
        """Nothing of the target's is held."""


def _draft(tokens: list[int], position: int, num: int) -> list[int]:
    """The root and `num` tokens from `position` on."""
    row = tokens[-1:]
    if num > 0:
        row += tokens[position : position + num]
        while len(row) <= num:  # the match overlaps its own draft: a loop of the text goes on
            row.append(row[position - len(tokens)])
    return row
