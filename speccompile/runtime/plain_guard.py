# SPDX-License-Identifier: Apache-2.0
"""Keeps offline decoding from being slower than plain decoding.

A method's own policy goes by step times that were measured at the build, one graph at a time; in the loop a step may
take longer. So the loop compares: a few steps without drafts are timed between steps with drafts, and where drafts do
not pay they stay off until the next comparison. Greedy text does not depend on drafts; where drafts are drawn it does,
and a clock must not decide over text, so such batches are left to the policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from speccompile.runtime.controller import bucket_of
from speccompile.runtime.planner import StepTimes, Unlimited
from speccompile.runtime.slots import Slot, Step

PLAIN, OWN = 0, None  # limits of `run_step`: no drafts; the method's own policy
TURN = 6  # steps of either kind in a comparison
SKIPPED = 1  # first steps of a turn that are not timed: shapes change, and a draft model catches up
MEMORY = 0.98  # weight of the past, after a step, in the tokens that a step with drafts brings
CLOSE = 1.15  # a gain between its inverse and this is compared again at once at the start, `NUM_FIRST` times in all
NUM_FIRST = 3
MAX_LOSS = 0.005  # of the tokens: what comparisons may lose, by the steps between them
LEAST_PAUSE, MAX_PAUSE = 256, 8192  # steps between comparisons
BELIEF = 0.5  # weight of a comparison in the ratio of step times


class PlainGuard(Unlimited):
    """See `speccompile.runtime.planner.Planner`; for batches whose text depends on no draft."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Comparison] = {}

    def plan(self, slots: Sequence[Slot]) -> int | None:
        """Returns 0 for a plain step, None for one as the method's own policy likes."""
        return self._at(len(slots)).plan()

    def observe(self, slots: Sequence[Slot], steps: Sequence[Step], nodes: int, times: StepTimes) -> None:
        """Learns from a step; `nodes` is not read."""
        accepted = sum(step.num_accepted for step in steps)
        self._at(len(slots)).observe(times.step_s, 1 + accepted / len(steps))

    def decisions(self) -> dict[str, Any]:
        """Returns by batch size what was decided and the gain that was last seen, tokens/s over plain tokens/s."""
        return {
            str(size): {"drafts": known.is_on, "gain": known.gain, "num_steps": known.num_steps}
            for size, known in sorted(self._sizes.items())
        }

    def _at(self, batch: int) -> _Comparison:
        size = bucket_of(batch)
        return self._sizes.get(size) or self._sizes.setdefault(size, _Comparison())


class _Comparison:
    """What is known at one batch size."""

    def __init__(self) -> None:
        self.is_on = True
        self.num_steps = 0
        self.tokens = 0.0  # a sequence gains in a step with drafts, faded sums
        self.num_drafting = 0.0
        self._log_ratio: float | None = None  # of the time of a step with drafts over that of a plain one
        self._num_pairs = 0
        self._left = 2 * TURN  # steps until the turns are compared; the first of them draft
        self._times: tuple[list[float], list[float]] = ([], [])  # of the turns with drafts, and without

    @property
    def gain(self) -> float:
        """Tokens per second with drafts over those without; 1 while nothing is known."""
        if self._log_ratio is None or not self.num_drafting:
            return 1.0
        return self.tokens / self.num_drafting / math.exp(self._log_ratio)

    def plan(self) -> int | None:
        if self._left > 2 * TURN:
            return OWN if self.is_on else PLAIN
        return OWN if self._left > TURN else PLAIN

    def observe(self, step_s: float, tokens: float) -> None:
        is_plain = self.plan() == PLAIN
        self.num_steps += 1
        if not is_plain:
            self.tokens = MEMORY * self.tokens + tokens
            self.num_drafting = MEMORY * self.num_drafting + 1
        if self._left <= 2 * TURN and (self._left - 1) % TURN < TURN - SKIPPED:
            self._times[is_plain].append(step_s)
        self._left -= 1
        if self._left == 0:
            self._compare()

    def _compare(self) -> None:
        drafting, plain = (_typical(times) for times in self._times)
        self._times = ([], [])
        found = math.log(drafting / plain) if drafting > 0 and plain > 0 else 0.0
        known = self._log_ratio
        self._log_ratio = found if known is None else known + BELIEF * (found - known)
        self._num_pairs += 1
        self.is_on = self.gain >= 1.0
        is_close = 1 / CLOSE < self.gain < CLOSE
        self._left = 2 * TURN + (0 if is_close and self._num_pairs < NUM_FIRST else self._pause())

    def _pause(self) -> int:
        """Returns steps to the next comparison: the turn of the slower way shall lose `MAX_LOSS` of the tokens.

        An early comparison may have met a disturbed machine: the pause is no longer than what was decoded so far.
        """
        ratio, gain = math.exp(self._log_ratio or 0.0), self.gain
        # In plain steps' time: what a turn of the slower way loses, and what a step of the faster one takes.
        lost, each = (TURN * (1 - 1 / gain), ratio) if self.is_on else (TURN * ratio * (1 - gain), 1.0)
        return int(min(max(lost / each / MAX_LOSS, LEAST_PAUSE), max(self.num_steps, LEAST_PAUSE), MAX_PAUSE))


def _typical(times: list[float]) -> float:
    """Returns the mean without the longest: other processes make some steps long, never one short."""
    kept = sorted(times)[: max(len(times) - 1, 1)]
    return sum(kept) / len(kept) if kept else 0.0
