# SPDX-License-Identifier: Apache-2.0
"""Measured gain of drafts over plain decoding at one batch size, for `speccompile.runtime.control`.

All steps of the way in use are measured. A turn of steps now and then takes the other way; the pause until the next one
is so long that turns cost at most `MAX_LOSS` of the time.
"""

from __future__ import annotations

import math
from copy import copy
from typing import Any

PLAIN, METHOD_DEFAULT = 0, None  # limits of a step: no drafts; as decided by the method's budget
# Steps of the other way: the mean of times with 10 % noise is right within 3 %. A turn of drafts ends early where it
# has lost the time of so many plain steps.
TURN = 12
MEMORY = 0.99  # weight of the past per step: means over 100 steps, as the machine's speed and the text change
MAX_STEP = 2.0  # times the mean: what a step takes longer, another process took
LEAST_GAIN = 1.02  # to switch drafts on: in doubt decoding is plain
MAX_LOSS = 0.005  # share of the time that turns may lose: drafts that do not pay leave 0.98 of plain decoding's speed
LEAST_PAUSE = 64  # steps between two turns: as many as the means remember
GROWTH = 8  # a pause has at most so many times the steps before it: what the first turns found may be wrong


class Comparison:
    """The comparison of one batch size; it begins as `smaller`, that of a smaller batch, or plainly."""

    def __init__(self, smaller: Comparison | None = None) -> None:
        self.is_on: bool = smaller is not None and smaller.is_on
        self.num_steps = self.num_plain = self._num_compared = 0
        self._in_use = _Mean()  # seconds of a step
        # Means per sequence over steps that the budget decides.
        self._tokens, self._drafts = _Mean(), _Mean()
        self._log_ratio: float | None = None  # log(time of a step with drafts / of a plain one)
        is_off = smaller is not None and not smaller.is_on
        self._left = TURN + (LEAST_PAUSE if is_off else TURN)  # steps until the next turn ends
        self._is_unconfirmed = self._is_probe = False
        self._begin_turn()

    @property
    def gain(self) -> float:
        """Tokens per second with drafts over those without; 1 before the first comparison."""
        if self._log_ratio is None or not self._tokens.num:
            return 1.0
        return self._tokens.mean / math.exp(self._log_ratio)

    @property
    def is_comparing(self) -> bool:
        """Whether the next step is of a turn."""
        return self._left <= TURN

    @property
    def expects_drafts(self) -> bool:
        """Whether drafts are in use, or soon needed for a turn."""
        return self.is_on or self._left <= 2 * TURN

    @property
    def next_limit(self) -> int | None:
        """The limit of the next step."""
        if self.is_on == self.is_comparing:
            return PLAIN
        return 1 if self._is_probe and self.is_comparing else METHOD_DEFAULT

    def observe(self, step_s: float, tokens: float, drafts: float, *, is_first: bool) -> None:
        """Updates the comparison with a step; `drafts` is the mean number of scored draft tokens per sequence.

        Args:
            is_first: the step before it went the other way: its time is that of no other step.
        """
        is_plain, is_comparing = self.next_limit == PLAIN, self.is_comparing
        self.num_steps += 1
        self.num_plain += is_plain
        self._left -= 1
        if not is_plain:
            self._tokens.add(tokens)
            self._drafts.add(drafts)
        if not is_first:
            (self._other if is_comparing else self._in_use).add(step_s, MAX_STEP)
        if is_comparing:
            self._spent_s += step_s
            self._brought += tokens
            self._num_drafts += drafts
            if self._left == 0 or (not self.is_on and self._has_lost()):
                self._compare()
        elif self.is_on and self._log_ratio is not None and self.gain < 1:
            self._left = min(self._left, TURN)  # drafts bring less than they did

    def _has_lost(self) -> bool:
        plain_s = self._in_use.mean if self._in_use.num else math.inf
        return self._other.num > 0 and self._spent_s - self._brought * plain_s > TURN * plain_s

    def _compare(self) -> None:
        """Decides which way to use after a turn, and how long."""
        if not (self._in_use.num and self._other.num):
            self._begin(LEAST_PAUSE)
            return
        self._num_compared += 1
        if not self.is_on and not self._num_drafts:
            # A budget that drafts nothing never measures what drafts cost at this batch size: the next turn does.
            self._tokens, self._drafts = self._before
            self._is_probe = True
            self._begin(LEAST_PAUSE)
            return
        self._is_probe = False
        used_s, other_s = self._in_use.mean, self._other.mean
        drafting_s, plain_s = (used_s, other_s) if self.is_on else (other_s, used_s)
        # A step with drafts does all that a plain one does: where it seems faster, the plain ones were held up.
        found, known = max(math.log(drafting_s / plain_s), 0.0), self._log_ratio
        self._log_ratio = found if known is None else (known + found) / 2
        is_worth = self._tokens.mean >= LEAST_GAIN and self.gain >= (1.0 if self.is_on else LEAST_GAIN)
        # Other processes may have disturbed a single turn: a change is confirmed by a second one.
        self._is_unconfirmed = is_worth != self.is_on and self._num_compared > 1 and not self._is_unconfirmed
        token_s = min(plain_s, drafting_s / self._tokens.mean)
        lost_s = max(self._spent_s - self._brought * token_s, 0.0)
        if self._is_unconfirmed:
            self._begin(2)
            return
        if is_worth != self.is_on:
            self.is_on, self._in_use = is_worth, self._other
        if not self.is_on:  # only turns tell what drafts bring: the latest counts as much as those before it
            self._tokens.limit(TURN)
            self._drafts.limit(TURN)
        pause = min(int(lost_s / MAX_LOSS / self._in_use.mean), GROWTH * self.num_steps)
        self._begin(max(pause, LEAST_PAUSE))

    def _begin(self, pause: int) -> None:
        self._left = pause + TURN
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._other = _Mean()  # seconds of a step
        self._before = copy(self._tokens), copy(self._drafts)
        self._spent_s = self._brought = self._num_drafts = 0.0  # seconds; tokens and drafts per sequence

    def wait(self, draft_s: float) -> None:
        """Adds the seconds in which a draft read a prompt, as all sequences need one for the next turn."""
        self._spent_s += draft_s

    @property
    def draft_token(self) -> tuple[float, float] | None:
        """Plain steps that a draft token costs, and the accepted share: n of them gain (1 + share n) / (1 + cost n)."""
        if self._log_ratio is None or not self._drafts.num or self._drafts.mean < 0.1:
            return None
        drafts = self._drafts.mean
        return (math.exp(self._log_ratio) - 1) / drafts, min(max((self._tokens.mean - 1) / drafts, 0.0), 1.0)

    def json_from_comparison(self) -> dict[str, Any]:
        """Returns a JSON-ready dict."""
        share = self.num_plain / max(self.num_steps, 1)
        cost, accepted = self.draft_token or (None, None)
        counts = {"num_steps": self.num_steps, "share_of_plain_steps": share, "num_compared": self._num_compared}
        numbers = {"gain": self.gain, "draft_token_cost": cost, "accepted_share": accepted}
        return {"drafts": self.is_on, **numbers, **counts}


class _Mean:
    """Decaying mean."""

    def __init__(self) -> None:
        self._sum = self.num = 0.0

    @property
    def mean(self) -> float:
        """Of at least one number."""
        return self._sum / self.num

    def limit(self, num: int) -> None:
        """Makes the past weigh as much as `num` numbers at most."""
        share = min(num / self.num, 1.0) if self.num else 1.0
        self._sum, self.num = share * self._sum, share * self.num

    def add(self, number: float, most: float = math.inf) -> None:
        """Adds a number; one of more than `most` times the mean counts as that."""
        if self.num:
            number = min(number, most * self.mean)
        self._sum = MEMORY * self._sum + number
        self.num = MEMORY * self.num + 1
