# SPDX-License-Identifier: Apache-2.0
"""How many tokens of a chain that was drafted in one run are worth scoring, and whether to draft at all.

Decisions rest on confidences, verdicts and the costs recorded in the bundle, never on the clock. Deterministic
drafts do not change the text, so the slots of a batch decide together and a drafted token may be left out; where
drafts are drawn, each slot decides alone and only between all and none, lest the law of the text be bent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from speccompile.core.jobs import StepCosts
from speccompile.drafting.home_rate import HomeRate

FIRST_RATE = 0.7  # acceptance rate of a fresh slot
MEMORY = 0.95  # weight of the past in it
RECOVERY = 0.02  # pull towards the first rate in a step without drafts, lest a bad start ends drafting for good
LEARNING_RATE = 0.1  # of the log odds between confidence and acceptance
MAX_LOG_ODDS = 4.0


class SlotRecord:
    """What a slot's verdicts have taught.

    Args:
        log_odds: of a draft being accepted over those that its confidence means, to begin with.
        home: acceptance rate to begin with; None: `FIRST_RATE`, for drafts that are drawn.
    """

    __slots__ = ("_probs", "home", "log_odds", "rate")

    def __init__(self, log_odds: float, home: HomeRate | None = None) -> None:
        self.home, self.log_odds = home, log_odds
        self.rate = FIRST_RATE if home is None else home.value
        self._probs: list[float] = []

    def draft(self, confidences: Sequence[float]) -> list[float]:
        """Probability that each token is accepted when all before it are; remembered for `learn`."""
        factor = math.exp(self.log_odds)
        self._probs = [factor * c / (factor * c + 1 - c) if c < 1 else 1.0 for c in confidences]
        return self._probs

    def learn(self, num_drafts: int, num_accepted: int, was_drafted: bool = False) -> None:
        """Move rate and log odds by one verdict.

        Args:
            num_drafts: tokens that were scored.
            num_accepted: of them, kept.
            was_drafted: time was spent on drafts, though none of them was worth scoring.
        """
        if num_drafts == 0 and not was_drafted:
            self.rate += RECOVERY * ((FIRST_RATE if self.home is None else self.home.value) - self.rate)
            if self.home is not None:
                self.home.rest()
            return
        if num_drafts == 0:
            self.rate *= MEMORY
            if self.home is not None:
                self.home.learn(0.0)
            return
        for prob in self._probs[:num_accepted]:
            self.rate += (1 - MEMORY) * (1 - self.rate)
            self.log_odds += LEARNING_RATE * (1 - prob)
        if self.home is not None:  # of the drafts that were looked at, the refused one among them
            self.home.learn(num_accepted / min(num_accepted + 1, num_drafts))
        if num_accepted < num_drafts:
            self.rate *= MEMORY
            self.log_odds -= LEARNING_RATE * self._probs[num_accepted]
        self.log_odds = min(max(self.log_odds, -MAX_LOG_ODDS), MAX_LOG_ODDS)


class Cutoff:
    """What all slots share: bounds and costs.

    Args:
        max_drafts: tokens of the chain.
        is_fixed: always draft and score all of them.
        min_confidence: score no further behind a path that is accepted with less than this.
        target: step costs by nodes; a batch of b slots and n nodes is taken to cost what one of b * n nodes does.
        heads: costs of one run by slots. Without both, time is not looked at.
    """

    def __init__(
        self, max_drafts: int, is_fixed: bool, min_confidence: float, target: StepCosts, heads: StepCosts
    ) -> None:
        self.max_drafts, self.min_confidence = max_drafts, min_confidence
        self._target, self._heads = target, heads
        self.weighs_time = bool(not is_fixed and target.ms_by_nodes and heads.ms_by_nodes)

    def pays(self, rates: Sequence[float], num_slots: int) -> bool:
        """Whether drafting promises more tokens a millisecond than a plain step.

        Args:
            rates: acceptance rates of the slots that can draft, at least one.
            num_slots: all that decide together.
        """
        if not self.weighs_time:
            return True
        expected = float(num_slots)
        plain = num_slots / self._target.ms(num_slots)
        for num in range(1, self.max_drafts + 1):
            expected += sum(rate**num for rate in rates)
            if expected > plain * self._ms(num_slots, num):
                return True
        return False

    def length(self, probs: Sequence[Sequence[float]], num_slots: int) -> int:
        """How many tokens of the chains to score, the same for all slots of a batch.

        Args:
            probs: of each slot that drafted, see `SlotRecord.draft`; at least one.
            num_slots: all that decide together.
        """
        paths = [1.0] * len(probs)
        expected, best, best_rate = float(num_slots), 0, 0.0
        for num in range(self.max_drafts + 1):
            if num:
                paths = [path * chain[num - 1] for path, chain in zip(paths, probs, strict=True)]
                if max(paths) < self.min_confidence:
                    break
                expected += sum(paths)
            rate = expected / self._ms(num_slots, num) if self.weighs_time else expected
            if rate > best_rate:
                best, best_rate = num, rate
        return best

    def _ms(self, num_slots: int, num_drafts: int) -> float:
        return self._heads.ms(num_slots) + self._target.ms(num_slots * (1 + num_drafts))
