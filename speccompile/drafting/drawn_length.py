# SPDX-License-Identifier: Apache-2.0
"""How long a chain of drawn draft tokens becomes: each sequence decides after every draw whether to draw the next.

The number of drafts changes the text of a sequence that samples, though not its distribution. So each decides as if it
were alone: by the costs recorded in the bundle, its own verdicts and the probabilities of what it has drawn, never by
measured time or by its neighbours. A drawn token is always scored: to leave one out because of what it is would bend
the output distribution.
"""

from __future__ import annotations

from speccompile.core.protocols import Batch
from speccompile.drafting.acceptance import AcceptanceEstimate, SharedPrior
from speccompile.drafting.budget import Budget
from speccompile.drafting.candidates import Candidates

FIRST_RATE = 0.75  # acceptance rate of a new sequence, on the high side: a token may also open the way to others
MEMORY = 0.95  # weight of the past in a sequence's acceptance rate
RECOVERY = 0.02  # pull towards the first rate in a step without drafts, so that a bad start does not end drafting


class DrawnRecord:
    """What one sequence has learnt from the verdicts on its drawn drafts.

    Args:
        log_odds: of a draft token being accepted, over the odds that its confidence means, to begin with.
    """

    __slots__ = ("estimate", "rate")

    def __init__(self, log_odds: float) -> None:
        self.rate, self.estimate = FIRST_RATE, AcceptanceEstimate(SharedPrior(1), log_odds)

    def learn(self, chain: Candidates, num_accepted: int) -> None:
        """Takes in one verdict.

        Args:
            chain: what was scored.
            num_accepted: of its draft tokens.
        """
        num_drafts = len(chain.tokens) - 1
        self.estimate.learn_ranks(chain, range(num_drafts + 1), range(num_accepted + 1))
        if num_drafts == 0:
            self.rate += RECOVERY * (FIRST_RATE - self.rate)
            return
        for _ in range(num_accepted):
            self.rate += (1 - MEMORY) * (1 - self.rate)
        if num_accepted < num_drafts:
            self.rate *= MEMORY


class DrawnLength:
    """What all sequences share: bounds and costs.

    Args:
        budget: of chains; its depth is the longest, and its recorded costs count.
        log_odds: see `DrawnRecord`.
        min_path: no token is drawn after a path that is less likely to be accepted than this.
    """

    def __init__(self, budget: Budget, log_odds: float, min_path: float = 0.0) -> None:
        self.budget, self.log_odds, self.min_path = budget.recorded(), log_odds, min_path

    def begin(self, batch: Batch) -> DrawnChains:
        """Starts the chains of one step."""
        records = []
        for slot in batch.slots:
            if slot.draft_state.drawn is None:
                slot.draft_state.drawn = DrawnRecord(self.log_odds)
            records.append(slot.draft_state.drawn)
        return DrawnChains(self, records, batch.is_planned)


class DrawnChains:
    """The chains of one step in the making.

    Args:
        rule: what all sequences share.
        records: by slot.
        is_planned: a length was asked for: nothing is weighed.
    """

    def __init__(self, rule: DrawnLength, records: list[DrawnRecord], is_planned: bool) -> None:
        self._rule, self._records, self._is_planned = rule, records, is_planned
        self._chains = [Candidates.from_root(0) for _ in records]  # their tokens are known elsewhere

    def goes_on(self, place: int) -> bool:
        """Tells whether the sequence draws one more token: whether it promises more tokens a millisecond."""
        if self._is_planned:
            return True
        paths = self._chains[place].paths
        if paths[-1] < self._rule.min_path:
            return False
        return self._rule.budget.draws_on(len(paths) - 1, sum(paths), paths[-1] * self._records[place].rate)

    def add(self, place: int, confidence: float) -> None:
        """Appends a drawn token.

        Args:
            place: of the sequence in the batch.
            confidence: the draft's probability of the token at temperature 1; NaN counts as 0.
        """
        chain, confidence = self._chains[place], confidence if confidence >= 0 else 0.0
        chain.add(len(chain.tokens) - 1, [0], [self._records[place].estimate.prob(confidence)])

    def learn(self, num_accepted: list[int]) -> None:
        """Takes in the verdicts, by slot."""
        for record, chain, num in zip(self._records, self._chains, num_accepted, strict=True):
            record.learn(chain, num)
