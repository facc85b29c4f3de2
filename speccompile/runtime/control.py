# SPDX-License-Identifier: Apache-2.0
"""Keeps decoding with drafts from being slower than plain decoding, in the offline engine and in the server.

How far to draft is the method's own decision, by its budget (`speccompile.drafting.budget`). What a budget cannot know
is what it never sees: how long plain steps take at this moment, and what drafts cost besides. So the controller
compares, for each batch size: a few steps with drafts and a few without are timed in turn, and the faster way stays
until the next comparison. A comparison loses tokens, as one of its ways is slower; the next one comes when that loss is
`MAX_LOSS` of the time in between.

Only batches whose text does not depend on drafts may have a controller, as it goes by the clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from speccompile.core.protocols import StepTimes
from speccompile.runtime.slots import Slot, Step

PLAIN, METHOD_DEFAULT = 0, None  # limits of a step: no drafts; as far as the method's budget goes
PROBE_LENGTH = 1  # of chains that show a budget which drafts nothing what drafts cost
TURN = 6  # steps of either way in a comparison
MEMORY = 0.99  # weight of the past, after a step, in the tokens that a step with drafts brings
CLOSE = 1.15  # at the start, a gain between its inverse and this is compared again at once, `NUM_FIRST` times in all
NUM_FIRST = 3
MAX_LOSS = 0.005  # of the time: what comparisons may lose
LEAST_PAUSE, MAX_PAUSE = 256, 40_000  # steps between comparisons
GROWTH = 4  # a pause is at most so many times as long as what was decoded before it
NEW_WEIGHT = 0.5  # of a comparison in the ratio of step times
READING_MEMORY = 0.998  # weight of the past, after a decoded token, in how much is read for drafts


class Planner(Protocol):
    """Decides before each step whether it may draft, and learns from it afterwards. Called on one thread."""

    def plan(self, slots: Sequence[Slot]) -> int | None:
        """Returns the most draft tokens on one path in the next step.

        It holds for the sequences that leave the decision to the planner (`Slot.speculation` is `auto`). Those with
        `on` draft in any case: so many tokens, or `loop.FORCED_LENGTH` where this names none; those with `off` never
        do.

        Args:
            slots: all active sequences, by slot index.

        Returns:
            0: decode plainly; above 0: chains of so many tokens, whatever they cost; None: as far as the method's
            budget goes.
        """
        ...

    def observe(self, slots: Sequence[Slot], steps: Sequence[Step], times: StepTimes) -> None:
        """Takes in what became of a step.

        Args:
            slots: as given to `plan`.
            steps: one for each of them.
            times: of the step.
        """
        ...

    def read(self, num_tokens: int, draft_s: float | None) -> None:
        """Takes in that a part of a prompt was read.

        Args:
            num_tokens: of the part.
            draft_s: seconds that went into reading it for drafts, which plain decoding could do without; None: none.
        """
        ...

    def expects_drafts(self, num_active: int) -> bool:
        """Whether a sequence that joins will probably draft: otherwise its prompt need not be read for that.

        Args:
            num_active: sequences that will decode then.
        """
        ...

    def decisions(self) -> dict[str, Any]:
        """Returns what was decided and why, JSON-ready, for the stats."""
        ...


class FixedLength:
    """A planner that always says the same; by default it leaves everything to the method's budget.

    Args:
        limit: see `Planner.plan`.
    """

    def __init__(self, limit: int | None = METHOD_DEFAULT) -> None:
        self.limit = limit

    def plan(self, slots: Sequence[Slot]) -> int | None:
        """Returns the limit."""
        return self.limit

    def observe(self, slots: Sequence[Slot], steps: Sequence[Step], times: StepTimes) -> None:
        """Learns nothing."""

    def read(self, num_tokens: int, draft_s: float | None) -> None:
        """Learns nothing."""

    def expects_drafts(self, num_active: int) -> bool:
        """Whether there may be any."""
        return self.limit != PLAIN

    def decisions(self) -> dict[str, Any]:
        """Returns none."""
        return {}


def bucket_of(batch: int) -> int:
    """Returns the largest batch size that is looked at together with this one: 1 to 8, then in steps of a third."""
    top = 8
    if batch <= top:
        return batch
    while top < batch:
        top += max(top // 3, 1)
    return top


class Controller:
    """See `Planner`."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, bool], _Comparison] = {}  # by batch size, and whether some must draft in any case
        self._reading = _Reading()
        self._at: _Comparison | None = None  # of the step at hand; None: nobody leaves the decision to us
        self._is_plain = False  # the step at hand
        self._was_plain = False  # the step before it

    def plan(self, slots: Sequence[Slot]) -> int | None:
        """See `Planner.plan`."""
        asked = {slot.speculation for slot in slots}
        if "auto" not in asked:
            self._at = None
            return METHOD_DEFAULT
        key = (bucket_of(len(slots)), "on" in asked)
        self._at = self._sizes.get(key) or self._sizes.setdefault(key, _Comparison())
        limit = self._at.next_limit
        self._is_plain = limit == PLAIN
        return limit

    def observe(self, slots: Sequence[Slot], steps: Sequence[Step], times: StepTimes) -> None:
        """See `Planner.observe`."""
        tokens = 1 + sum(step.num_accepted for step in steps) / len(steps)
        self._reading.decoded(sum(len(step.tokens) for step in steps))
        if self._at is not None:
            # After a change of way shapes change, and a draft reads what it missed: that is lost time, not a cost of
            # every step.
            is_first = self._is_plain != self._was_plain
            read_s = 0.0 if self._is_plain else self._reading.s_per_token * tokens * len(steps)
            num_drafts = sum(step.num_draft_tokens for step in steps)
            self._at.observe(times.step_s, read_s, tokens, is_first=is_first, has_drafts=num_drafts > 0)
        self._was_plain = self._is_plain

    def read(self, num_tokens: int, draft_s: float | None) -> None:
        """See `Planner.read`."""
        self._reading.read(num_tokens, draft_s)

    def expects_drafts(self, num_active: int) -> bool:
        """See `Planner.expects_drafts`."""
        known = self._sizes.get((bucket_of(num_active), False))
        return known is None or known.is_on

    def decisions(self) -> dict[str, Any]:
        """Returns by batch size whether drafts are on, and the gain that was seen: tokens/s over plain tokens/s."""
        return {
            f"{size}, some forced" if is_forced else str(size): known.json_from_comparison()
            for (size, is_forced), known in sorted(self._sizes.items())
        }


class _Comparison:
    """What is known at one batch size."""

    def __init__(self) -> None:
        self.is_on = True
        self.num_steps = self.num_plain = 0
        self._tokens = self._num_drafting = 0.0  # a sequence gains in a step with drafts: faded sums
        self._log_ratio: float | None = None  # of the time of a step with drafts over that of a plain one
        self._num_compared = 0
        self._left = 2 * TURN  # steps until the next comparison ends; its last `TURN` are plain
        self._times: tuple[list[float], list[float]] = ([], [])  # of its steps with drafts, and without; seconds
        self._spent: tuple[list[float], list[float]] = ([], [])  # the same with first steps and reading
        self._brought = [0.0, 0.0]  # tokens of a sequence in them
        self._has_drafts = self._is_probe = self._is_doubted = False

    @property
    def gain(self) -> float:
        """Tokens per second with drafts over those without; 1 while nothing is known."""
        if self._log_ratio is None or not self._num_drafting:
            return 1.0
        return self._tokens / self._num_drafting / math.exp(self._log_ratio)

    @property
    def next_limit(self) -> int | None:
        """The limit of the next step."""
        if self._left > 2 * TURN:
            return METHOD_DEFAULT if self.is_on else PLAIN
        if self._left <= TURN:
            return PLAIN
        return PROBE_LENGTH if self._is_probe else METHOD_DEFAULT

    def observe(self, step_s: float, read_s: float, tokens: float, *, is_first: bool, has_drafts: bool) -> None:
        """Takes in a step.

        Args:
            step_s: of the step.
            read_s: what reading prompts for its drafts took.
            tokens: a sequence gained, on average.
            is_first: the step before it was of the other way.
            has_drafts: something was drafted and scored.
        """
        limit = self.next_limit
        is_plain = limit == PLAIN
        self.num_steps += 1
        self.num_plain += is_plain
        self._has_drafts |= has_drafts
        if limit is METHOD_DEFAULT:
            self._tokens = MEMORY * self._tokens + tokens
            self._num_drafting = MEMORY * self._num_drafting + 1
        if self._left <= 2 * TURN:
            if not is_first:
                self._times[is_plain].append(step_s + read_s)
            self._spent[is_plain].append(step_s + read_s)
            self._brought[is_plain] += tokens
        self._left -= 1
        if self._left == 0:
            self._compare()

    def _compare(self) -> None:
        drafting, plain = (_typical(times) for times in self._times)
        if drafting > 0 and plain > 0 and not self._is_probe:
            found, known = math.log(drafting / plain), self._log_ratio
            self._log_ratio = found if known is None else known + NEW_WEIGHT * (found - known)
            self._num_compared += 1
            is_on = self.gain >= 1.0
            # A single comparison may have met other processes: a change is confirmed by a second one.
            self._is_doubted = is_on != self.is_on and self._num_compared > 1 and not self._is_doubted
            if not self._is_doubted:
                self.is_on = is_on
        is_close = self._has_drafts and 1 / CLOSE < self.gain < CLOSE
        again = self._is_doubted or (is_close and self._num_compared < NUM_FIRST)
        self._left = 2 * TURN + (0 if again else self._pause(drafting, plain))
        # A budget that drafts nothing never sees what drafts cost at this batch size: every other comparison shows it.
        self._is_probe, self._has_drafts = not (self._has_drafts or self._is_probe), False
        self._times, self._spent, self._brought = ([], []), ([], []), [0.0, 0.0]

    def _pause(self, drafting_s: float, plain_s: float) -> int:
        """Returns steps to the next comparison.

        An early comparison may have met a disturbed machine, so the first pauses are short: see `GROWTH`.
        """
        if not (drafting_s > 0 and plain_s > 0):
            return LEAST_PAUSE
        step_s = drafting_s if self.is_on else plain_s
        # Seconds that the faster way takes for a token of each sequence.
        token_s = min(plain_s, drafting_s * self._num_drafting / self._tokens)
        lost_s = 0.0
        for typical_s, spent, tokens in zip((drafting_s, plain_s), self._spent, self._brought, strict=True):
            # A step may have been held up by other processes: that is not lost to the comparison.
            spent_s = spent[0] + sum(min(s, 3 * typical_s) for s in spent[1:])
            lost_s += max(spent_s - tokens * token_s, 0.0)
        pause = int(min(lost_s / MAX_LOSS / step_s, MAX_PAUSE))
        return max(min(pause, GROWTH * self.num_steps), LEAST_PAUSE)

    def json_from_comparison(self) -> dict[str, Any]:
        """Returns a JSON-ready dict."""
        share = self.num_plain / max(self.num_steps, 1)
        return {"drafts": self.is_on, "gain": self.gain, "num_steps": self.num_steps, "share_of_plain_steps": share}


class _Reading:
    """What it costs to read prompts for drafts as well, for each token that is decoded."""

    def __init__(self) -> None:
        self._num_decoded = self._num_read = 0.0  # tokens; the past fades
        self._num_timed = self._timed_s = 0.0  # tokens that were read for drafts, and how long that took

    def read(self, num_tokens: int, draft_s: float | None) -> None:
        self._num_read += num_tokens
        if draft_s is not None:
            self._num_timed += num_tokens
            self._timed_s += draft_s

    def decoded(self, num_tokens: int) -> None:
        fade = READING_MEMORY**num_tokens
        self._num_decoded = fade * self._num_decoded + num_tokens
        self._num_read *= fade

    @property
    def s_per_token(self) -> float:
        """Seconds of reading for drafts, for each token that is decoded."""
        if not self._num_timed or not self._num_decoded:
            return 0.0
        return self._num_read / self._num_decoded * self._timed_s / self._num_timed


def _typical(times: Sequence[float]) -> float:
    """Returns the mean without the longest: other processes make some steps long, never one short."""
    kept = sorted(times)[: max(len(times) - 1, 1)]
    return sum(kept) / len(kept) if kept else 0.0
