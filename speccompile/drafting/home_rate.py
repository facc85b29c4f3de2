# SPDX-License-Identifier: Apache-2.0
"""What drafts were worth of late in all sequences together: where a fresh one begins."""

from __future__ import annotations

SHARE = 0.02  # weight of one verdict
FIRST_WEIGHT = 10  # of the first guess, in verdicts: the first ones count for more
DRIFT = 5e-4  # towards the first guess in a step without drafts: what does not pay is tried again, but seldom


class HomeRate:
    """A rate that slots begin with, and drift back to while they do not draft.

    Only deterministic drafts may share one: their text does not depend on whether anything was drafted.

    Args:
        first: before anything is known.
    """

    __slots__ = ("_weight", "first", "value")

    def __init__(self, first: float) -> None:
        self.first = self.value = first
        self._weight = FIRST_WEIGHT

    def learn(self, rate: float) -> None:
        """Take in one verdict's rate."""
        self._weight += 1
        self.value += max(SHARE, 1 / self._weight) * (rate - self.value)

    def rest(self) -> None:
        """A step without drafts."""
        self.value += DRIFT * (self.first - self.value)
