# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: an index of the slot's own tokens, grown token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from speccompile.core.jobs import MethodContext
from speccompile.core.protocols import Batch, Outputs, StepTimes, TokenSequence
from speccompile.core.tree import Ints, TokenTree, Verdict
from speccompile.drafting.acceptance import AcceptanceEstimate, SharedPrior, emitted_tokens
from speccompile.drafting.budget import Budget
from speccompile.drafting.grammars import num_allowed
from speccompile.drafting.tree import DraftTrees

if TYPE_CHECKING:
    from speccompile.speculators.ngram.config import NgramConfig

FIRST_RATES = (0.3, 0.5, 0.7, 0.8, 0.85, 0.9)  # acceptance rate after a match of 1, 2, ... tokens, to begin with
TOKENS_PER_MATCH = 2  # where nothing was measured


class NgramIndex:
    """Where each run of min_match .. max_match tokens occurred last, and so which tokens followed it.

    A token costs max_match - min_match + 1 dictionary entries, a lookup as many reads; keys are slices of a string.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self._sizes, self._max_match = tuple(range(max_match, min_match - 1, -1)), max_match
        self._follower: dict[str, int] = {}
        self._num_indexed = 0  # every run that ends before this position has its entry

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """Returns the position after the latest earlier occurrence of the longest ending, and its length; or (0, 0)."""
        self._extend(tokens)
        follower, num = self._follower, len(tokens)
        ending = "".join(map(chr, tokens[-self._max_match :]))
        for size in self._sizes:
            if size < num:
                position = follower.get(ending[-size:])
                if position is not None:
                    return position, size
        return 0, 0

    def _extend(self, tokens: list[int]) -> None:
        # The ending itself is left out: its follower is what we are looking for.
        follower, sizes, last = self._follower, self._sizes, len(tokens)
        start = max(self._num_indexed + 1 - self._max_match, 0)
        text = "".join(map(chr, tokens[start:last]))
        for position in range(self._num_indexed + 1, last):
            end = position - start
            for size in sizes:
                if size <= end:
                    follower[text[end - size : end]] = position
        self._num_indexed = last - 1


@dataclass(slots=True, eq=False)
class NgramState:
    """The `draft_state` of a sequence."""

    index: NgramIndex
    estimate: AcceptanceEstimate  # acceptance of drafts by the length of the match, which stands in for a rank


class NgramProposer:
    """A `speccompile.core.proposer.Proposer`. Drafts are deterministic."""

    catches_up = looks_up = True
    may_draw = False
    caches = ()

    def __init__(self, config: NgramConfig, context: MethodContext) -> None:
        self.config = config
        self.max_drafts = min(config.num_draft_tokens, context.max_draft_nodes)
        self.budget = Budget(
            self.max_drafts, self.max_drafts, 1, context.costs.get("target"), is_fixed=config.tokens_per_match != "auto"
        )
        self._prior = SharedPrior(self.max_drafts)
        self._matched: list[int] = []  # match length of each slot of the last step
        self._probs: list[float] = []  # of one more token being kept, by slot
        self._rows: list[list[int]] = []  # root and drafts, by slot

    @property
    def foreseen(self) -> list[float]:
        rows = zip(self._probs, self._rows, strict=True)
        return [sum(prob**num for num in range(1, len(row))) for prob, row in rows]

    @property
    def offered(self) -> DraftTrees:
        made = DraftTrees([row[0] for row in self._rows], self.max_drafts)
        for slot, (prob, row) in enumerate(zip(self._probs, self._rows, strict=True)):
            made.put(slot, row[1:], range(len(row) - 1), [prob] * (len(row) - 1))
        return made

    def start(self, slot: int, sequence: TokenSequence) -> None:
        estimate = AcceptanceEstimate(self._prior, rank_shares=[0.0] * len(FIRST_RATES))
        sequence.draft_state = NgramState(NgramIndex(self.config.min_match, self.config.max_match), estimate)

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        """Makes a fresh index, which costs next to nothing; returns `num_rows`."""
        self.start(slot, sequence)
        return num_rows

    def prefill(
        self, slot: int, sequence: TokenSequence, tokens: Ints, start: int, outputs: Outputs
    ) -> None: ...  # the index is made of the slot's own tokens

    def propose(self, batch: Batch) -> TokenTree:
        """Returns, for each slot, the tokens that followed the longest ending last time."""
        sequences, self.budget.is_forced = batch.sequences, batch.least_drafts > 0
        states: list[NgramState] = [sequence.draft_state for sequence in sequences]
        found = [state.index.find(sequence.tokens) for state, sequence in zip(states, sequences, strict=True)]
        self._matched = [size for _, size in found]
        lengths = self._draft_lengths(states)
        self._rows = rows = [
            _draft(sequence.tokens, position, min(length, self.max_drafts, sequence.max_drafts))
            for sequence, (position, _), length in zip(sequences, found, lengths, strict=True)
        ]
        for slot, sequence in enumerate(sequences):
            if sequence.grammar is not None:
                self._restrict(slot, sequence)
        tokens = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for slot, row in enumerate(rows):
            for node, token in enumerate(row):  # one by one: of a list, it takes twice as long
                tokens[slot, node] = token
        if len(rows) == 1:
            return TokenTree.chain(tokens)
        return TokenTree.chain(tokens, np.array([len(row) for row in rows], dtype=np.int64))

    def _restrict(self, slot: int, sequence: TokenSequence) -> None:
        root, *drafts = self._rows[slot]
        forced = list(sequence.grammar.forced()[: min(self.max_drafts, sequence.max_drafts)])
        if forced != drafts[: len(forced)]:
            drafts, self._matched[slot] = forced, 0  # the match gets no verdict
        self._rows[slot] = [root, *drafts[: num_allowed(sequence.grammar, drafts)]]

    def _draft_lengths(self, states: Sequence[NgramState]) -> list[int]:
        """Returns the draft lengths by slot, the same for all matches, as shorter drafts are padded."""
        sizes, per_match = self._matched, self.config.tokens_per_match
        self._probs = [
            state.estimate.prob(FIRST_RATES[min(size, len(FIRST_RATES)) - 1], size - 1) if size else 0.0
            for state, size in zip(states, sizes, strict=True)
        ]
        if not self.budget.weighs_time:
            return [size * (TOKENS_PER_MATCH if per_match == "auto" else per_match) for size in sizes]
        if not any(sizes):
            return sizes
        gains, paths = [], self._probs
        for _ in range(self.max_drafts):
            gains.append(sum(paths))
            paths = [path * prob for path, prob in zip(paths, self._probs, strict=True)]
        length, _, _ = self.budget.best(gains, len(sizes))
        return [length if size else 0 for size in sizes]

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        """Learns the acceptance of drafts after matches; emitted tokens enter the index at the next step."""
        for slot, (sequence, size, prob, row) in enumerate(
            zip(batch.sequences, self._matched, self._probs, self._rows, strict=True)
        ):
            if size == 0:
                continue
            estimate = sequence.draft_state.estimate
            if len(row) == 1:
                estimate.recover()
                continue
            emitted = emitted_tokens(tree, verdict, slot)
            pairs = zip(row[1:], emitted, strict=False)
            kept = next(
                (num for num, (draft, token) in enumerate(pairs) if draft != token), min(len(row) - 1, len(emitted))
            )
            estimate.learn_rank(size - 1, kept - prob * min(kept + 1, len(row) - 1, len(emitted)))

    def skip(self, batch: Batch, verdict: Verdict, outputs: Outputs) -> None: ...

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        self.budget.observe(num_slots, num_nodes, times)

    def flush(self) -> None: ...


def _draft(tokens: list[int], position: int, num: int) -> list[int]:
    row = tokens[-1:]
    if num > 0:
        row += tokens[position : position + num]
        while len(row) <= num:  # the match overlaps its own draft: a loop of the text goes on
            row.append(row[position - len(tokens)])
    return row
