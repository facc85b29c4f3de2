# SPDX-License-Identifier: Apache-2.0
"""Chooses how far to draft, by batch size, from what steps were seen to cost and drafts to bring.

An arm is a decision: plain (0), chains of 1, 2, 3 ... tokens, or the method's own policy (None). What an arm is worth
is tokens per second: what it brings over what it costs.

What it brings is told by how many drafts were kept at each depth, which does not depend on the batch: all batch sizes
learn it together, and each request moves it by its own record. What it costs is measured, by batch size. Loads come
and go on a machine, so costs are ratios: an arm is tried in turn with the one in use, step by step, and the ratio of
their times is kept; what is common to all arms moves the level of the batch size alone.

Trials are paid for. Each has a price, the tokens that it is expected to lose, which is paid from an allowance that
grows by `ALLOWANCE` of what is decoded. An arm that cannot be better is not tried: it costs at least what a shorter
chain does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from speccompile.runtime.acceptance_record import AcceptanceRecord
from speccompile.runtime.arm_costs import PLAIN, TRIAL_TOKENS, Bucket, Trial
from speccompile.runtime.planner import StepTimes
from speccompile.runtime.slots import Slot, Step

LENGTHS = (1, 2, 3, 4, 6, 8)  # of chains
ALLOWANCE = 0.0075  # of the tokens, for trials
CATCH_UP_STEPS = 2.0  # what it costs drafts to read what plain steps made them miss, for a trial's price
UNSEEN = 0.03  # what drafts cost that no step shows, as a share of all: prompts are read for them as well
MARGIN = 1.01  # a change must promise so much
DECIDE_EVERY = 16  # steps between decisions while nobody joins or leaves
PLAIN_DOUBT = 0.15  # from there on plain decoding is tried again, however bad it was
DEBT_STEPS = 150  # after which plain decoding may be tried whatever is left of the allowance
RICH_DOUBT = 0.15  # from there on any arm is, where there is nothing else to spend the allowance on
OWN_MEMORY = 0.995  # weight of the past, after a step, in what the method's own policy brings
OPTIMISM = 1.05  # of the tokens of an arm that was not tried


def bucket_of(batch: int) -> int:
    """Batch sizes that are looked at together, by the largest of them: 1 to 8, then in steps of about a third."""
    top = 8
    if batch <= top:
        return batch
    while top < batch:
        top += max(top // 3, 1)
    return top


class Controller:
    """See `speccompile.runtime.planner.Planner`.

    Args:
        max_drafts: most draft tokens of a chain that the engine can score.
    """

    def __init__(self, max_drafts: int) -> None:
        self.arms: tuple[int | None, ...] = (PLAIN, *(k for k in LENGTHS if k <= max_drafts), None)
        self.record = AcceptanceRecord(max((k for k in LENGTHS if k <= max_drafts), default=0))
        self.buckets: dict[tuple[int, bool], Bucket] = {}  # by batch size, and whether some must draft in any case
        self._key: tuple[int, bool] | None = None  # of the step at hand; None: nobody leaves the decision to us
        self._arm: int | None = PLAIN  # of that step
        self._left = 0  # steps to the next decision
        self._batch = 0

    def plan(self, slots: Sequence[Slot]) -> int | None:
        """See `Planner.plan`."""
        asked = {slot.speculation for slot in slots}
        self._key = None
        if "auto" not in asked:
            return None
        batch = len(slots)
        self._key = key = (bucket_of(batch), "on" in asked)
        bucket = self.buckets.get(key) or self.buckets.setdefault(key, Bucket(batch))
        bucket.batch = batch
        if bucket.trial is None and (batch != self._batch or self._left <= 0):
            self._batch, self._left = batch, DECIDE_EVERY
            self._decide(bucket, slots)
        self._left -= 1
        self._arm = bucket.used if bucket.trial is None else bucket.trial.turn
        return self._arm

    def _decide(self, bucket: Bucket, slots: Sequence[Slot]) -> None:
        """Go over to the best arm that is known, and try one that may be better if that can be paid."""
        tokens = self._tokens(bucket, slots)
        tokens[PLAIN] *= 1 + UNSEEN
        known = {arm: tokens[arm] / bucket.ratio_of(arm) for arm in bucket.costs}
        best = max(known, key=known.__getitem__)
        if known[best] > MARGIN * known[bucket.used]:
            bucket.used = best
        top = known[bucket.used]
        for arm in self._candidates(bucket, tokens, top):
            trial = Trial(arm, bucket.used, len(slots), arm not in bucket.costs)
            catch_up = CATCH_UP_STEPS if bucket.used == PLAIN else 0.0
            a_step = max(bucket.ratio_of(arm) * (1.0 if arm in bucket.costs else 1.2) * top - tokens[arm], 0.0)
            trial.price = len(slots) * ((trial.num_cold + trial.left / 2) * a_step + catch_up * top)
            # A debt must not keep us from what we shall never be slower than.
            is_due = arm == PLAIN and bucket.num_steps - bucket.last_trial > DEBT_STEPS
            if bucket.num_level and (trial.price <= bucket.allowance or is_due):
                bucket.trial = trial
                return

    def _candidates(self, bucket: Bucket, tokens: dict[int | None, float], top: float) -> list[int | None]:
        """Arms that may be better than the one in use: first those that were never tried, the shortest of them."""
        new: list[int | None] = []
        old: list[tuple[float, int | None]] = []
        is_rich = bucket.allowance >= bucket.credit
        for arm in self.arms:
            hope = tokens[arm] / bucket.ratio_of(arm)
            if arm == bucket.used:
                continue
            if arm in bucket.costs:
                doubt = bucket.doubt_of(arm)
                hope *= 1 + doubt
                # Never slower than plain for long; and what may be spent and is not needed looks for what has changed.
                if hope > top or (arm == PLAIN and doubt > PLAIN_DOUBT) or (is_rich and doubt > RICH_DOUBT):
                    old.append((-hope, arm))
            elif OPTIMISM * hope > top:
                new.append(arm)
        return [*new[:1], *(arm for _, arm in sorted(old, key=lambda pair: pair[0]))]

    def _tokens(self, bucket: Bucket, slots: Sequence[Slot]) -> dict[int | None, float]:
        """Tokens that a sequence is expected to gain in a step, by arm."""
        gains = self.record.expected([slot.stats for slot in slots])
        tokens: dict[int | None, float] = {k: gains[k] for k in self.arms if k is not None}
        guess = max(tokens.values())
        tokens[None] = bucket.own_tokens / bucket.num_own if bucket.num_own >= TRIAL_TOKENS / 2 else guess
        return tokens

    def observe(self, slots: Sequence[Slot], steps: Sequence[Step], nodes: int, times: StepTimes) -> None:
        """See `Planner.observe`."""
        if self._key is None:
            return
        arm, batch, step_s, bucket = self._arm, len(slots), times.step_s, self.buckets[self._key]
        num_tokens = sum(len(step.tokens) for step in steps)
        bucket.num_steps += 1
        bucket.num_tokens += num_tokens
        bucket.steps_by_arm[arm] = bucket.steps_by_arm.get(arm, 0) + 1
        bucket.allowance = min(bucket.allowance + ALLOWANCE * num_tokens, bucket.credit)
        if arm is None:
            bucket.own_tokens = OWN_MEMORY * bucket.own_tokens + sum(1 + step.num_accepted for step in steps)
            bucket.num_own = OWN_MEMORY * bucket.num_own + batch
        elif arm > 0:
            self.record.learn(arm, steps)
        trial = bucket.trial
        if trial is None or arm == trial.used:
            bucket.learn_level(arm, step_s)
        else:
            lost = max(bucket.num_tokens / bucket.num_steps * step_s / bucket.level_s - num_tokens, 0.0)
            bucket.allowance -= lost
            bucket.num_lost += lost
            trial.lost += lost
        if trial is not None:
            trial.observe(step_s)
            if trial.is_over:
                bucket.learn_trial(trial)
                bucket.trial, self._left = None, 0

    def expects_drafts(self, num_active: int) -> bool:
        """See `Planner.expects_drafts`."""
        bucket = self.buckets.get((bucket_of(num_active), False))
        return bucket is None or bucket.used != PLAIN

    def decisions(self) -> dict[str, Any]:
        """By batch size: the arm in use, what each is expected to give, how often each was used.

        Sizes are the largest of those that are looked at together. `tokens_per_s_by_arm` is of all requests so far, at
        the batch size and the speed of the latest step.
        """
        return {
            f"{size}, some forced" if is_forced else str(size): self._json_from_bucket(bucket)
            for (size, is_forced), bucket in sorted(self.buckets.items())
        }

    def _json_from_bucket(self, bucket: Bucket) -> dict[str, Any]:
        tokens, total = self._tokens(bucket, ()), max(bucket.num_steps, 1)
        level = bucket.level_s
        return {
            "arm": _name(bucket.used),
            "num_steps": bucket.num_steps,
            "plain_step_ms": level * bucket.ratio_of(PLAIN) * 1e3,
            "tokens_per_s_by_arm": {
                _name(arm): bucket.batch * tokens[arm] / (level * bucket.ratio_of(arm))
                for arm in self.arms
                if level and arm in bucket.costs
            },
            "cost_by_arm": {
                _name(arm): bucket.ratio_of(arm) / bucket.ratio_of(PLAIN) for arm in self.arms if arm in bucket.costs
            },
            "share_of_steps_by_arm": {_name(arm): num / total for arm, num in bucket.steps_by_arm.items()},
            "share_lost_to_trials": bucket.num_lost / max(bucket.num_tokens, 1),
        }


def _name(arm: int | None) -> str:
    return "own policy" if arm is None else "plain" if arm == PLAIN else str(arm)
