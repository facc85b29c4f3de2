# SPDX-License-Identifier: Apache-2.0
"""Falls back to one thread where other processes hold the cores.

The threads of a step wait for each other: with both cores of a machine taken, a step of 2.4 ms took 39 ms on two
threads. So where steps take a multiple of their recorded time for a while, the two numbers of threads take turns, and
the faster one stays until the next comparison. It changes no order of summation.
"""

from __future__ import annotations

import logging

from speccompile.core.jobs import StepCosts

_log = logging.getLogger(__name__)

SLOW = 2.0  # times the recorded time, over each of two turns: longer contexts and single interruptions stay below
TURN = 8  # steps whose times are summed
WARM_UP = 2  # steps after a change that do not count: the first ones read weights and pages that were not used before
NUM_TURNS = 4  # of a comparison, half of them with either number of threads
HOLD = 512  # steps with one thread before the next comparison
PAUSE = 4096  # steps with all threads after a comparison that they won


class Crowding:
    """Chooses between all threads and one, step by step, by recorded `costs` with all threads, by nodes."""

    def __init__(self, costs: StepCosts, name: str) -> None:
        self._costs, self._name = costs, name
        self.is_single = False  # the next step has one thread
        self._took_ms = self._recorded_ms = 0.0  # of this turn
        self._was_slow = False  # the turn before
        self._turns: list[float] = []  # time / recorded time of a comparison's turns, the other number's first
        self._is_comparing = False
        self._left = TURN  # steps until the turn ends

    def observe(self, num_nodes: int, step_s: float) -> None:
        """Notes a step's time, and decides about the next one. `step_s`: seconds that it took."""
        self._left -= 1
        if self._left >= TURN - WARM_UP * self._is_comparing:
            return
        self._took_ms += step_s * 1e3
        self._recorded_ms += self._costs.ms(num_nodes)
        if self._left > 0:
            return
        ratio = self._took_ms / self._recorded_ms
        self._took_ms, self._recorded_ms, self._left = 0.0, 0.0, TURN
        if self._is_comparing:
            self._turns.append(ratio)
            self.is_single = not self.is_single
            if len(self._turns) == NUM_TURNS:
                self._end_comparison()
        elif self.is_single or (ratio > SLOW and self._was_slow):
            self._is_comparing, self._was_slow, self.is_single = True, False, not self.is_single
        else:
            self._was_slow = ratio > SLOW

    def _end_comparison(self) -> None:
        other, same = (sum(self._turns[first::2]) / (NUM_TURNS // 2) for first in (0, 1))
        # A comparison ends with the number of threads that it began with: the other one has the next turn.
        self.is_single = self.is_single if other < same else not self.is_single
        if other < same:
            threads = "one thread" if self.is_single else "all threads"
            text = "%s: steps take %.1f times as long as recorded, and %.1f times on %s, which it uses now"
            _log.info(text, self._name, same, other, threads)
        self._is_comparing, self._turns = False, []
        self._left = HOLD if self.is_single else PAUSE
