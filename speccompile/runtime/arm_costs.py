# SPDX-License-Identifier: Apache-2.0
"""What the arms of a controller cost at one batch size, and the trials that tell.

An arm is a decision how far to draft: 0 is plain decoding, a number above 0 is a length, None the method's own policy.
Costs are ratios to plain decoding's, as loads come and go on a machine: an arm is tried in turn with the one in use,
and what is common to both moves the level of the batch size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

PLAIN = 0
# What is believed of a chain of k tokens before any trial: it costs 1 + LEAP + SLOPE k plain steps.
LEAP, LEAP_DOUBT = 0.25, 0.3  # more than one node: other kernels; the doubt is of the logarithm of the cost
SLOPE, SLOPE_DOUBT = 0.35, 1.0  # drafting a token and scoring it; the doubt is of the slope's logarithm
ARM_DOUBT = 0.12  # what each chain may differ from that by, for itself
OWN_LENGTH, OWN_DOUBT = 2, 0.3  # of the method's own policy: as a chain of so many, and the doubt
FIXED, FIXED_DOUBT = 0.5, 0.35  # share of what drafts cost besides that stays as it is when plain steps grow slower
LEAST_RATIO = 0.5  # no arm is believed to cost less plain steps
DRIFT = 0.02  # what a cost may change by in 1000 steps (in logarithms), half of it all arms together
LEVEL_MOVE = 0.3  # a level that has changed for good by so much (in logarithms) makes costs doubtful
LEVEL_DOUBT = 0.2  # namely by this share of it

CREDIT_STEPS = 40.0  # a fresh batch size may lose so many plain steps at once: it knows nothing yet
CREDIT_BATCH = 4  # smaller batches as many tokens as this one: their trials are longer
LEVEL_STEPS = 20  # that the level of a batch size is the mean of
STAY_STEPS = 300  # that a change must last to be one for good
BLOCK = 4  # steps before it is the other arm's turn, at least
TRIAL_PAIRS = 8  # steps of either arm, at least
TRIAL_TOKENS = 24  # sequences x steps that a trial looks at, at least
COLD_STEPS = 4  # of an arm that is tried for the first time, not looked at
LEAST_DOUBT = 0.12  # standard error of the ratio that a trial finds, as a share of it, whatever it looked like
UNPAIRED_DOUBT = 0.15  # the same before both had a turn of the trial: the machine may have changed in between
SURPRISE = 2.0  # standard errors from where on a trial says that something has changed
FIRST_CATCH_UP = 2.0  # plain steps that it takes drafts to read what they missed, before that was seen
FIRST_RETURN = 0.5  # the same after the few plain steps of a trial
CATCH_UP_WEIGHT = 0.5  # of the latest such time


class Costs:
    """What is known of the arms' costs over plain decoding's.

    A machine that is slow for plain decoding need not be as slow for drafts: where others take its memory's bandwidth,
    what drafts cost besides stays as many milliseconds as before; where they take its cores, it grows as all does. So
    at a level L (seconds of a plain step) an arm costs 1 + x (L / L0)^-g plain steps: x is its extra cost at a level L0
    of reference, and g, between 0 and 1, is common to all arms. ln(1 + x) of the arms and g have a normal distribution.
    A trial compares two arms at one level, so it moves all of it by their correlations: an extended Kalman filter whose
    state drifts.

    Args:
        arms: all there are, `PLAIN` the first.
    """

    def __init__(self, arms: Sequence[int | None]) -> None:
        self.index = {arm: i for i, arm in enumerate(arms)}
        lengths = np.array([OWN_LENGTH if arm is None else arm for arm in arms], dtype=np.float64)
        drafts = (lengths > 0).astype(np.float64)
        costs = 1 + LEAP * drafts + SLOPE * lengths
        slopes = SLOPE_DOUBT * SLOPE * lengths / costs
        own = np.array([OWN_DOUBT if arm is None else ARM_DOUBT for arm in arms]) * drafts
        size = len(arms)
        self._common = np.zeros((size + 1, size + 1))
        self._common[:size, :size] = np.outer(drafts, drafts)
        self._mean = np.append(np.log(costs), FIXED)
        self._cov = LEAP_DOUBT**2 * self._common
        self._cov[:size, :size] += np.outer(slopes, slopes) + np.diag(own**2)
        self._cov[size, size] = FIXED_DOUBT**2
        self._most = self._cov.diagonal()[:size].copy()
        self.tried: set[int | None] = {PLAIN}
        self.reference_s = 0.0  # L0; 0: as long as all levels are taken to be alike
        self._level_s = 0.0  # L

    def at(self, level_s: float) -> None:
        """What is asked and learnt from now on is at this level."""
        self._level_s = level_s

    @property
    def _level(self) -> float:
        """ln(L / L0)."""
        return math.log(self._level_s / self.reference_s) if self.reference_s and self._level_s else 0.0

    def ratio(self, arm: int | None) -> float:
        """What a step of an arm costs, in plain steps."""
        if arm == PLAIN:
            return 1.0
        share = math.exp(-float(self._mean[-1]) * self._level)
        return max(1 + math.expm1(float(self._mean[self.index[arm]])) * share, LEAST_RATIO)

    def ratios(self) -> dict[int | None, float]:
        """The same of all arms."""
        return dict(zip(self.index, self._ratios().tolist(), strict=True))

    def doubts(self, used: int | None) -> dict[int | None, float]:
        """Standard errors of the ratios of the arms' costs to that of the one in use, as shares of them."""
        slopes = self._slopes(used)
        variances: Vector = ((slopes @ self._cov) * slopes).sum(axis=1)
        return dict(zip(self.index, np.sqrt(np.maximum(variances, 0.0)).tolist(), strict=True))

    def _ratios(self) -> Vector:
        """[arms]."""
        share = math.exp(-float(self._mean[-1]) * self._level)
        ratios: Vector = np.maximum(1 + np.expm1(self._mean[:-1]) * share, LEAST_RATIO)
        return ratios

    def _slopes(self, used: int | None) -> Matrix:
        """[arms, arms + 1]: derivatives by the state, of the logarithms of the arms' costs over that of one of them."""
        level, ratios, size = self._level, self._ratios(), len(self.index)
        slopes = np.zeros((size, size + 1))
        share = math.exp(-float(self._mean[-1]) * level)
        slopes[1:, 1:].flat[:: size + 1] = (np.exp(self._mean[:-1]) * share / ratios)[1:]
        slopes[1:, -1] = (-level * (ratios - 1) / ratios)[1:]
        slopes -= slopes[self.index[used]].copy()
        return slopes

    def blur(self, doubt: float, share: float) -> None:
        """Costs have changed by so much, as it seems; nobody knows how. Never more doubt than in the beginning.

        Args:
            doubt: of the logarithms.
            share: of its square that is common to all arms that draft.
        """
        room = np.clip(self._most - self._cov.diagonal()[:-1], 0.0, None).max()
        amount = min(doubt**2, float(room))
        self._cov += amount * (share * self._common + (1 - share) * np.diag(self._common.diagonal()))

    def learn(self, arm: int | None, used: int | None, ratio: float, doubt: float) -> None:
        """Take in what a trial found.

        What nobody would have believed is believed by half, and makes all doubtful that was known: if it is found again
        it is believed.
        """
        slope = self._slopes(used)[self.index[arm]]
        found = math.log(ratio * self.ratio(used) / self.ratio(arm))
        variance = doubt**2
        surprise = found**2 / SURPRISE**2 - (float(slope @ self._cov @ slope) + variance)
        if surprise > 0:  # half of it is the trial's own: other processes came and went
            variance += surprise / 2
            self.blur(math.sqrt(surprise / 2), share=0.5)
            self._cov[-1, -1] = FIXED_DOUBT**2
        told = self._cov @ slope
        gain = told / (slope @ told + variance)
        self._mean += gain * found
        self._mean[-1] = min(max(self._mean[-1], 0.0), 1.0)
        self._cov -= np.outer(gain, told)
        self.tried.add(arm)


class Trial:
    """An arm that is tried in turn with the one in use, a few steps of either at a time.

    Both have at least two turns. They change seldom: drafts read what plain steps made them miss when they go on.

    Args:
        arm: to be tried.
        used: the one in use.
        batch: sequences.
        is_new: it was never tried.
        recent_s: seconds of the latest steps of the arm in use.
    """

    __slots__ = (
        "_last",
        "arm",
        "block",
        "has_begun",
        "left",
        "lost",
        "num_cold",
        "price",
        "skips",
        "step_s",
        "used",
        "used_s",
    )

    def __init__(
        self, arm: int | None, used: int | None, batch: int, is_new: bool, recent_s: Iterable[float] = ()
    ) -> None:
        self.arm, self.used = arm, used
        self.price = self.lost = 0.0  # tokens: expected to be lost, and lost
        self.num_cold = COLD_STEPS if is_new else 0  # memory is laid out for shapes that were not seen before
        pairs = max(TRIAL_PAIRS, -(-TRIAL_TOKENS // batch))
        self.block = max(BLOCK, -(-pairs // 2))
        self.left = 2 * self.block * -(-pairs // self.block)  # steps
        self._last = self.left - 2 * self.block  # steps that are left once both had a turn
        self.has_begun = False
        self.step_s: list[float] = []
        self.used_s = list(recent_s)
        self.skips = PLAIN in (arm, used)  # the first step of a turn, which is not like the others then

    @property
    def turn(self) -> int | None:
        """The arm of the next step."""
        if self.num_cold:
            return self.arm
        return self.arm if (self.left - 1) // self.block % 2 else self.used

    @property
    def is_first(self) -> bool:
        """Whether the next step is the first of a turn."""
        return not self.has_begun or (self.num_cold == 0 and self.left % self.block == 0)

    @property
    def num_turns(self) -> int:
        """Of each arm, to come."""
        return self.left // (2 * self.block)

    @property
    def is_paired(self) -> bool:
        """Whether both had a turn."""
        return self.left <= self._last

    @property
    def may_end(self) -> bool:
        """Whether enough was seen of both to look at it; every now and then."""
        num = min(len(self.step_s), len(self.used_s))
        return self.num_cold == 0 and self.left % BLOCK == 0 and num >= BLOCK - self.skips

    def observe(self, step_s: float) -> None:
        """A step of `turn`."""
        is_first, self.has_begun = self.is_first, True
        if self.num_cold:
            self.num_cold -= 1
            return
        self.left -= 1
        if not (is_first and self.skips):
            (self.step_s if (self.left // self.block) % 2 else self.used_s).append(step_s)

    def ratio(self) -> tuple[float, float]:
        """Of the times of the two, and its standard error as a share of it."""
        varies = None in (self.arm, self.used)
        (tried, tried_error), (used, used_error) = _typical(self.step_s, varies), _typical(self.used_s, varies)
        least = LEAST_DOUBT if self.is_paired else UNPAIRED_DOUBT
        return tried / used, max(math.hypot(tried_error, used_error), least)


def _typical(values: Sequence[float], varies: bool) -> tuple[float, float]:
    """A mean, and its relative error. Other processes make some steps long, never one short.

    Args:
        values: at least two.
        varies: steps differ by themselves, as with a policy that drafts now more, now less: all of them count, but for
            what is out of all proportion. Otherwise the shorter half does.
    """
    most = 2 * median(values)
    kept = [min(value, most) for value in values] if varies else sorted(values)[: max(len(values) // 2, 2)]
    mean = float(np.mean(kept))
    return mean, (1 if varies else 2) * float(np.std(kept, ddof=1)) / mean / math.sqrt(len(kept))


class Bucket:
    """What is known of a batch size.

    Args:
        arms: see `Costs`.
        batch: of the first step.
    """

    def __init__(self, arms: Sequence[int | None], batch: int) -> None:
        self.batch = batch  # of the latest step
        self.used: int | None = PLAIN
        self.costs = Costs(arms)
        self.recent_s = deque[float](maxlen=BLOCK)  # of the arm in use
        self.level_s = 0.0  # seconds of a plain step
        self._stay_s = 0.0  # the same over many steps
        self._known_s = 0.0  # what that was when costs were last made doubtful by it
        self.is_moved = False  # it has changed since plain decoding was compared with another arm
        self._aged = 0  # steps that drift was added for
        self.catch_up, self.comeback = FIRST_CATCH_UP, FIRST_RETURN  # plain steps
        self.forgone = 0.0  # steps that a change between plain decoding and drafts would have saved
        self.decided_at = 0  # step of the latest decision
        self.own_tokens = 0.0  # of a sequence and step, under the method's own policy, times their weight
        self.num_own = 0.0
        self.allowance = self.credit  # tokens
        self.trial: Trial | None = None
        self.last_trial = self.last_plain = 0  # steps when one ended, and one with plain decoding
        self.num_steps = self.num_tokens = self.num_level = 0
        self.num_lost = 0.0  # tokens, to trials
        self.steps_by_arm: dict[int | None, int] = {}

    @property
    def credit(self) -> float:
        """Tokens that trials may lose at once."""
        return CREDIT_STEPS * max(self.batch, CREDIT_BATCH)

    def learn_catch_up(self, arm: int | None, step_s: float, num_plain: int) -> None:
        """A step that drafts, the first after plain ones: what is too long of it went into what was missed."""
        if not self.level_s:
            return
        excess = max(step_s / self.level_s - self.costs.ratio(arm), 0.0)
        if num_plain <= TRIAL_TOKENS // 2:  # the longest turn of a trial
            self.comeback += CATCH_UP_WEIGHT * (excess - self.comeback)
        else:
            self.catch_up += CATCH_UP_WEIGHT * (excess - self.catch_up)

    def learn_level(self, arm: int | None, step_s: float) -> None:
        """A step of a known arm tells how fast the machine is now."""
        costs = self.costs
        sample = step_s / costs.ratio(arm)
        self.num_level += 1
        if self.num_level > LEVEL_STEPS:  # a step that was held up by others is no new level
            sample = min(sample, 1.5 * self.level_s)
        self.level_s += (sample - self.level_s) / min(self.num_level, LEVEL_STEPS)
        self._stay_s += (sample - self._stay_s) / min(self.num_level, STAY_STEPS)
        if self.num_level == LEVEL_STEPS:
            costs.reference_s = self.level_s
        costs.at(self.level_s)

    def age(self) -> None:
        """What was known has become older, and doubtful where the machine is another now."""
        self.costs.blur(DRIFT * math.sqrt((self.num_steps - self._aged) / 1000), share=0.5)
        self._aged = self.num_steps
        if self.num_level < STAY_STEPS:
            return
        moved = abs(math.log(self._stay_s / self._known_s)) if self._known_s else 0.0
        if moved > LEVEL_MOVE or not self._known_s:
            self.is_moved = self._known_s > 0
            self._known_s = self._stay_s
            self.costs.blur(LEVEL_DOUBT * moved, share=1.0)

    def learn_trial(self, trial: Trial) -> None:
        """It has ended."""
        self.costs.learn(trial.arm, trial.used, *trial.ratio())
        lost = max(trial.lost, 0.0)
        self.num_lost += lost
        self.allowance -= lost
        self.last_trial, self.trial = self.num_steps, None
        self.recent_s.clear()  # they are not to tell twice
        if PLAIN in (trial.arm, trial.used):
            self.is_moved, self.last_plain = False, self.num_steps
