# SPDX-License-Identifier: Apache-2.0
"""Falls back to one thread where other processes hold the cores.

The threads of a step wait for each other. Where another process holds the core of one of them, all wait until it is
scheduled again, several times in a step: with both cores of a machine taken, a step of 2.4 ms was measured to take
39 ms on two threads. One thread waits for nobody. So where most steps take several times their recorded time, the two
numbers of threads are compared, a few steps each, and the faster one stays until the next comparison.

Decisions use measured times, but no number depends on them: the number of threads changes no order of summation.
"""

from __future__ import annotations

import logging
from statistics import median

from speccompile.core.jobs import StepCosts

_log = logging.getLogger(__name__)

SLOW = 3.0  # times the recorded time, in the median of a turn: other work makes steps so long, other inputs do not
TURN = 16  # steps looked at together
HOLD = 512  # steps with one thread before the next comparison
PAUSE = 4096  # steps with all threads after a comparison that they won


class Crowding:
    """Chooses between all threads and one, step by step.

    Args:
        costs: recorded times of steps with all threads, by nodes; not empty.
        name: of the graph, for the log.
    """

    def __init__(self, costs: StepCosts, name: str) -> None:
        self._costs, self._name = costs, name
        self.is_single = False  # the next step has one thread
        self._ratios: list[float] = []  # of this turn: time / recorded time
        self._other: float | None = None  # typical ratio of the other number of threads; None: not comparing
        self._left = TURN  # steps until the turn ends

    def observe(self, num_nodes: int, step_s: float) -> None:
        """Notes a step's time, and decides about the next one.

        Args:
            num_nodes: of all sequences together.
            step_s: seconds that it took.
        """
        self._left -= 1
        if self._left >= TURN:
            return
        self._ratios.append(step_s * 1e3 / self._costs.ms(num_nodes))
        if self._left > 0:
            return
        typical, self._ratios, self._left = median(self._ratios), [], TURN
        if self._other is not None:
            self._end_comparison(typical, self._other)
        elif self.is_single or typical > SLOW:
            self._other, self.is_single = typical, not self.is_single

    def _end_comparison(self, typical: float, other: float) -> None:
        if typical > other:
            self.is_single = not self.is_single
        else:
            threads = "one thread" if self.is_single else "all threads"
            text = "%s: steps take %.1f times as long as recorded, and %.1f times on %s, which it uses now"
            _log.info(text, self._name, other, typical, threads)
        self._other, self._left = None, HOLD if self.is_single else PAUSE
