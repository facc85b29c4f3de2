# SPDX-License-Identifier: Apache-2.0
"""What lookups would bring while drafts are off.

A lookup finds drafts in the text alone, so what it would have had accepted can be counted on the text that plain
decoding gives: its drafts are compared with the tokens that come, step after step that is not made, and each such step
costs what the measured costs say. Where that is clearly faster than plain decoding, drafts get another trial (see
`speccompile.runtime.comparison`); the trial decides, not the count.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from speccompile.core.protocols import TokenSequence
from speccompile.drafting.lookup import Lookup

LookUp = Callable[[TokenSequence, int, int], Lookup]

SHARE = 0.005  # of the time of plain steps that lookups may take
FIRST_STEPS = 4  # plain steps whose time they may take besides, at first
RUN = 8  # lookups that follow each other: one alone would mostly begin in the middle of what a lookup finds
MEMORY = 0.97  # per step that is not made, weight of the past
LEAST_STEPS = 16.0  # such steps before anything is said


class LookupWatch:
    """Counts on one sequence at a time, while drafts are off."""

    def __init__(self, look_up: LookUp, num_slots: int) -> None:
        self._look_up, self._num_slots = look_up, num_slots
        self._credit_s: float | None = None  # seconds that lookups may take now
        self._look_s = 0.0  # of the last lookup
        self._waits = False  # until there is time for a run of lookups
        self._sequence: TokenSequence | None = None
        self._length = 0  # of the sequence when it was last seen
        self._lookup: Lookup | None = None  # of the step that is being counted
        self._start = 0  # length of the sequence when that began
        self._tokens = self._cost = self._num = 0.0  # decaying sums: tokens, plain steps' time, steps

    @property
    def gain(self) -> float:
        """Tokens per time with lookups over those without; 0 as long as too little was counted."""
        return self._tokens / self._cost if self._num >= LEAST_STEPS else 0.0

    def forget(self) -> None:
        self._lookup, self._sequence = None, None
        self._tokens = self._cost = self._num = 0.0

    def observe(self, sequence: TokenSequence, seconds: float, num_steps: int) -> None:
        """Counts plain steps that have ended, one after the other."""
        step_s = seconds / num_steps
        if self._credit_s is None:
            self._credit_s = FIRST_STEPS * step_s
        tokens = sequence.tokens
        start = len(tokens) - num_steps
        if sequence is self._sequence:
            start = max(start, self._length)  # a step that fails gives no token
        if sequence is not self._sequence or start != self._length:
            self._sequence, self._lookup = sequence, None
        self._length = len(tokens)
        for length in range(start + 1, len(tokens) + 1):
            self._credit_s += SHARE * step_s
            if self._waits:
                if self._credit_s < RUN * self._look_s:
                    continue
                self._waits = False
            elif self._lookup is not None and self._goes_on(self._lookup, length, tokens[length - 1]):
                continue
            if self._credit_s < 0:
                self._waits, self._lookup = True, None
                continue
            start_s = perf_counter()
            self._lookup, self._start = self._look_up(sequence, length, self._num_slots), length
            self._look_s = perf_counter() - start_s
            self._credit_s -= self._look_s

    def _goes_on(self, lookup: Lookup, length: int, token: int) -> bool:
        num = length - self._start
        if num <= len(lookup.tokens) and lookup.tokens[num - 1] == token:
            return True
        self._tokens = MEMORY * self._tokens + num
        self._cost = MEMORY * self._cost + lookup.cost
        self._num = MEMORY * self._num + 1
        return False
