# SPDX-License-Identifier: Apache-2.0
"""Keeps decoding with drafts from being slower than plain decoding, in the offline engine and in the server.

How far to draft is the method's own decision, by its budget (`speccompile.drafting.budget`). A budget has no
measurements of steps that it never takes: how long plain steps take at this moment, and all that drafts cost. So the
controller compares, for each batch size: a few steps with drafts and then a few without are timed, and the faster of
the two is used until the next comparison. While drafts are in use, all steps count and not only these few: where the
budget drafts now and then, what a draft costs shows in the steps after it as well, as its weights took the cache from
the target's. A comparison loses tokens, as half of its steps are slower; the next one comes when that loss is
`MAX_LOSS` of the time in between, or `MAX_CLEAR_LOSS` where one way is clearly the faster.

The more sequences, the more a draft token costs and the longer it takes until all of them have a draft to compare with.
So where drafts are clearly slower, a larger batch that is new begins without them, as if it had been compared itself.

Only batches whose text does not depend on drafts may have a controller, as its decisions depend on measured times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from speccompile.core.protocols import StepTimes
from speccompile.runtime.slots import Slot, Step

PLAIN, METHOD_DEFAULT = 0, None  # limits of a step: no drafts; as decided by the method's budget
PROBE_LENGTH = 1  # of chains that measure the cost of drafts where the budget drafts nothing
TURN = 6  # steps with drafts, and as many without, in a comparison
MEMORY = 0.99  # per step, weight of the past in the tokens and the time of a step with drafts
MAX_STEP = 3.0  # times the mean: other processes may hold up a step for longer, which does not count
CLOSE = 1.15  # a gain between its inverse and this is compared again at once, for the first `NUM_FIRST` comparisons
NUM_FIRST = 3
MAX_LOSS = 0.005  # share of the time that comparisons may lose
MAX_CLEAR_LOSS = 0.002  # the same where the gain is not `CLOSE` to 1: a mistake is less likely
LEAST_PAUSE, MAX_PAUSE = 256, 40_000  # steps between comparisons
GROWTH = 4  # a pause has at most so many times as many steps as there were before it
NEW_WEIGHT = 0.5  # of one comparison in the ratio of step times
READING_MEMORY = 0.998  # per decoded token, weight of the past in the prompt tokens read for drafts


class Planner(Protocol):
    """Decides before each step whether it may draft, and learns from it afterwards. Called on one thread."""

    def plan(self, slots: Sequence[Slot]) -> int | None:
        """Returns the most draft tokens on one path in the next step.

        It applies to sequences that leave the decision to the planner (`Slot.speculation` is `auto`). Those with `on`
        always draft: as many tokens as the limit says, or `loop.FORCED_LENGTH` where it is 0 or None; those with `off`
        never do.

        Args:
            slots: all active sequences, by slot index.

        Returns:
            0: decode plainly; above 0: chains of so many tokens, whatever they cost; None: as decided by the method's
            budget.
        """
        ...

    def observe(self, slots: Sequence[Slot], steps: Sequence[Step], times: StepTimes) -> None:
        """Updates the planner with a step.

        Args:
            slots: as given to `plan`.
            steps: results, one for each of them.
            times: of the step.
        """
        ...

    def read(self, num_tokens: int, draft_s: float | None) -> None:
        """Updates the planner with a chunk of a prompt that was read.

        Args:
            num_tokens: of the chunk.
            draft_s: seconds that the draft took to read it, which plain decoding would not need; None: it did not.
        """
        ...

    def expects_drafts(self, num_active: int) -> bool:
        """Returns whether a new sequence will probably draft, or is needed for a comparison.

        Otherwise the draft does not read its prompt; see `Slot.has_draft`.

        Args:
            num_active: sequences that will decode, the new one included.
        """
        ...

    def decisions(self) -> dict[str, Any]:
        """Returns the decisions and their reasons, JSON-ready, for the stats."""
        ...


class FixedLength:
    """A planner with a constant limit; by default the method's budget decides.

    Args:
        limit: see `Planner.plan`.
    """

    def __init__(self, limit: int | None = METHOD_DEFAULT) -> None:
        self.limit = limit

    def plan(self, slots: Sequence[Slot]) -> int | None:
        """Returns the limit."""
        return self.limit

    def observe(self, slots: Sequence[Slot], steps: Sequence[Step], times: StepTimes) -> None:
        """Does nothing."""

    def read(self, num_tokens: int, draft_s: float | None) -> None:
        """Does nothing."""

    def expects_drafts(self, num_active: int) -> bool:
        """Returns whether the limit allows drafts."""
        return self.limit != PLAIN

    def decisions(self) -> dict[str, Any]:
        """Returns an empty dict."""
        return {}


def bucket_of(batch: int) -> int:
    """Returns the largest batch size that shares its comparisons with this one: 1 to 8, then in steps of a third."""
    top = 8
    if batch <= top:
        return batch
    while top < batch:
        top += max(top // 3, 1)
    return top


class Controller:
    """See `Planner`."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, bool], _Comparison] = {}  # by batch size, and whether some must draft
        self._reading = _Reading()
        self._at: _Comparison | None = None  # of this step; None: no sequence has `auto`
        self._waiting: _Comparison | None = None  # drafts are off, and it wants all sequences to have one
        self._is_plain = False  # this step
        self._was_plain = False  # the step before it

    def plan(self, slots: Sequence[Slot]) -> int | None:
        """See `Planner.plan`."""
        num_auto = num_ready = 0
        is_forced = False
        for slot in slots:
            if slot.speculation == "auto":
                num_auto += 1
                num_ready += slot.has_draft
            elif slot.speculation == "on":
                is_forced = True
        if not num_auto:
            self._at = None
            return METHOD_DEFAULT
        key = (bucket_of(len(slots)), is_forced)
        at = self._sizes.get(key) or self._sizes.setdefault(key, self._first(*key))
        # A comparison waits for a batch whose sequences all have a draft; drafts need at least one that has.
        is_short = num_ready < num_auto
        self._waiting = at if is_short and at.is_comparing and not at.is_on else None
        if is_short and (at.is_comparing or (at.is_on and not num_ready)):
            self._at = None
            return METHOD_DEFAULT if at.is_on and num_ready else PLAIN
        self._at, limit = at, at.next_limit
        self._is_plain = limit == PLAIN
        return limit

    def _first(self, size: int, is_forced: bool) -> _Comparison:
        """Returns the comparison of a batch size that is new: it knows what the next smaller one has found."""
        smaller = [known for known, forced in self._sizes if forced == is_forced and known < size]
        return _Comparison(self._sizes[max(smaller), is_forced] if smaller else None)

    def observe(self, slots: Sequence[Slot], steps: Sequence[Step], times: StepTimes) -> None:
        """See `Planner.observe`."""
        if self._at is not None and self._at.is_resting:
            self._at.rest()
            self._reading.decoded(len(steps))
            self._was_plain = True
            return
        num_accepted = num_drafts = num_emitted = 0
        for step in steps:
            num_accepted += step.num_accepted
            num_drafts += step.num_draft_tokens
            num_emitted += len(step.tokens)
        tokens = 1 + num_accepted / len(steps)
        self._reading.decoded(num_emitted)
        if self._at is None:
            self._is_plain = num_drafts == 0
        else:
            # After a change between drafts and none, shapes change and a draft reads the tokens it missed: lost time,
            # but not a cost of every step.
            is_first = self._is_plain != self._was_plain
            read_s = 0.0 if self._is_plain else self._reading.s_per_token * tokens * len(steps)
            self._at.observe(times.step_s, read_s, tokens, is_first=is_first, has_drafts=num_drafts > 0)
        self._was_plain = self._is_plain

    def read(self, num_tokens: int, draft_s: float | None) -> None:
        """See `Planner.read`."""
        self._reading.read(num_tokens, draft_s)
        if draft_s is not None and self._waiting is not None:
            self._waiting.wait(draft_s)

    def expects_drafts(self, num_active: int) -> bool:
        """See `Planner.expects_drafts`."""
        size = bucket_of(num_active)
        known = self._sizes.get((size, False)) or self._first(size, False)
        return known.is_on or known.is_comparing

    def decisions(self) -> dict[str, Any]:
        """Returns by batch size whether drafts are on, and the measured gain: tokens/s over plain tokens/s."""
        return {
            f"{size}, some forced" if is_forced else str(size): known.json_from_comparison()
            for (size, is_forced), known in sorted(self._sizes.items())
        }


class _Comparison:
    """The comparisons of one batch size.

    Args:
        smaller: of a smaller batch. Where drafts are clearly slower there, this one begins with what it knows.
    """

    def __init__(self, smaller: _Comparison | None = None) -> None:
        self.is_on = True
        self.num_steps = self.num_plain = 0
        # Decaying sums over the steps that the budget decided: tokens per sequence, steps; seconds, steps of these.
        self._tokens = self._num_drafting = self._seconds = self._num_timed = 0.0
        self._log_ratio: float | None = None  # log(time of a step with drafts / of a plain one)
        self._num_compared = 0
        self._left = 2 * TURN  # steps until the next comparison ends; its last `TURN` are plain
        self._times: tuple[list[float], list[float]] = ([], [])  # of its steps with drafts, and without, in seconds
        self._spent: tuple[list[float], list[float]] = ([], [])  # the same, first steps and reading included
        self._brought = [0.0, 0.0]  # tokens per sequence in them
        self._has_drafts = self._is_probe = self._is_unconfirmed = False
        self._waited_s = 0.0  # in which drafts read prompts for the next comparison alone
        self._last_pause = LEAST_PAUSE
        self._num_known = 0  # steps of smaller batches
        if smaller is not None and smaller.is_clearly_off:
            self.is_on, self._log_ratio, self._num_compared = False, smaller._log_ratio, smaller._num_compared
            self._tokens, self._num_drafting = smaller._tokens, smaller._num_drafting
            self._last_pause, self._num_known = smaller._last_pause, smaller._num_known + smaller.num_steps
            self._left += self._last_pause

    @property
    def is_clearly_off(self) -> bool:
        """Whether drafts are off, and more than one comparison says that they are slower by a good deal."""
        return not self.is_on and self._num_compared > 1 and self.gain <= 1 / CLOSE

    @property
    def gain(self) -> float:
        """Tokens per second with drafts over those without; 1 before the first comparison."""
        if self._log_ratio is None or not self._num_drafting:
            return 1.0
        return self._tokens / self._num_drafting / math.exp(self._log_ratio)

    @property
    def is_comparing(self) -> bool:
        """Whether the next step is part of a comparison."""
        return self._left <= 2 * TURN

    @property
    def is_resting(self) -> bool:
        """Whether the next step is plain and only counted: drafts are off until the next comparison."""
        return not (self.is_on or self.is_comparing)

    def rest(self) -> None:
        """Counts such a step."""
        self.num_steps += 1
        self.num_plain += 1
        self._left -= 1

    def wait(self, draft_s: float) -> None:
        """Adds the seconds in which a draft read a prompt, as all sequences need one for the next comparison."""
        self._waited_s += draft_s

    @property
    def next_limit(self) -> int | None:
        """The limit of the next step."""
        if not self.is_comparing:
            return METHOD_DEFAULT if self.is_on else PLAIN
        if self._left <= TURN:
            return PLAIN
        return PROBE_LENGTH if self._is_probe else METHOD_DEFAULT

    def observe(self, step_s: float, read_s: float, tokens: float, *, is_first: bool, has_drafts: bool) -> None:
        """Updates the comparison with a step.

        Args:
            step_s: of the step.
            read_s: its share of the time in which drafts read prompts.
            tokens: emitted per sequence, on average.
            is_first: it has drafts and the step before it had none, or the other way round.
            has_drafts: at least one draft token was scored.
        """
        limit = self.next_limit
        is_plain = limit == PLAIN
        self.num_steps += 1
        self.num_plain += is_plain
        self._has_drafts |= has_drafts
        if limit is METHOD_DEFAULT:
            self._tokens = MEMORY * self._tokens + tokens
            self._num_drafting = MEMORY * self._num_drafting + 1
            if not is_first:
                self._time(step_s + read_s)
        if self.is_comparing:
            if not is_first:
                self._times[is_plain].append(step_s + read_s)
            self._spent[is_plain].append(step_s + read_s)
            self._brought[is_plain] += tokens
        self._left -= 1
        if self._left == 0:
            self._compare()

    def _time(self, step_s: float) -> None:
        """Adds the seconds of a step to the mean of the steps with drafts in use."""
        mean_s = self._seconds / self._num_timed if self._num_timed else step_s
        self._seconds = MEMORY * self._seconds + min(step_s, MAX_STEP * mean_s)
        self._num_timed = MEMORY * self._num_timed + 1

    def _compare(self) -> None:
        drafting, plain = (_typical(times) for times in self._times)
        if self.is_on and self._num_timed > TURN:
            drafting = self._seconds / self._num_timed
        if drafting > 0 and plain > 0 and not self._is_probe:
            found, known = math.log(drafting / plain), self._log_ratio
            self._log_ratio = found if known is None else known + NEW_WEIGHT * (found - known)
            self._num_compared += 1
            is_on = self.gain >= 1.0
            # Other processes may have disturbed a single comparison: a change is confirmed by a second one.
            self._is_unconfirmed = is_on != self.is_on and self._num_compared > 1 and not self._is_unconfirmed
            if not self._is_unconfirmed:
                self.is_on = is_on
        is_close = self._has_drafts and 1 / CLOSE < self.gain < CLOSE
        again = self._is_unconfirmed or (is_close and self._num_compared < NUM_FIRST)
        if not again:
            self._last_pause = self._pause(drafting, plain, MAX_LOSS if is_close else MAX_CLEAR_LOSS)
        self._left = 2 * TURN + (0 if again else self._last_pause)
        # A budget that drafts nothing never measures what drafts cost at this batch size: every other comparison does.
        self._is_probe, self._has_drafts = not (self._has_drafts or self._is_probe), False
        self._times, self._spent, self._brought = ([], []), ([], []), [0.0, 0.0]
        self._waited_s = 0.0

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
            lost_s += max(spent_s - tokens * token_s, 0.0)
        pause = int(min(lost_s / max_loss / step_s, MAX_PAUSE))
        return max(min(pause, GROWTH * (self._num_known + self.num_steps)), LEAST_PAUSE)

    def json_from_comparison(self) -> dict[str, Any]:
        """Returns a JSON-ready dict."""
        share = self.num_plain / max(self.num_steps, 1)
        return {"drafts": self.is_on, "gain": self.gain, "num_steps": self.num_steps, "share_of_plain_steps": share}


class _Reading:
    """Cost of reading prompts with the draft, per decoded token."""

    def __init__(self) -> None:
        self._num_decoded = self._num_read = 0.0  # tokens; decaying sums
        self._num_timed = self._timed_s = 0.0  # tokens that the draft read, and seconds

    def read(self, num_tokens: int, draft_s: float | None) -> None:
        self._num_read += num_tokens
        if draft_s is not None:
            self._num_timed += num_tokens
            self._timed_s += draft_s

    def decoded(self, num_tokens: int) -> None:
        fade = READING_MEMORY if num_tokens == 1 else READING_MEMORY**num_tokens
        self._num_decoded = fade * self._num_decoded + num_tokens
        self._num_read *= fade

    @property
    def s_per_token(self) -> float:
        """Seconds in which the draft reads prompts, per decoded token."""
        if not self._num_timed or not self._num_decoded:
            return 0.0
        return self._num_read / self._num_decoded * self._timed_s / self._num_timed


def _typical(times: Sequence[float]) -> float:
    """Returns the mean without the longest and the shortest time; left out alone, the longest would lower it."""
    kept = sorted(times)[1:-1] or list(times)
    return sum(kept) / len(kept) if kept else 0.0
