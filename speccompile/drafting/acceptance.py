# SPDX-License-Identifier: Apache-2.0
"""Estimates how likely drafts are to be accepted: one estimator per sequence, with a prior that sequences share.

`accepted_length` is the expected number of draft tokens of a tree; `probs` corrects the confidences of candidates. A
greedy target takes one token, so a first-ranked candidate is right more often than its confidence says and a
third-ranked one less often, the more so the lower the temperature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from speccompile.core.tree import Floats, TokenTree, Verdict
from speccompile.drafting.tree import DraftTrees, Probs

LEARNING_RATE = 0.1  # per verdict, of the log odds between confidence and acceptance
MAX_LOG_ODDS = 4.0
# Shares of the first rank's log odds, by rank; the last holds for all later ranks. Measured on the example pair,
# greedy: log odds of 1.6 for first-ranked candidates, then 0.3, -0.3 and -0.6.
RANK_SHARES = (1.0, 0.2, -0.2, -0.4)
MEMORY = 0.95  # weight of the past in the accepted length of one sequence
RECOVERY = 0.02  # pull towards the prior in a step without drafts: a bad start must not end drafting permanently
PRIOR_SHARE = 0.02  # weight of one verdict in the shared prior
PRIOR_WEIGHT = 10  # of its first value, in verdicts: early verdicts count for more than PRIOR_SHARE
PRIOR_DRIFT = 5e-4  # towards its first value in a step without drafts: unprofitable drafting is retried, but rarely
FIRST_RATE = 0.7  # acceptance rate of a path's tokens before any verdict
ALMOST_ONE = 1.000000001  # keeps a confidence of 1 from 0 / 0 and from certainty


class SharedPrior:
    """The accepted length that sequences begin with, and drift back to while they do not draft.

    Shared only where drafts are deterministic: a drawn text must not depend on other sequences. Of at most `max_depth`
    draft tokens on a path, `FIRST_RATE` are accepted at first.
    """

    __slots__ = ("_weight", "first", "value")

    def __init__(self, max_depth: int) -> None:
        self.first = self.value = sum(FIRST_RATE**depth for depth in range(1, max_depth + 1))
        self._weight = PRIOR_WEIGHT

    def learn(self, num_accepted: int) -> None:
        self._weight += 1
        self.value += max(PRIOR_SHARE, 1 / self._weight) * (num_accepted - self.value)

    def rest(self) -> None:
        """Moves the prior towards its first value: one sequence made a step without drafts."""
        self.value += PRIOR_DRIFT * (self.first - self.value)


class AcceptanceEstimate:
    """Estimates of one sequence: its accepted length, and the acceptance of candidates by rank.

    Args:
        prior: of the accepted length; not shared with other sequences where drafts are drawn.
        log_odds: initial value of log(odds of acceptance / odds given by the confidence), for first-ranked candidates.
        rank_shares: share of `log_odds` by rank, or by another index such as the length of a match.
    """

    __slots__ = ("_first", "accepted_length", "log_odds", "prior")

    def __init__(self, prior: SharedPrior, log_odds: float = 0.0, rank_shares: Sequence[float] = RANK_SHARES) -> None:
        self.prior, self.accepted_length = prior, prior.value
        self._first = [share * log_odds for share in rank_shares]
        self.log_odds = list(self._first)

    def prob(self, confidence: float, rank: int = 0) -> float:
        factor = math.exp(self.log_odds[min(rank, len(self.log_odds) - 1)])
        return factor * confidence / (factor * confidence + ALMOST_ONE - confidence)

    def factors(self, num: int) -> list[float]:
        """Returns the factors of the odds of the first `num` ranks."""
        known = list(map(math.exp, self.log_odds[:num]))
        return known + known[-1:] * (num - len(known))

    def learn_length(self, was_drafted: bool, num_accepted: int) -> None:
        """Updates the accepted length. `was_drafted`: time was spent on drafts, even if none was scored."""
        if was_drafted:
            self.accepted_length += (1 - MEMORY) * (num_accepted - self.accepted_length)
            self.prior.learn(num_accepted)
        else:
            self.accepted_length += RECOVERY * (self.prior.value - self.accepted_length)
            self.prior.rest()

    def learn_ranks(self, trees: DraftTrees, slot: int, scored: Sequence[int], path: Sequence[int]) -> None:
        """Updates the odds by rank with the candidates whose parents were kept.

        Args:
            scored: candidate of each scored node, the root first; only the root: no draft was scored.
            path: indices into `scored` of the nodes that were kept, 0 first.
        """
        if len(scored) == 1:
            self.recover()
            return
        kept = set(map(scored.__getitem__, path))
        parents, ranks = trees.parents[slot, scored].tolist(), trees.ranks[slot, scored].tolist()
        probs = trees.probs[slot, scored].tolist()
        for candidate, parent, rank, prob in zip(scored, parents, ranks, probs, strict=True):
            if parent in kept:
                self.learn_rank(rank, float(candidate in kept) - prob)

    def learn_rank(self, rank: int, surprise: float) -> None:
        """Moves the odds of a rank by `surprise`, the number kept minus the sum of their probabilities."""
        rank = min(rank, len(self.log_odds) - 1)
        odds = self.log_odds[rank] + LEARNING_RATE * surprise
        self.log_odds[rank] = min(max(odds, -MAX_LOG_ODDS), MAX_LOG_ODDS)

    def recover(self) -> None:
        """Moves the odds towards their first values, so that drafts are tried again after none was worth scoring."""
        pairs = zip(self.log_odds, self._first, strict=True)
        self.log_odds = [odds + RECOVERY * (first - odds) for odds, first in pairs]


@dataclass(slots=True, eq=False)
class DraftState:
    """The `draft_state` of a sequence, which moves with it between slots."""

    estimate: AcceptanceEstimate | None  # of the acceptance of its drafts; None where nothing is estimated
    hidden: Floats | None = None  # [width] float32, the target's, of the token before the root; None: on the device
    features: list[Floats] = field(default_factory=list)  # [num, width] float32, rows of `PendingFeatures`, in order
    states: list[tuple[NDArray[Any], ...]] = field(default_factory=list)  # rows of target outputs after these
    num_states: int = 0
    num_live: int = 0  # number of rows after these, still in the target's last outputs
    drawn: Any = None  # a `DrawnRecord` from verdicts on drawn chains; None before the first chain of adaptive length


def acceptance_probs(factors: Probs, confidences: NDArray[Any]) -> Probs:
    """Returns the probability that each candidate of a node is accepted, given that the node is; at most 1 together.

    `factors` of the odds by rank are [slots, candidates], `confidences` [slots, nodes, candidates], by rank.
    """
    odds = factors[:, None] * confidences
    probs: Probs = odds / (odds + (ALMOST_ONE - confidences))
    if probs.shape[2] > 1:  # the later ones share what the first one leaves
        rest = probs[:, :, 1:]
        rest *= np.minimum((1 - probs[:, :, :1]) / np.maximum(rest.sum(axis=2, keepdims=True), 1e-9), 1)
    return probs


@runtime_checkable
class Foreseeing(Protocol):
    """A proposer that says what it expects of its drafts; `commit` learns from what was emitted, whoever drafted it."""

    @property
    def foreseen(self) -> Sequence[float]: ...

    @property
    def offered(self) -> DraftTrees:
        """The drafts that it found last and how likely they are, those that it left out included."""
        ...


def emitted_tokens(tree: TokenTree, verdict: Verdict, slot: int) -> list[int]:
    """Returns the tokens that a step gave a sequence: those of the accepted path and the next one."""
    path = verdict.path[slot, 1 : verdict.accepted[slot] + 1]
    return [*tree.tokens[slot, path].tolist(), verdict.following[slot]]


def own_path(verdict: Verdict, slot: int, num_nodes: int) -> list[int]:
    """Returns the accepted path, the root first, within a draft's own tree: the first `num_nodes` of the scored one."""
    path: list[int] = verdict.path[slot, : int(verdict.num_accepted[slot]) + 1].tolist()
    for at, node in enumerate(path):
        if node >= num_nodes:
            return path[:at]
    return path
