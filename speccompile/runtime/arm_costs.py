# SPDX-License-Identifier: Apache-2.0
"""What the arms of a controller cost at one batch size, and the trials that tell.

An arm is a decision how far to draft: 0 is plain decoding, a number above 0 is a length, None the method's own policy.
Costs are ratios, as loads come and go on a machine: an arm is tried in turn with the one in use, and what is common to
both moves the level that the ratios are of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev

PLAIN = 0
CREDIT_STEPS = 60.0  # a fresh batch size may lose so many plain steps at once: it knows nothing yet
CREDIT_BATCH = 8  # smaller batches as many tokens as this one: their trials are longer
LEVEL_STEPS = 20  # that the level of a batch size is the mean of
BLOCK = 4  # steps before it is the other arm's turn
TRIAL_PAIRS = 8  # steps of either arm, at least
TRIAL_TOKENS = 24  # sequences x steps that a trial looks at, at least
COLD_STEPS = 4  # of an arm that is tried for the first time, not looked at
LEAST_DOUBT = 0.02  # standard error of the ratio that a trial finds, as a share of it, whatever it looked like
FIRST_DOUBT = 0.06  # the same of a first trial: it is repeated where that could matter
LEVEL_DOUBT = 0.5  # what a ratio may change by when the level changes, as a share of that (in logarithms)
DRIFT = 0.05  # what a ratio may change by in 1000 steps, as a share of it


class Cost:
    """What a step of an arm costs, over the level of its batch size.

    Trials are noisy, and what they found grows old, the faster the more the level moves: a machine that is slower may
    be slower for one arm alone. Each trial is weighed with what was known by how sure either is.
    """

    __slots__ = ("_doubt", "_level_s", "_tried_at", "ratio")

    def __init__(self, ratio: float, doubt: float, now: int, level_s: float) -> None:
        self.ratio, self._doubt, self._tried_at, self._level_s = ratio, doubt, now, level_s

    def doubt(self, now: int, level_s: float) -> float:
        """Standard error of the ratio, as a share of it."""
        age, moved = math.sqrt((now - self._tried_at) / 1000), 0.0
        if level_s > 0 and self._level_s > 0:
            moved = math.log(level_s / self._level_s)
        return math.hypot(self._doubt, DRIFT * age, LEVEL_DOUBT * moved)

    def anchor(self, now: int, level_s: float) -> None:
        """It is what others were compared with: their ratios are right as far as its own is."""
        self._tried_at, self._level_s = now, level_s

    def learn(self, ratio: float, doubt: float, now: int, level_s: float) -> None:
        """Take in a trial."""
        before = self.doubt(now, level_s) ** 2
        weight = before / (before + doubt**2)
        self.ratio += weight * (ratio - self.ratio)
        self._doubt, self._tried_at, self._level_s = math.sqrt(weight) * doubt, now, level_s


class Trial:
    """An arm that is tried in turn with the one in use, a few steps of either at a time."""

    __slots__ = ("arm", "left", "lost", "num_cold", "price", "skips", "step_s", "used", "used_s")

    def __init__(self, arm: int | None, used: int | None, batch: int, is_new: bool) -> None:
        self.arm, self.used = arm, used
        self.price = self.lost = 0.0  # tokens: expected, and lost
        self.num_cold = COLD_STEPS if is_new else 0  # memory is laid out for shapes that were not seen before
        pairs = max(TRIAL_PAIRS, -(-TRIAL_TOKENS // batch))
        self.left = 2 * BLOCK * -(-pairs // BLOCK)  # steps
        self.step_s: list[float] = []
        self.used_s: list[float] = []
        self.skips = PLAIN in (arm, used)  # drafts read what plain steps made them miss when they go on

    @property
    def is_over(self) -> bool:
        """Whether all steps were made, or it is far dearer than it was thought to be and that is clear by now."""
        is_clear = min(len(self.step_s), len(self.used_s)) >= 3
        return self.left == 0 or (is_clear and self.lost > 2 * self.price)

    @property
    def turn(self) -> int | None:
        """The arm of the next step."""
        if self.num_cold:
            return self.arm
        return self.arm if (self.left - 1) // BLOCK % 2 else self.used

    def observe(self, step_s: float) -> None:
        """A step of `turn`."""
        if self.num_cold:
            self.num_cold -= 1
            return
        is_first = self.left % BLOCK == 0
        self.left -= 1
        if not (is_first and self.skips):
            (self.step_s if (self.left // BLOCK) % 2 else self.used_s).append(step_s)

    def ratio(self) -> tuple[float, float]:
        """Of the times of the two, and its standard error as a share of it."""
        varies = None in (self.arm, self.used)
        (tried, tried_error), (used, used_error) = _typical(self.step_s, varies), _typical(self.used_s, varies)
        return tried / used, max(math.hypot(tried_error, used_error), LEAST_DOUBT)


def _typical(values: Sequence[float], varies: bool) -> tuple[float, float]:
    """A mean, and its relative error. Other processes make some steps long, never one short.

    Args:
        values: at least two.
        varies: steps differ by themselves, as with a policy that drafts now more, now less: all of them count, but for
            what is out of all proportion. Otherwise the shorter half does.
    """
    most = 2 * median(values)
    kept = [min(value, most) for value in values] if varies else sorted(values)[: max(len(values) // 2, 2)]
    return fmean(kept), (1 if varies else 2) * stdev(kept) / fmean(kept) / math.sqrt(len(kept))


class Bucket:
    """What is known of a batch size."""

    def __init__(self, batch: int) -> None:
        self.batch = batch  # of the latest step
        self.used: int | None = PLAIN
        self.costs: dict[int | None, Cost] = {PLAIN: Cost(1.0, 0.0, 0, 0.0)}  # of arms that were tried
        self.level_s = 0.0  # seconds that the ratios are of
        self.own_tokens = 0.0  # of a sequence and step, under the method's own policy, times their weight
        self.num_own = 0.0
        self.allowance = self.credit  # tokens
        self.trial: Trial | None = None
        self.last_trial = 0  # step when one ended
        self.num_steps = self.num_tokens = self.num_level = 0
        self.num_lost = 0.0  # tokens, to trials
        self.steps_by_arm: dict[int | None, int] = {}

    @property
    def credit(self) -> float:
        """Tokens that trials may lose at once."""
        return CREDIT_STEPS * max(self.batch, CREDIT_BATCH)

    def ratio_of(self, arm: int | None) -> float:
        """What it costs; of an arm that was not tried, the least that it may cost."""
        if arm in self.costs:
            return self.costs[arm].ratio
        plain = self.costs[PLAIN].ratio
        shorter = sorted((k, cost.ratio) for k, cost in self.costs.items() if k is not None and k < (arm or 0))
        if len(shorter) < 2 or arm is None:
            return plain
        (before, before_ratio), (length, ratio) = shorter[-2:]
        slope = max(ratio - before_ratio, 0.0) / (length - before)
        return max(ratio + (arm - length) * slope / 2, plain)  # half: it may have been a leap, and they are rare

    def doubt_of(self, arm: int | None) -> float:
        """Standard error of its cost over that of the arm in use, as a share of it."""
        now, level_s = self.num_steps, self.level_s
        return math.hypot(self.costs[arm].doubt(now, level_s), self.costs[self.used].doubt(now, level_s))

    def learn_level(self, arm: int | None, step_s: float) -> None:
        """A step of a known arm tells how fast the machine is now."""
        sample = step_s / self.ratio_of(arm)
        self.num_level += 1
        if self.num_level > LEVEL_STEPS:  # a step that was held up by others is no new level
            sample = min(sample, 1.5 * self.level_s)
        self.level_s += (sample - self.level_s) / min(self.num_level, LEVEL_STEPS)

    def learn_trial(self, trial: Trial) -> None:
        """Both arms had their steps."""
        ratio, doubt = trial.ratio()
        arm, now = trial.arm, self.num_steps
        self.last_trial = now
        ratio *= self.ratio_of(trial.used)
        self.costs[trial.used].anchor(now, self.level_s)
        if arm in self.costs:
            self.costs[arm].learn(ratio, doubt, now, self.level_s)
        else:
            self.costs[arm] = Cost(ratio, max(doubt, FIRST_DOUBT), now, self.level_s)
