# SPDX-License-Identifier: Apache-2.0
"""Measured gain of drafts over plain decoding at one batch size, for `speccompile.runtime.control`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from speccompile.core.protocols import TokenSequence
from speccompile.runtime.lookup_watch import LookupWatch

PLAIN, METHOD_DEFAULT = 0, None  # limits of a step: no drafts; as decided by the method's budget
PROBE_LENGTH = 1  # of chains that measure the cost of drafts where the budget drafts nothing
TURN = 6  # steps with drafts, and as many without, in a comparison
LONG_TURN = 24  # the same where the latest gain is `CLOSE`; only its second half is timed, when the caches have settled
MEMORY = 0.99  # per step, weight of the past in the tokens of a step with drafts
TIME_MEMORY = 0.95  # the same in the time of a step of the way in use: short, as the machine's speed changes
MAX_STEP = 2.0  # times the mean: other processes may hold up a step for longer, which does not count
CLOSE = 1.15  # a gain between its inverse and this is compared again at once, for the first `NUM_FIRST` comparisons
NUM_FIRST = 3
LEAST_DRAFTS = 0.1  # draft tokens a step, below which a step's cost is not that of its draft tokens
LEAST_GAIN = 1.02  # to switch drafts on: in doubt decoding is plain
TURN_LOSS = 8  # plain steps whose time a comparison's steps with drafts may lose while drafts are off: then they end
MAX_LOSS = 0.005  # share of the time that comparisons may lose
MAX_CLEAR_LOSS = 0.002  # the same where the gain is not `CLOSE` to 1: a mistake is less likely
# A new batch size decides after so many steps of a sequence: the first ones try drafters and lay out memory, and a
# lookup finds little in a text that has just begun. It decides earlier once drafts have lost the time of `FIRST_LOSS`
# plain steps.
FIRST_STEPS, FIRST_LOSS = 64, 10
# Where a `LookupWatch` finds drafts faster by `CLOSE` while they are off, the batch size begins like a new one. Such a
# trial loses as much, and half of that again in the two comparisons that end it; the next one then waits until that is
# less than `MAX_LOSS` of the steps.
TRIAL_PAUSE = round(2 * FIRST_LOSS / MAX_LOSS)
LEAST_PAUSE, MAX_PAUSE = 256, 40_000  # steps between comparisons
GROWTH = 4  # a pause has at most so many times as many steps as there were before it
NEW_WEIGHT = 0.5  # of one comparison in the ratio of step times
READING_MEMORY = 0.998  # per decoded token, weight of the past in the prompt tokens read for drafts
FIRST_TEXT = 128  # tokens that a text is taken to have until as many are decoded: its prompt is read before all of them


class Comparison:
    """The comparisons of one batch size.

    Args:
        smaller: of a smaller batch. Where drafts are clearly slower there, this one begins with what it knows.
        watch: what lookups would bring while drafts are off; None: the method has none.
    """

    def __init__(self, smaller: Comparison | None = None, num_slots: int = 1, watch: LookupWatch | None = None) -> None:
        self.is_on = True
        self.num_steps = self.num_plain = 0
        # Decaying sums over the steps that the budget decided: tokens and draft tokens per sequence, steps.
        self._tokens = self._drafts = self._num_drafting = 0.0
        self._in_use = _Mean()  # seconds of a step, since drafts were switched on or off
        self._log_ratio: float | None = None  # log(time of a step with drafts / of a plain one)
        self._num_compared = 0
        self._turn = TURN
        self._left = 2 * TURN  # steps until the next comparison ends; its last `_turn` are plain
        self._num_first = FIRST_STEPS // num_slots  # steps of a start after the first look at plain ones
        self._is_new = True  # that look was not taken
        self._first_plain_s = self._first_lost_s = 0.0  # of a plain step; by drafts since then
        self._times: tuple[list[float], list[float]] = ([], [])  # of its steps with drafts, and without, in seconds
        self._spent: tuple[list[float], list[float]] = ([], [])  # the same, first steps and reading included
        self._brought: tuple[list[float], list[float]] = ([], [])  # tokens per sequence in them
        self._probe: tuple[float, float] | None = (
            None  # the latest: plain steps that a draft token cost, share accepted
        )
        self._has_drafts = self._is_probe = self._is_unconfirmed = False
        self._waited_s = 0.0  # in which drafts read prompts for the next comparison alone
        self._last_pause = LEAST_PAUSE
        self._num_known = 0  # steps of smaller batches
        self._watch, self._is_trial, self._next_trial = watch, False, 0  # drafts are on as the watch said so
        if smaller is not None and smaller.is_clearly_off:
            self.is_on, self._log_ratio, self._num_compared = False, smaller._log_ratio, smaller._num_compared
            self._tokens, self._drafts, self._num_drafting = smaller._tokens, smaller._drafts, smaller._num_drafting
            self._probe = smaller._probe
            self._last_pause, self._num_known = smaller._last_pause, smaller._num_known + smaller.num_steps
            self._left += self._last_pause
            self._is_new = False

    @property
    def is_clearly_off(self) -> bool:
        """Whether drafts are off, and more than one comparison says that they are slower by a good deal."""
        return not self.is_on and self._num_compared > 1 and self.gain <= 1 / CLOSE

    @property
    def gain(self) -> float:
        """Tokens per second with drafts over those without; 1 before the first comparison."""
        num = self._num_drafting  # read once: other threads ask, too
        return 1.0 if self._log_ratio is None or not num else self._tokens / num / math.exp(self._log_ratio)

    @property
    def is_comparing(self) -> bool:
        return self._left <= 2 * self._turn

    @property
    def is_resting(self) -> bool:
        """Whether the next step is plain and only counted: drafts are off until the next comparison."""
        return self.num_rests > 0

    @property
    def num_rests(self) -> int:
        return 0 if self.is_on else max(self._left - 2 * self._turn, 0)

    def rest(self, num_steps: int, seconds: float, watched: TokenSequence | None = None) -> None:
        """Counts such steps.

        Args:
            num_steps: at most `num_rests`.
            watched: a sequence that has made them, on which lookups are counted; None: there is none.
        """
        self._in_use.add(seconds / num_steps, num_steps)
        self.num_steps += num_steps
        self.num_plain += num_steps
        self._left -= num_steps
        watch = self._watch
        if watch is not None and watched is not None:
            watch.observe(watched, seconds, num_steps)
            if watch.gain >= CLOSE and self.num_steps >= self._next_trial and self.is_resting:
                watch.forget()
                self.is_on = self._is_trial = True
                self._begin_start(self._in_use.mean)

    def wait(self, draft_s: float) -> None:
        """Adds the seconds in which a draft read a prompt, as all sequences need one for the next comparison."""
        self._waited_s += draft_s

    @property
    def _is_settled(self) -> bool:
        return self._turn == TURN or -self._left % self._turn >= self._turn // 2

    @property
    def next_limit(self) -> int | None:
        """The limit of the next step."""
        if not self.is_comparing:
            return METHOD_DEFAULT if self.is_on else PLAIN
        if self._left <= self._turn:
            return PLAIN
        return PROBE_LENGTH if self._is_probe else METHOD_DEFAULT

    def observe(self, step_s: float, read_s: float, tokens: float, *, is_first: bool, drafts: float) -> None:
        """Updates the comparison with a step.

        Args:
            read_s: its share of the time in which drafts read prompts.
            is_first: it has drafts and the step before it had none, or the other way round.
            drafts: draft tokens that were scored per sequence, on average.
        """
        limit = self.next_limit
        is_plain = limit == PLAIN
        self.num_steps += 1
        self.num_plain += is_plain
        self._has_drafts |= drafts > 0
        if limit is METHOD_DEFAULT:
            self._tokens = MEMORY * self._tokens + tokens
            self._drafts = MEMORY * self._drafts + drafts
            self._num_drafting = MEMORY * self._num_drafting + 1
            if self.is_on and not is_first:
                self._in_use.add(step_s + read_s)
        if self.is_comparing:
            if self._is_settled and not is_first:
                self._times[is_plain].append(step_s + read_s)
            self._spent[is_plain].append(step_s + read_s)
            self._brought[is_plain].append(tokens)
        self._left -= 1
        if self._left > self._turn and not is_plain and self._has_lost():
            self._left = self._turn
        if self._first_plain_s:
            self._first_lost_s += step_s + read_s - tokens * self._first_plain_s
            if self._first_lost_s > FIRST_LOSS * self._first_plain_s or self.is_comparing:
                self._left, self._first_plain_s = min(self._left, 2 * self._turn), 0.0
        if self._left == 0:
            self._compare()

    def _has_lost(self) -> bool:
        if self.is_on or not self.is_comparing or not self._in_use.num or len(self._times[0]) < 2:
            return False
        plain_s = self._in_use.mean
        return sum(self._spent[0]) - sum(self._brought[0]) * plain_s > TURN_LOSS * plain_s

    def _compare(self) -> None:
        drafting, plain = (_typical(times) for times in self._times)
        if self._goes_on(plain):
            return
        self._in_use.memory = TIME_MEMORY
        if self._in_use.num > TURN:
            drafting, plain = (self._in_use.mean, plain) if self.is_on else (drafting, self._in_use.mean)
        if drafting > 0 and plain > 0 and not self._is_probe:
            # A step with drafts does all that a plain one does: where it seems faster, the plain ones were held up.
            found, known = max(math.log(drafting / plain), 0.0), self._log_ratio
            self._log_ratio = found if known is None else known + NEW_WEIGHT * (found - known)
            self._num_compared += 1
            is_on = self.gain >= (1.0 if self.is_on else LEAST_GAIN)
            is_on = is_on and self._tokens >= LEAST_GAIN * self._num_drafting  # more than a plain step's one token
            # Other processes may have disturbed a single comparison: a change is confirmed by a second one.
            self._is_unconfirmed = is_on != self.is_on and self._num_compared > 1 and not self._is_unconfirmed
            if not self._is_unconfirmed and is_on != self.is_on:
                self.is_on, self._in_use = is_on, _Mean()
                # While drafts are off, the tokens and times of comparisons alone are new, and weigh alike.
                share = min(1.0, TURN / self._num_drafting) if not is_on else 1.0
                self._tokens, self._drafts = share * self._tokens, share * self._drafts
                self._num_drafting *= share
                self._next_trial = self.num_steps + (TRIAL_PAUSE if self._is_trial and not is_on else 0)
            self._is_trial = self._is_trial and self._is_unconfirmed
        if self._is_probe and self._has_drafts and drafting > 0 and plain > 0:  # of one draft token
            self._probe = max(drafting / plain - 1, 0.0), fmean(self._brought[0]) - 1
        is_close = self._has_drafts and 1 / CLOSE < self.gain < CLOSE
        again = self._is_unconfirmed or (is_close and self._num_compared < NUM_FIRST)
        if not again:
            self._last_pause = self._pause(drafting, plain, MAX_LOSS if is_close else MAX_CLEAR_LOSS)
        self._turn = LONG_TURN if is_close else TURN
        self._left = 2 * self._turn + (0 if again else self._last_pause)
        # A budget that drafts nothing never measures what drafts cost at this batch size: every other comparison does.
        self._is_probe, self._has_drafts = not (self._has_drafts or self._is_probe), False
        self._begin_turns()

    def _begin_turns(self) -> None:
        self._times, self._spent, self._brought = ([], []), ([], []), ([], [])
        self._waited_s = 0.0

    def _goes_on(self, plain_s: float) -> bool:
        is_new, self._is_new = self._is_new and self._num_first > 0, False
        if not is_new or plain_s == 0:
            return False
        self._begin_start(plain_s)
        return True

    def _begin_start(self, plain_s: float) -> None:
        """Begins the steps with drafts before a decision.

        The first steps were slow, as memory was laid out for them. From here on times are averaged over as many steps
        as tokens are until it decides: a budget that stops drafting changes both.
        """
        self._first_plain_s, self._first_lost_s, self._in_use = plain_s, 0.0, _Mean(MEMORY)
        self._tokens = self._drafts = self._num_drafting = 0.0
        self._turn, self._left = TURN, 2 * TURN + self._num_first
        self._begin_turns()

    def _pause(self, drafting_s: float, plain_s: float, max_loss: float) -> int:
        """Returns steps to the next comparison, so that comparisons lose `max_loss` of the time.

        An early comparison may have been disturbed, so the first pauses are short: see `GROWTH`.
        """
        if not (drafting_s > 0 and plain_s > 0):
            return LEAST_PAUSE
        step_s = drafting_s if self.is_on else plain_s
        # Seconds per token of each sequence, with drafts or without, whichever is faster.
        token_s = min(plain_s, drafting_s * self._num_drafting / self._tokens)
        lost_s = self._waited_s
        for typical_s, spent, tokens in zip((drafting_s, plain_s), self._spent, self._brought, strict=True):
            # Other processes may have held up a step: that time was not lost by the comparison.
            spent_s = spent[0] + sum(min(s, 3 * typical_s) for s in spent[1:])
            lost_s += max(spent_s - sum(tokens) * token_s, 0.0)
        pause = int(min(lost_s / max_loss / step_s, MAX_PAUSE))
        return max(min(pause, GROWTH * (self._num_known + self.num_steps)), LEAST_PAUSE)

    @property
    def draft_token(self) -> tuple[float, float] | None:
        """Plain steps that a draft token costs, and the share that is accepted; None: none were compared.

        The gain is (1 + share n) / (1 + cost n) with the n draft tokens of a step. Where the budget drafts nothing,
        those of the latest probe.
        """
        tokens, drafts, num = self._tokens, self._drafts, self._num_drafting  # read once: other threads ask, too
        if self._log_ratio is None or not num or drafts < LEAST_DRAFTS * num:
            return self._probe
        return (math.exp(self._log_ratio) - 1) * num / drafts, min(max((tokens - num) / drafts, 0.0), 1.0)

    def json_from_comparison(self) -> dict[str, Any]:
        """Returns a JSON-ready dict."""
        share = self.num_plain / max(self.num_steps, 1)
        cost, accepted = self.draft_token or (None, None)
        counts = {"num_steps": self.num_steps, "share_of_plain_steps": share, "num_compared": self._num_compared}
        numbers = {"gain": self.gain, "draft_token_cost": cost, "accepted_share": accepted}
        return {"drafts": self.is_on, **numbers, **counts}


class _Mean:
    """Decaying mean of seconds; one that is far longer counts as `MAX_STEP` times the mean."""

    def __init__(self, memory: float = TIME_MEMORY) -> None:
        self.memory = memory
        self._sum = self.num = 0.0

    @property
    def mean(self) -> float:
        return self._sum / self.num

    def add(self, seconds: float, count: int = 1) -> None:
        """Adds a number of seconds so many times."""
        most_s = MAX_STEP * self.mean if self.num else seconds
        fade = self.memory**count
        weight = (1 - fade) / (1 - self.memory)  # of `count` numbers, which fade one after the other
        self._sum = fade * self._sum + weight * min(seconds, most_s)
        self.num = fade * self.num + weight


class Reading:
    """Cost of reading prompts with the draft, per decoded token."""

    def __init__(self) -> None:
        self._num_decoded = self._num_read = 0.0  # tokens; decaying sums
        self._num_timed = self._timed_s = 0.0  # tokens that the draft read, and seconds
        self._num_ever = 0  # decoded tokens

    def read(self, num_tokens: int, draft_s: float | None) -> None:
        self._num_read += num_tokens
        if draft_s is not None:
            self._num_timed += num_tokens
            self._timed_s += draft_s

    def decoded(self, num_tokens: int) -> None:
        self._num_ever += num_tokens
        fade = READING_MEMORY if num_tokens == 1 else READING_MEMORY**num_tokens
        self._num_decoded = fade * self._num_decoded + num_tokens
        self._num_read *= fade

    def s_per_token(self, num_slots: int) -> float:
        """Returns the seconds in which the draft reads prompts, per decoded token."""
        if not self._num_timed or not self._num_decoded:
            return 0.0
        begun = min(self._num_ever / (FIRST_TEXT * num_slots), 1.0)
        return begun * self._num_read / self._num_decoded * self._timed_s / self._num_timed


def _inner(times: Sequence[float]) -> list[float]:
    return sorted(times)[1:-1] or list(times)


def _typical(times: Sequence[float]) -> float:
    kept = _inner(times)
    return sum(kept) / len(kept) if kept else 0.0
