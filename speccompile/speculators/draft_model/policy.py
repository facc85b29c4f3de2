# SPDX-License-Identifier: Apache-2.0
"""How far to draft: fixed, or as long as a further token is worth its time.

A policy reads nothing but a slot's own drafts and verdicts and the costs recorded in the bundle, so a slot's draft
lengths, and with them its sampled text, do not depend on its neighbours or on the clock.
"""

from __future__ import annotations

import math

from speccompile.core.jobs import StepCosts
from speccompile.speculators.draft_model.config import Config

FIRST_RATE = 0.6  # acceptance rate that a fresh slot is taken to have
MEMORY = 0.95  # weight of the past in a slot's running acceptance rate
LEARNING_RATE = 0.1  # of the log odds between confidence and acceptance
MAX_LOG_ODDS = 4.0
MIN_PROB = 0.3  # of a path that is drafted behind, where nothing was measured


class LengthPolicy:
    """Bounds and costs shared by all slots.

    Args:
        max_drafts: longest draft.
        min_prob: least probability of a path that is drafted behind.
        odds: see `Config.confidence_odds`.
        root_ms: a step without drafts.
        step_ms: [max_drafts] one more draft token behind i others, drafted and scored.
        score_ms: [max_drafts] the part of it that scoring takes.
    """

    def __init__(
        self,
        max_drafts: int,
        min_prob: float = 0.0,
        odds: float = 1.0,
        root_ms: float = 1.0,
        step_ms: tuple[float, ...] = (),
        score_ms: tuple[float, ...] = (),
    ) -> None:
        free = (0.0,) * max_drafts
        self.max_drafts, self.min_prob, self.log_odds, self.root_ms = max_drafts, min_prob, math.log(odds), root_ms
        self.step_ms, self.score_ms = step_ms or free, score_ms or free


class Plan:
    """The draft of one slot in the making, and what the slot's verdicts have taught.

    Whether a token is worth its time is a question of tokens per millisecond of this step: with E tokens
    expected for C milliseconds, p more tokens for c more milliseconds are welcome if (E + p) / (C + c) > E / C.
    """

    __slots__ = ("_probs", "cost_ms", "expected", "log_odds", "policy", "prefix_prob", "rate")

    def __init__(self, policy: LengthPolicy) -> None:
        self.policy, self.rate, self.log_odds = policy, FIRST_RATE, policy.log_odds
        self.begin()

    def begin(self) -> None:
        """Forget the last draft, not its lessons."""
        self.prefix_prob, self.expected, self.cost_ms = 1.0, 1.0, self.policy.root_ms
        self._probs: list[float] = []

    def wants(self, num_drafts: int) -> bool:
        """True when one more draft token, not yet known, should be made behind `num_drafts` of them."""
        policy = self.policy
        if num_drafts >= policy.max_drafts or self.prefix_prob < policy.min_prob:
            return False
        return self.prefix_prob * self.rate * self.cost_ms > self.expected * policy.step_ms[num_drafts]

    def add(self, confidence: float, num_drafts: int, may_drop: bool) -> bool:
        """Take in a draft token of this confidence behind `num_drafts` others.

        Returns:
            False when scoring it would cost more than it promises (then it is to be dropped). Only deterministic
            drafts may be dropped once they are known: to drop a sampled one would bend the law of the text.
        """
        policy, odds = self.policy, math.exp(self.log_odds)
        accepted = odds * confidence / (odds * confidence + 1 - confidence)
        prob = self.prefix_prob * accepted
        if may_drop and (prob < policy.min_prob or prob * self.cost_ms < self.expected * policy.score_ms[num_drafts]):
            return False
        self.prefix_prob = prob
        self.expected += prob
        self.cost_ms += policy.step_ms[num_drafts]
        self._probs.append(accepted)
        return True

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """Move the running acceptance rate and the log odds by one verdict."""
        for prob in self._probs[:num_accepted]:
            self.rate += (1 - MEMORY) * (1 - self.rate)
            self.log_odds += LEARNING_RATE * (1 - prob)
        if num_accepted < num_drafts:
            self.rate *= MEMORY
            self.log_odds -= LEARNING_RATE * self._probs[num_accepted]
        self.log_odds = min(max(self.log_odds, -MAX_LOG_ODDS), MAX_LOG_ODDS)


def length_policy(
    config: Config, target: StepCosts | None, draft: StepCosts | None, max_draft_nodes: int
) -> LengthPolicy:
    """The policy that a recipe and the measured costs give."""
    max_drafts = min(config.max_length, max_draft_nodes)
    floor = 0.0 if config.min_confidence == "auto" else config.min_confidence
    if config.num_draft_tokens != "auto" or config.min_confidence != "auto":
        return LengthPolicy(max_drafts, floor, config.confidence_odds)
    if not (target and target.ms_by_nodes and draft and draft.ms_by_nodes):
        return LengthPolicy(max_drafts, MIN_PROB, config.confidence_odds)
    score = tuple(max(target.ms(i + 2) - target.ms(i + 1), 0.0) for i in range(max_drafts))
    step = tuple(ms + draft.ms(1) for ms in score)
    return LengthPolicy(max_drafts, 0.0, config.confidence_odds, target.ms(1), step, score)
