# SPDX-License-Identifier: Apache-2.0
"""Length of a chain of drawn draft tokens: each sequence decides after every draw whether to draw the next.

The number of drafts changes the text of a sequence that samples, though not its distribution. So each decides alone: by
recorded costs, its own verdicts and the probabilities of its drawn tokens. A drawn token is always scored: leaving one
out because of its value would change the output distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

from speccompile.core.protocols import Batch
from speccompile.drafting.acceptance import AcceptanceEstimate, SharedPrior
from speccompile.drafting.budget import Budget

FIRST_RATE = 0.75  # acceptance rate of a new sequence, on the high side: a token may be followed by others
FIRST_WEIGHT = 4  # of it, in verdicts on a token: drafts that do not pay end after a few
MEMORY = 0.95  # weight of the past in a sequence's acceptance rate
RECOVERY = 0.002  # pull towards the first rate in a step without drafts: drafts are tried again, but rarely


class DrawnRecord:
    """Estimates of one sequence, initially `log_odds` = log(odds of acceptance / odds given by the confidence)."""

    __slots__ = ("_num", "estimate", "rate")

    def __init__(self, log_odds: float) -> None:
        self.rate, self._num, self.estimate = FIRST_RATE, FIRST_WEIGHT, AcceptanceEstimate(SharedPrior(1), log_odds)

    def learn(self, probs: Sequence[float], num_accepted: int) -> None:
        """Updates the estimates with one verdict. `probs`: that each draft token is accepted; empty: none was drawn."""
        if not probs:
            self.estimate.recover()
            self.rate += RECOVERY * (FIRST_RATE - self.rate)
            return
        for depth, prob in enumerate(probs[: num_accepted + 1]):
            is_kept = float(depth < num_accepted)
            self.estimate.learn_rank(0, is_kept - prob)
            self._num += 1
            self.rate += max(1 - MEMORY, 1 / self._num) * (is_kept - self.rate)


class DrawnLength:
    """Bounds and costs that all sequences share.

    Args:
        budget: of chains; `max_depth` bounds their length, and its recorded costs are used.
        min_path: no token is drawn after a path less likely to be accepted than this.
    """

    def __init__(self, budget: Budget, log_odds: float, min_path: float = 0.0) -> None:
        self.budget, self.log_odds, self.min_path = budget.recorded(), log_odds, min_path

    def begin(self, batch: Batch) -> DrawnChains:
        """Starts the chains of one step."""
        records = []
        for sequence in batch.sequences:
            if sequence.draft_state.drawn is None:
                sequence.draft_state.drawn = DrawnRecord(self.log_odds)
            records.append(sequence.draft_state.drawn)
        return DrawnChains(self, records, batch.is_forced)


class DrawnChains:
    """The chains of one step under construction. `is_forced`: they are drawn to their bounds, whatever the cost."""

    def __init__(self, rule: DrawnLength, records: list[DrawnRecord], is_forced: bool) -> None:
        self._rule, self._records, self._is_forced = rule, records, is_forced
        self._probs: list[list[float]] = [[] for _ in records]  # of acceptance, by draft token
        self._paths = [[1.0] for _ in records]

    def goes_on(self, slot: int) -> bool:
        """Returns whether the sequence in slot `slot` draws one more token: whether that is worth its time."""
        if self._is_forced:
            return True
        paths = self._paths[slot]
        if paths[-1] < self._rule.min_path:
            return False
        return self._rule.budget.draws_on(len(paths) - 1, sum(paths), paths[-1] * self._records[slot].rate)

    def add(self, slot: int, confidence: float) -> None:
        """Appends a drawn token; `confidence` is the draft's probability of it at temperature 1, NaN counts as 0."""
        prob = self._records[slot].estimate.prob(confidence if confidence >= 0 else 0.0)
        self._probs[slot].append(prob)
        self._paths[slot].append(self._paths[slot][-1] * prob)

    def learn(self, num_accepted: list[int]) -> None:
        for record, probs, num in zip(self._records, self._probs, num_accepted, strict=True):
            record.learn(probs, num)
