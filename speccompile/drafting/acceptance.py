# SPDX-License-Identifier: Apache-2.0
"""How likely drafts are to be accepted: one estimator a sequence, with a prior that sequences share.

It answers two questions. Before drafting: how many draft tokens does a tree bring (`accepted_length`)? Of candidates
that are known: how likely is each to be the token that follows (`probs`)? The second corrects the draft's own
confidences: a greedy target takes one token, so a first-ranked candidate is right more often than its confidence says
and a third-ranked one less often, the more so the less a request samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from speccompile.drafting.candidates import Candidates

LEARNING_RATE = 0.1  # of the log odds between confidence and acceptance, a verdict
MAX_LOG_ODDS = 4.0
# Of the first rank's log odds, by rank; the last is for all that follow. Seen on the example pair, greedy: 1.6 with a
# first-ranked candidate, 0.3, -0.3 and -0.6 with those after it.
RANK_SHARES = (1.0, 0.2, -0.2, -0.4)
MEMORY = 0.95  # weight of the past in the accepted length of one sequence
RECOVERY = 0.02  # pull towards the prior in a step without drafts: a bad start must not end drafting for good
PRIOR_SHARE = 0.02  # weight of one verdict in the shared prior
PRIOR_WEIGHT = 10  # of its first value, in verdicts: the first verdicts count for more
PRIOR_DRIFT = 5e-4  # towards its first value in a step without drafts: what does not pay is tried again, but seldom
FIRST_RATE = 0.7  # acceptance rate of a path's tokens before anything is known


class SharedPrior:
    """The accepted length that sequences begin with, and drift back to while they do not draft.

    Sequences may share one only where drafts are deterministic: a drawn text must not depend on other sequences.

    Args:
        max_depth: most draft tokens on a path; it begins with what an acceptance rate of `FIRST_RATE` gives them.
    """

    __slots__ = ("_weight", "first", "value")

    def __init__(self, max_depth: int) -> None:
        self.first = self.value = sum(FIRST_RATE**depth for depth in range(1, max_depth + 1))
        self._weight = PRIOR_WEIGHT

    def learn(self, num_accepted: int) -> None:
        """Takes in one verdict on drafts."""
        self._weight += 1
        self.value += max(PRIOR_SHARE, 1 / self._weight) * (num_accepted - self.value)

    def rest(self) -> None:
        """A step of one sequence passed without drafts."""
        self.value += PRIOR_DRIFT * (self.first - self.value)


class AcceptanceEstimate:
    """What the verdicts on one sequence tell of its drafts.

    Args:
        prior: of the accepted length; one of its own where drafts are drawn.
        log_odds: of a first-ranked candidate being accepted, over the odds that its confidence means, to begin with.
        rank_shares: of them, by rank. A method may count something else by which its confidences differ, as the
            length of a match.
    """

    __slots__ = ("_factors", "_first", "accepted_length", "log_odds", "prior")

    def __init__(self, prior: SharedPrior, log_odds: float = 0.0, rank_shares: Sequence[float] = RANK_SHARES) -> None:
        self.prior, self.accepted_length = prior, prior.value
        self._first = [share * log_odds for share in rank_shares]
        self.log_odds = list(self._first)
        self._factors: list[float] = []  # of the odds, by rank, for as many ranks as were asked for; empty: to be made

    def prob(self, confidence: float, rank: int = 0) -> float:
        """Probability that a single candidate of its parent is accepted."""
        factor = math.exp(self.log_odds[min(rank, len(self.log_odds) - 1)])
        return factor * confidence / (factor * confidence + 1.000000001 - confidence)

    def probs(self, confidences: Sequence[float]) -> list[float]:
        """Probability that each candidate of one parent is accepted, given that the parent is; at most 1 together.

        Args:
            confidences: by rank.
        """
        factors = self._factors
        if len(factors) < len(confidences):
            factors = [math.exp(odds) for odds in self.log_odds]
            self._factors = factors = factors + factors[-1:] * (len(confidences) - len(factors))
        # 1e-9 keeps a confidence of 1 from 0/0 and from certainty.
        probs = [f * c / (f * c + 1.000000001 - c) for f, c in zip(factors, confidences, strict=False)]
        total = sum(probs)
        return probs if total <= 1 else [prob / total for prob in probs]

    def learn_length(self, was_drafted: bool, num_accepted: int) -> None:
        """Takes in how many drafts were kept.

        Args:
            was_drafted: time was spent on drafts, whether any of them was worth scoring or not.
            num_accepted: drafts kept.
        """
        if was_drafted:
            self.accepted_length += (1 - MEMORY) * (num_accepted - self.accepted_length)
            self.prior.learn(num_accepted)
        else:
            self.accepted_length += RECOVERY * (self.prior.value - self.accepted_length)
            self.prior.rest()

    def learn_ranks(self, tree: Candidates, scored: Sequence[int], path: Sequence[int]) -> None:
        """Takes in which candidates were kept, of those whose parents were.

        Args:
            tree: of the sequence.
            scored: candidate of each node that was scored, the root first; the root alone: none was worth it.
            path: nodes kept, the root first.
        """
        self._factors = []
        if len(scored) == 1:
            self.recover()
            return
        kept = {scored[node] for node in path}
        for candidate in scored[1:]:
            if tree.parents[candidate] in kept:
                self.learn_rank(tree.ranks[candidate], float(candidate in kept) - tree.probs[candidate])

    def learn_rank(self, rank: int, surprise: float) -> None:
        """Moves the odds of a rank.

        Args:
            rank: of one or more drafts.
            surprise: how many of them were kept, less the sum of their probabilities.
        """
        rank = min(rank, len(self.log_odds) - 1)
        odds = self.log_odds[rank] + LEARNING_RATE * surprise
        self.log_odds[rank] = min(max(odds, -MAX_LOG_ODDS), MAX_LOG_ODDS)

    def recover(self) -> None:
        """Drafts were not worth scoring: moves the odds towards where they began, so that drafts are tried again."""
        self._factors = []
        pairs = zip(self.log_odds, self._first, strict=True)
        self.log_odds = [odds + RECOVERY * (first - odds) for odds, first in pairs]
