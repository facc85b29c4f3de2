# SPDX-License-Identifier: Apache-2.0
"""Chooses how far to draft, by batch size, from what steps were seen to cost and drafts to bring.

An arm is a decision: plain (0), chains of 1, 2, 3 ... tokens, or the method's own policy (None). What an arm is worth
is tokens per second: what it brings over what it costs.

What it brings is told by how many drafts were kept at each depth, which does not depend on the batch: all batch sizes
learn it together, and each request moves it by its own record. What it costs is measured, by batch size. Loads come
and go on a machine, so costs are ratios: an arm is tried in turn with the one in use, step by step, and the ratio of
their times is kept; what is common to all arms moves the level of the batch size alone.

Whether a trial is worth it is asked of what is known: the gain that is expected of it (an arm that turns out better is
used for a while) must be above its price, the tokens that it is expected to lose; and prices are paid from an allowance
that grows by `ALLOWANCE` of what is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from speccompile.runtime.acceptance_record import AcceptanceRecord
from speccompile.runtime.arm_costs import LEAST_DOUBT, OWN_LENGTH, PLAIN, TRIAL_TOKENS, Bucket, Trial
from speccompile.runtime.planner import StepTimes
from speccompile.runtime.slots import Slot, Step

LENGTHS = (1, 2, 3, 4, 6, 8)  # of chains
ALLOWANCE = 0.003  # of the tokens, for trials
HORIZON = 700  # steps that a trial's result is taken to be of use for
MARGIN = 1.01  # a change must promise so much
DECIDE_EVERY = 16  # steps between decisions at about the same batch size
TRIAL_STEPS = 1.0  # plain steps that any trial costs, if only by what changes of shape do to memory
TOKENS_DOUBT = 0.02  # of what drafts bring, as a share of it
CLEAR = 3.0  # standard errors that end a trial early
PLAIN_EVERY = 1000  # steps after which plain decoding is tried in any case
DEBT_STEPS = 400  # after which plain decoding may be tried whatever is left of the allowance
RICH_DOUBT = 0.05  # from there on arms are tried where there is nothing else to spend the allowance on
OWN_SPREAD = 1.2  # tokens that a step of a sequence brings: their standard deviation under the method's own policy
OWN_MEMORY = 0.995  # weight of the past, after a step, in what the method's own policy brings
READING_MEMORY = 0.998  # the same of a token that was decoded, in how much is read for each


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
        self.reading = Reading()
        self.buckets: dict[tuple[int, bool], Bucket] = {}  # by batch size, and whether some must draft in any case
        self._key: tuple[int, bool] | None = None  # of the step at hand; None: nobody leaves the decision to us
        self._arm: int | None = PLAIN  # of that step
        self._left = 0  # steps to the next decision
        self._decided: tuple[int, bool] | None = None  # whose decision was the latest
        self._num_plain = 0  # steps until now that drafts have not read
        self._tokens_by_arm: dict[int | None, float] = {}  # of the latest decision

    def plan(self, slots: Sequence[Slot]) -> int | None:
        """See `Planner.plan`."""
        asked = {slot.speculation for slot in slots}
        self._key = None
        if "auto" not in asked:
            return None
        batch = len(slots)
        self._key = key = (bucket_of(batch), "on" in asked)
        bucket = self.buckets.get(key) or self.buckets.setdefault(key, Bucket(self.arms, batch))
        bucket.batch = batch
        if bucket.trial is None and (key != self._decided or self._left <= 0):
            self._decided, self._left = key, DECIDE_EVERY
            self._decide(bucket, slots)
        self._left -= 1
        self._arm = bucket.used if bucket.trial is None else bucket.trial.turn
        return self._arm

    def _decide(self, bucket: Bucket, slots: Sequence[Slot]) -> None:
        """Go over to the best arm that is known, and try the one that is most worth it if that can be paid."""
        bucket.age()
        self._tokens_by_arm, ratios = self._tokens(bucket, slots), bucket.costs.ratios()
        rates = {arm: tokens / ratios[arm] for arm, tokens in self._tokens_by_arm.items()}  # in a plain step's time
        known = {arm: rates[arm] for arm in bucket.costs.tried}
        best = max(known, key=known.__getitem__)
        waits = self._waits(bucket, known) and (best == PLAIN) != (bucket.used == PLAIN)
        if known[best] > MARGIN * known[bucket.used] and not waits:
            if (best == PLAIN) != (bucket.used == PLAIN):
                bucket.forgone = 0.0
            bucket.used = best
            bucket.recent_s.clear()
        if bucket.num_level == 0:
            return
        # A debt must not keep us from what we shall never be slower than.
        is_due = bucket.num_steps - bucket.last_trial > DEBT_STEPS
        if bucket.allowance < bucket.batch * TRIAL_STEPS * rates[bucket.used] and not is_due:
            return  # no trial is as cheap
        trials = [self._trial(bucket, rates, arm) for arm in self.arms if arm != bucket.used]
        trials = [trial for trial in trials if trial.price <= bucket.allowance or (trial.arm == PLAIN and is_due)]
        if not trials:
            return
        doubts, is_rich = self._doubts(bucket), bucket.allowance >= bucket.credit
        worths = [(self._worth(bucket, rates, trial, doubts[trial.arm]), trial) for trial in trials]
        for worth, trial in sorted(worths, key=lambda pair: -pair[0]):
            # What may be spent and is not needed looks for what has changed. Slow steps may be the machine's doing, or
            # the drafts', and beliefs may be wrong: plain decoding tells.
            is_open = is_rich and doubts[trial.arm] > RICH_DOUBT
            is_late = bucket.is_moved or bucket.num_steps - bucket.last_plain > PLAIN_EVERY
            is_open = is_open or (trial.arm == PLAIN and is_late)
            if worth > 0 or is_open:
                bucket.trial = trial
                return

    def _waits(self, bucket: Bucket, known: dict[int | None, float]) -> bool:
        """Whether things stay as they are between plain decoding and drafts, as drafts must read what they miss.

        They do until that has lost as much as a catch-up costs, half as much where plain decoding is better: so what
        changes cost is no more than what they gain (the rule of the ski rental).
        """
        num, bucket.decided_at = bucket.num_steps - bucket.decided_at, bucket.num_steps
        is_plain = bucket.used == PLAIN
        other = max((rate for arm, rate in known.items() if (arm == PLAIN) != is_plain), default=0.0)
        bucket.forgone = max(bucket.forgone + (other / known[bucket.used] - 1) * num, 0.0)
        return bucket.forgone < (bucket.catch_up if is_plain else bucket.catch_up / 2)

    def _trial(self, bucket: Bucket, rates: dict[int | None, float], arm: int | None) -> Trial:
        """With the tokens that it is expected to lose."""
        used = bucket.used
        trial = Trial(arm, used, bucket.batch, arm not in bucket.costs.tried, bucket.recent_s)
        behind = bucket.costs.ratio(arm) * max(rates[used] - rates[arm], 0.0)
        catch_up = TRIAL_STEPS
        if trial.skips:
            catch_up += trial.num_turns * bucket.comeback
            if used == PLAIN:
                catch_up += bucket.catch_up - bucket.comeback
        trial.price = bucket.batch * ((trial.num_cold + trial.left / 2) * behind + catch_up * rates[used])
        return trial

    def _worth(self, bucket: Bucket, rates: dict[int | None, float], trial: Trial, doubt: float) -> float:
        """Tokens that a trial is expected to gain, less its price.

        What it may gain is the expected improvement: if the arm looks better than the one in use afterwards, it is used
        (the knowledge gradient, Frazier et al. 2008, for one trial).
        """
        ahead = math.log(rates[trial.arm] / rates[trial.used])
        told = doubt**2 / math.hypot(doubt, LEAST_DOUBT)  # standard deviation of what the trial will make of it
        z = ahead / told
        improvement = told * math.exp(-z * z / 2) / math.sqrt(2 * math.pi) + ahead * math.erfc(-z / math.sqrt(2)) / 2
        return HORIZON * bucket.batch * improvement * self._tokens_by_arm[trial.used] - trial.price

    def _doubts(self, bucket: Bucket) -> dict[int | None, float]:
        """How far each arm may be from the one in use otherwise than believed: logarithms of tokens per second."""
        used = bucket.used
        doubts, own = bucket.costs.doubts(used), _own_error(bucket) / self._tokens_by_arm[None]
        return {
            arm: max(math.hypot(doubt, own) if None in (arm, used) else doubt, 1e-3) for arm, doubt in doubts.items()
        }

    def _tokens(self, bucket: Bucket, slots: Sequence[Slot]) -> dict[int | None, float]:
        """Tokens that a sequence is expected to gain in a step, by arm."""
        gains = self.record.expected([slot.stats for slot in slots])
        tokens: dict[int | None, float] = {k: gains[k] for k in self.arms if k is not None}
        tokens[None] = gains[min(OWN_LENGTH, max(gains))]
        if bucket.num_own >= TRIAL_TOKENS / 2:  # less what may have been luck: it is not to be chosen for that
            tokens[None] = max(bucket.own_tokens / bucket.num_own - _own_error(bucket), 1.0)
        # What no step shows: prompts are read for the drafts as well.
        tokens[PLAIN] *= 1 + self.reading.draft_s_per_token * bucket.batch / bucket.level_s if bucket.level_s else 1.0
        return tokens

    def observe(self, slots: Sequence[Slot], steps: Sequence[Step], nodes: int, times: StepTimes) -> None:
        """See `Planner.observe`."""
        num_tokens = sum(len(step.tokens) for step in steps)
        self.reading.count(num_tokens)
        if self._key is None:
            return
        arm, batch, step_s, bucket = self._arm, len(slots), times.step_s, self.buckets[self._key]
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
        if arm != PLAIN and self._num_plain:
            bucket.learn_catch_up(arm, step_s, self._num_plain)
        elif trial is None or arm == trial.used:
            bucket.learn_level(arm, step_s)
            bucket.recent_s.append(step_s)
        self._num_plain = self._num_plain + 1 if arm == PLAIN else 0
        if trial is not None:
            self._observe_trial(bucket, trial, step_s, batch)

    def _observe_trial(self, bucket: Bucket, trial: Trial, step_s: float, batch: int) -> None:
        """A step of either arm; the last of the trial, perhaps."""
        level_s, tokens = max(bucket.level_s, 1e-9), self._tokens_by_arm
        turn = trial.turn
        if turn != trial.used or (trial.is_first and trial.skips):
            # What the arm in use would have given in that time, less what this step is expected to give.
            gains = tokens[trial.used] / bucket.costs.ratio(trial.used)
            trial.lost += batch * (step_s / level_s * gains - tokens[turn])
        trial.observe(step_s)
        if trial.left == 0 or (trial.may_end and self._is_clear(bucket, trial)):
            bucket.learn_trial(trial)
            self._left = 0

    def _is_clear(self, bucket: Bucket, trial: Trial) -> bool:
        """Whether it is known by now which of the two is better."""
        ratio, doubt = trial.ratio()
        tokens = self._tokens_by_arm
        ahead = math.log(tokens[trial.arm] / tokens[trial.used] / ratio)
        clear = CLEAR * math.hypot(doubt, TOKENS_DOUBT)
        return ahead < -clear or (ahead > clear and trial.is_paired)  # what seems good is to stand a comparison

    def read(self, num_tokens: int, draft_s: float | None) -> None:
        """See `Planner.read`."""
        self.reading.learn(num_tokens, draft_s)

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
        tokens, total, ratios = self._tokens(bucket, ()), max(bucket.num_steps, 1), bucket.costs.ratios()
        level, tried = bucket.level_s, [arm for arm in self.arms if arm in bucket.costs.tried]
        return {
            "arm": _name(bucket.used),
            "num_steps": bucket.num_steps,
            "plain_step_ms": level * 1e3,
            "tokens_per_s_by_arm": {
                _name(arm): bucket.batch * tokens[arm] / (level * ratios[arm]) for arm in tried if level
            },
            "cost_by_arm": {_name(arm): ratios[arm] for arm in tried},
            "share_of_steps_by_arm": {_name(arm): num / total for arm, num in bucket.steps_by_arm.items()},
            "share_lost_to_trials": bucket.num_lost / max(bucket.num_tokens, 1),
        }


class Reading:
    """What prompts cost that are read for the drafts as well, for each token that is decoded."""

    def __init__(self) -> None:
        self._num_decoded = self._num_read = 0.0  # tokens; the past fades
        self._num_timed = self._timed_s = 0.0  # tokens that were read for the drafts, and how long that took

    def learn(self, num_tokens: int, draft_s: float | None) -> None:
        """Tokens of a prompt were read, and for the drafts too where `draft_s` is not None."""
        self._num_read += num_tokens
        if draft_s is not None:
            self._num_timed += num_tokens
            self._timed_s += draft_s

    def count(self, num_tokens: int) -> None:
        """Tokens were decoded."""
        fade = READING_MEMORY**num_tokens
        self._num_decoded = fade * self._num_decoded + num_tokens
        self._num_read *= fade

    @property
    def draft_s_per_token(self) -> float:
        """Seconds of reading for the drafts, for each token that is decoded."""
        if not self._num_timed or not self._num_decoded:
            return 0.0
        return self._num_read / self._num_decoded * self._timed_s / self._num_timed


def _own_error(bucket: Bucket) -> float:
    """Standard error of the tokens that the method's own policy was seen to bring."""
    return OWN_SPREAD / math.sqrt(max(bucket.num_own, 1.0))


def _name(arm: int | None) -> str:
    return "own policy" if arm is None else "plain" if arm == PLAIN else str(arm)
