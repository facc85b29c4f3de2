# SPDX-License-Identifier: Apache-2.0
"""How many drafts are kept at each depth: of all requests, and of each by its own record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from speccompile.runtime.slots import Step
from speccompile.runtime.stats import SlotStats

FIRST_RATE = 0.6  # of a draft behind a path that was kept, before anything is known
FIRST_WEIGHT = 20.0  # tries that it counts for
MEMORY = 0.9998  # weight of the past after a try
REQUEST_WEIGHT = 30.0  # drafts kept that all others count for in the record of one request
MAX_RATE = 0.98


class AcceptanceRecord:
    """Acceptance rates by depth.

    Args:
        max_depth: longest chain.
    """

    def __init__(self, max_depth: int) -> None:
        self._tried = [FIRST_WEIGHT] * max_depth
        self._kept = [FIRST_RATE * FIRST_WEIGHT] * max_depth

    @property
    def rates(self) -> list[float]:
        """[max_depth]: how often a draft is kept when those before it are."""
        return [kept / tried for kept, tried in zip(self._kept, self._tried, strict=True)]

    def learn(self, length: int, steps: Sequence[Step]) -> None:
        """Take in steps whose sequences drafted chains of `length` tokens; those that drafted fewer count as far."""
        tried, kept = [0] * (length + 1), [0] * (length + 1)  # sequences by the depth at which that ended
        for step in steps:
            num = min(step.num_draft_tokens, length)
            if num:
                # Drafts were tried as far as they were kept, and the one that was refused.
                tried[min(step.num_accepted + 1, num)] += 1
                kept[min(step.num_accepted, num)] += 1
        num_tried = num_kept = 0
        for depth in range(length, 0, -1):
            num_tried += tried[depth]
            num_kept += kept[depth]
            fade = MEMORY**num_tried
            self._tried[depth - 1] = fade * self._tried[depth - 1] + num_tried
            self._kept[depth - 1] = fade * self._kept[depth - 1] + num_kept

    def expected(self, requests: Sequence[SlotStats]) -> dict[int, float]:
        """Tokens that a sequence gains in a step, by the length of its chain, the mean of these requests.

        Args:
            requests: none: of all that have been.
        """
        rates = self.rates
        hoped = _sums_of_reach(rates)
        if not requests:
            return {length: 1 + hope for length, hope in enumerate(hoped)}
        sums = [0.0] * len(hoped)
        moments = _moments_of_reach(rates)
        for stats in requests:
            factor = _factor(stats, hoped, moments)
            own = _sums_of_reach([min(max(rate * factor, 0.01), MAX_RATE) for rate in rates])
            sums = [total + gain for total, gain in zip(sums, own, strict=True)]
        return {length: 1 + total / len(requests) for length, total in enumerate(sums)}


def _sums_of_reach(rates: Sequence[float]) -> list[float]:
    """[max_depth + 1]: drafts that are kept, of chains of 0, 1, 2, ... tokens."""
    return list(accumulate(accumulate(rates, mul), initial=0.0))


def _moments_of_reach(rates: Sequence[float]) -> list[float]:
    """[max_depth + 1]: derivatives of `_sums_of_reach` by the logarithm of a factor that all rates have in common."""
    reach = accumulate(rates, mul)
    return list(accumulate((depth * share for depth, share in enumerate(reach, 1)), initial=0.0))


def _factor(stats: SlotStats, hoped: list[float], moments: list[float]) -> float:
    """What the rates of a request are above all others', pulled towards 1.

    A path is as long as all its drafts are kept, so rates that are smaller by a factor keep fewer drafts by more than
    that: the share of the drafts that others would have kept is taken to the power that undoes it.
    """
    if not hoped[-1]:
        return 1.0
    kept = wanted = REQUEST_WEIGHT
    moment, last = REQUEST_WEIGHT * moments[-1] / hoped[-1], len(hoped) - 1
    for (depth, num_kept), num in stats.outcomes.items():
        at = min(depth, last)
        kept += num * num_kept
        wanted += num * hoped[at]
        moment += num * moments[at]
    return min(max(math.pow(kept / wanted, wanted / moment), 0.3), 1.8)
