# SPDX-License-Identifier: Apache-2.0
"""How far to draft: fixed, or as long as a further token is worth its time.

A policy reads nothing but drafts, verdicts and the costs recorded in the bundle, never the clock. Where drafts are
sampled the text depends on their number, so each slot decides for itself, as if it were alone; where they are
deterministic the text does not depend on them, and the slots of a batch decide together.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from speccompile.core.jobs import StepCosts
from speccompile.speculators.draft_model.config import Config

FIRST_RATE = 0.75  # acceptance rate of a fresh slot, on the high side: a token may also open the way to others
MEMORY = 0.95  # weight of the past in a slot's running acceptance rate
RECOVERY = 0.02  # pull towards the first rate in a step without drafts, lest a bad start ends drafting for good
LEARNING_RATE = 0.1  # of the log odds between confidence and acceptance
MAX_LOG_ODDS = 4.0
MIN_PROB = 0.3  # of a path that is drafted behind, where nothing was measured


@dataclass(frozen=True)
class Times:
    """Milliseconds of a step at one batch size.

    Args:
        root_ms: without drafts.
        step_ms: [max_drafts] one more draft token behind i others in every slot, drafted and scored.
        score_ms: [max_drafts] the part of it that scoring takes.
    """

    root_ms: float
    step_ms: tuple[float, ...]
    score_ms: tuple[float, ...]


class LengthPolicy:
    """What all slots share: bounds and costs.

    Args:
        config: of the method.
        target, draft: measured step costs; without them, or with a fixed length, time is not looked at.
        max_draft_nodes: draft tokens one step may score at most.
    """

    def __init__(
        self, config: Config, target: StepCosts | None = None, draft: StepCosts | None = None, max_draft_nodes: int = 64
    ) -> None:
        self.max_drafts = min(config.max_length, max_draft_nodes)
        self.first_log_odds = math.log(config.confidence_odds)
        self._target, self._draft = target or StepCosts(), draft or StepCosts()
        is_free = config.num_draft_tokens != "auto" or config.min_confidence != "auto"
        self.weighs_time = bool(not is_free and self._target.ms_by_nodes and self._draft.ms_by_nodes)
        self.min_prob = 0.0 if is_free or self.weighs_time else MIN_PROB
        if config.min_confidence != "auto":
            self.min_prob = config.min_confidence
        self._times: dict[int, Times] = {}

    def unbound(self) -> LengthPolicy:
        """The same bound, with no eye on time or confidence."""
        policy = copy.copy(self)
        policy.weighs_time, policy.min_prob, policy._times = False, 0.0, {}
        return policy

    def times(self, batch: int) -> Times:
        """Costs at a batch size. A batch of b slots and n nodes is taken to cost what one slot of b * n nodes does."""
        if batch not in self._times:
            self._times[batch] = self._make_times(batch)
        return self._times[batch]

    def _make_times(self, batch: int) -> Times:
        if not self.weighs_time:
            free = (0.0,) * self.max_drafts
            return Times(1.0, free, free)
        target_ms = [self._target.ms(batch * nodes) for nodes in range(1, self.max_drafts + 2)]
        score = tuple(max(b - a, 0.0) for a, b in itertools.pairwise(target_ms))
        return Times(target_ms[0], tuple(ms + self._draft.ms(batch) for ms in score), score)


class Plan:
    """The draft of one slot in the making, and what the slot's verdicts have taught."""

    __slots__ = ("_probs", "expected", "log_odds", "prefix_prob", "rate")

    def __init__(self, policy: LengthPolicy) -> None:
        self.rate, self.log_odds = FIRST_RATE, policy.first_log_odds
        self.begin()

    def begin(self) -> None:
        """Forget the last draft, not its lessons."""
        self.prefix_prob, self.expected = 1.0, 1.0
        self._probs: list[float] = []

    def prob(self, confidence: float) -> float:
        """How likely a token of this confidence is to be accepted, when all before it are."""
        odds = math.exp(self.log_odds) * confidence
        return odds / (odds + 1 - confidence)

    def add(self, prob: float) -> None:
        """Append a draft token to what is scored."""
        self._probs.append(prob)
        self.prefix_prob *= prob
        self.expected += self.prefix_prob

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """Move the running acceptance rate and the log odds by one verdict."""
        for prob in self._probs[:num_accepted]:
            self.rate += (1 - MEMORY) * (1 - self.rate)
            self.log_odds += LEARNING_RATE * (1 - prob)
        if num_drafts == 0:
            self.rate += RECOVERY * (FIRST_RATE - self.rate)
        if num_accepted < num_drafts:
            self.rate *= MEMORY
            self.log_odds -= LEARNING_RATE * self._probs[num_accepted]
        self.log_odds = min(max(self.log_odds, -MAX_LOG_ODDS), MAX_LOG_ODDS)


class Round:
    """Decides the draft lengths of one step for slots that decide together.

    The question is one of tokens per millisecond: where the slots expect E tokens for C milliseconds, p more tokens
    for c more milliseconds are welcome if (E + p) / (C + c) > E / C.

    Args:
        policy: bounds and costs.
        plans: by place in the batch.
        members: places of the slots that decide together, whether they draft or not.
        may_drop: drafts are deterministic, so one that is known may still be left out; to leave out a sampled
            one would bend the law of the text.
    """

    __slots__ = ("_cost_ms", "_expected", "_may_drop", "_plans", "_policy", "_times", "members")

    def __init__(self, policy: LengthPolicy, plans: Sequence[Plan], members: Sequence[int], may_drop: bool) -> None:
        self._policy, self._plans, self.members, self._may_drop = policy, plans, members, may_drop
        self._times = policy.times(len(members))
        self._cost_ms = self._times.root_ms
        self._expected = float(len(members))

    def going(self, places: list[int], num_drafts: int) -> list[int]:
        """Those of `places` that should make one more token, not yet known, behind `num_drafts`."""
        policy, plans = self._policy, self._plans
        if num_drafts >= policy.max_drafts:
            return []
        going, gain = [], 0.0
        for place in places:
            plan = plans[place]
            if plan.prefix_prob >= policy.min_prob:
                going.append(place)
                gain += plan.prefix_prob * plan.rate
        return going if gain * self._cost_ms > self._expected * self._times.step_ms[num_drafts] else []

    def keep(self, places: list[int], confidences: Sequence[float], num_drafts: int) -> list[int]:
        """Take in a draft token for each of `places`; returns those whose token is to be scored.

        Args:
            places: they drafted.
            confidences: by place.
            num_drafts: draft tokens before this one.
        """
        plans, min_prob = self._plans, self._policy.min_prob if self._may_drop else 0.0
        kept, probs, gain = [], [], 0.0
        for place in places:
            plan = plans[place]
            prob = plan.prob(confidences[place])
            if plan.prefix_prob * prob >= min_prob:
                kept.append(place)
                probs.append(prob)
                gain += plan.prefix_prob * prob
        if self._may_drop and gain * self._cost_ms < self._expected * self._times.score_ms[num_drafts]:
            return []
        for place, prob in zip(kept, probs, strict=True):
            plans[place].add(prob)
        self._expected += gain
        self._cost_ms += self._times.step_ms[num_drafts]
        return kept
