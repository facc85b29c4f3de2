# SPDX-License-Identifier: Apache-2.0
"""Keeps decoding with drafts from being slower than plain decoding, in the offline engine and in the server.

A method's budget (`speccompile.drafting.budget`) has no measurements of steps that it never takes. So the controller
compares both ways for each batch size and uses the faster one, in batches whose text
does not depend on drafts: its decisions depend on measured times.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from copy import copy
from typing import Any, Protocol

from speccompile.core.proposer import Proposer
from speccompile.core.protocols import StepTimes
from speccompile.drafting.budget import Weighs
from speccompile.runtime.requests import StepOutput
from speccompile.runtime.sequences import TokenSequence

PLAIN, METHOD_DEFAULT = 0, None  # limits of a step: no drafts; as decided by the method's budget
# Steps of the other way: the mean of times with 10 % noise is right within 3 %. A turn of drafts that has lost the time
# of a third of them ends early, the worst step left out; one that has lost less is doubled once, as tokens say little.
TURN = 12
MEMORY = 0.99  # weight of the past per step: means over 100 steps, as the machine's speed and the text change
MAX_STEP = 2.0  # times the mean: what a step takes longer, another process took
LEAST_GAIN = 1.02  # to switch drafts on: in doubt decoding is plain
MAX_LOSS = 0.005  # share of the time that turns may lose: drafts that do not pay leave 0.98 of plain decoding's speed
LEAST_PAUSE = 64  # steps between two turns: as many as the means remember
GROWTH = 8  # a pause has at most so many times the steps before it: what the first turns found may be wrong


class Comparison:
    """The comparison of one batch size; it begins as `smaller`, that of a smaller batch, or plainly.

    One way is in use, and all its steps are measured. From time to time a turn of steps takes the other way. That costs
    time where the other way is slower: the pause until the next turn is so long that turns cost `MAX_LOSS` of it.
    """

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
        if self.is_on == self.is_comparing:
            return PLAIN
        return 1 if self._is_probe and self.is_comparing else METHOD_DEFAULT

    def passes(self) -> bool:
        """Counts a plain step early in a pause of drafts, whose time the means would forget; False: it is observed."""
        if self.is_on or self._left <= TURN + LEAST_PAUSE:
            return False
        self.num_steps += 1
        self.num_plain += 1
        self._left -= 1
        return True

    def observe(self, step_s: float, tokens: float, drafts: float, *, is_first: bool) -> None:
        """Updates the comparison with a step; `drafts` is the mean number of scored draft tokens per sequence.

        Args:
            is_first: the step before it went the other way: its time is that of no other step.
        """
        is_comparing = self.is_comparing
        is_plain = self.is_on == is_comparing
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
            plain_s = self._in_use.mean if self._in_use.num else math.inf
            if not is_first:
                self._losses.append(step_s - tokens * plain_s)
            lost_s = sum(self._losses)
            if not self.is_on and lost_s - max(self._losses, default=0.0) > TURN / 3 * plain_s:
                self._compare()
            elif self._left == 0:
                if not self.is_on and self._num_drafts and lost_s > 0 and self._other.num <= TURN:
                    self._left = TURN
                else:
                    self._compare()
        elif self.is_on and self._log_ratio is not None and self.gain < 1:
            self._left = min(self._left, TURN)  # drafts bring less than they did

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
        # Seconds by step, without the first, in which a draft reads what it missed; one may have been held up.
        self._losses: list[float] = []

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
        return self._sum / self.num

    def limit(self, num: int) -> None:
        """Makes the past weigh as much as `num` numbers at most."""
        share = min(num / self.num, 1.0) if self.num else 1.0
        self._sum, self.num = share * self._sum, share * self.num

    def add(self, number: float, most: float = math.inf) -> None:
        """Adds a number; one of more than `most` times the mean counts as that, as does the first beside the second."""
        if self.num == 1:
            self._sum = min(self._sum, most * number)
        if self.num:
            number = min(number, most * self.mean)
        self._sum = MEMORY * self._sum + number
        self.num = MEMORY * self.num + 1


_log = logging.getLogger(__name__)
READING_MEMORY = 4096  # decoded tokens after which half of what was read before is forgotten: requests change


class Planner(Protocol):
    """Decides before each step whether it may draft, and learns from it afterwards. Called on one thread."""

    def plan(self, sequences: Sequence[TokenSequence]) -> int | None:
        """Returns the most draft tokens on one path in the next step, of sequences whose `speculation` is `auto`.

        Sequences with `on` always draft: as many tokens as the limit says, or `loop.FORCED_LENGTH` where it is 0 or
        None. Those with `off` never do.

        Returns:
            0: decode plainly; above 0: chains of so many tokens, whatever they cost; None: the method's budget decides.
        """
        ...

    def observe(self, sequences: Sequence[TokenSequence], steps: Sequence[StepOutput], times: StepTimes) -> bool:
        """Updates the planner with a step. Returns whether its proposer is to learn from it, too."""
        ...

    def read(self, num_tokens: int, draft_s: float | None) -> None:
        """Updates the planner with a chunk of a prompt that was read.

        Args:
            draft_s: seconds that the draft took to read it, which plain decoding would not need; None: it did not.
        """
        ...

    def expects_drafts(self, num_active: int) -> bool:
        """Returns whether the draft is to read the prompt of a new sequence (`TokenSequence.has_draft`).

        Args:
            num_active: sequences that will decode, the new one included.
        """
        ...

    def decisions(self) -> dict[str, Any]: ...

    def latest(self) -> dict[str, Any] | None:
        """Returns the decision on the sequences that decoded last; empty: none did; None: nothing is decided here."""
        ...


class FixedLength:
    """A planner with a constant limit; by default the method's budget decides."""

    def __init__(self, limit: int | None = METHOD_DEFAULT) -> None:
        self.limit = limit

    def plan(self, sequences: Sequence[TokenSequence]) -> int | None:
        return self.limit

    def observe(self, sequences: Sequence[TokenSequence], steps: Sequence[StepOutput], times: StepTimes) -> bool:
        return True

    def read(self, num_tokens: int, draft_s: float | None) -> None: ...

    def expects_drafts(self, num_active: int) -> bool:
        return self.limit != PLAIN

    def decisions(self) -> dict[str, Any]:
        """Returns an empty dict."""
        return {}

    def latest(self) -> dict[str, Any] | None:
        """Returns None."""
        return None


def bucket_of(batch: int) -> int:
    """Returns the largest batch size that shares its comparisons with this one: 1 to 8, then in steps of a third."""
    top = 8
    if batch <= top:
        return batch
    while top < batch:
        top += max(top // 3, 1)
    return top


def controller_of(proposer: Proposer) -> Controller:
    """Returns a controller that knows whether a proposer weighs its drafts."""
    return Controller(proposer if isinstance(proposer, Weighs) else None)


class Controller:
    """A `Planner`. `weighs`: the proposer, where its budget decides whether to draft."""

    def __init__(self, weighs: Weighs | None = None) -> None:
        self._weighs = weighs
        self._sizes: dict[tuple[int, bool], Comparison] = {}  # by batch size, and whether some must draft
        # Tokens that were decoded, tokens of prompts, those of them that the draft has read, and its seconds.
        self._num_decoded = self._num_prompt = self._num_read = self._read_s = 0.0
        self._at: Comparison | None = None  # of this step; None: nothing is learned from it
        self._latest: Comparison | None = None  # of the last step in which a sequence had `auto`
        self._waiting: Comparison | None = None  # drafts are off, and its turn needs all sequences to have one
        self._is_plain = self._was_plain = False  # this step, and the step before it

    def plan(self, sequences: Sequence[TokenSequence]) -> int | None:
        num_auto = num_ready = 0
        is_forced = False
        for sequence in sequences:
            if sequence.speculation == "auto":
                num_auto += 1
                num_ready += sequence.has_draft
            elif sequence.speculation == "on":
                is_forced = True
        self._at = self._waiting = None
        if not num_auto:
            return METHOD_DEFAULT
        key = bucket_of(len(sequences)), is_forced
        at = self._latest = self._sizes.get(key) or self._sizes.setdefault(key, self._new(*key))
        limit = at.next_limit
        if limit is METHOD_DEFAULT and num_ready < num_auto:
            # A turn of drafts waits until all sequences have one.
            self._waiting = None if at.is_on else at
            return METHOD_DEFAULT if at.is_on and num_ready else PLAIN
        self._at, self._is_plain = at, limit == PLAIN
        return limit

    def _new(self, size: int, is_forced: bool) -> Comparison:
        smaller = [known for known, forced in self._sizes if forced == is_forced and known < size]
        return Comparison(self._sizes[max(smaller), is_forced] if smaller else None)

    def observe(self, sequences: Sequence[TokenSequence], steps: Sequence[StepOutput], times: StepTimes) -> bool:
        if self._at is not None and self._is_plain and self._at.passes():
            self._num_decoded += sum(len(step.tokens) for step in steps)
            self._was_plain = True
            return False
        num_accepted = num_drafts = num_emitted = 0
        for step in steps:
            num_accepted += step.num_accepted
            num_drafts += step.num_draft_tokens
            num_emitted += len(step.tokens)
        self._num_decoded += num_emitted
        if self._at is None:
            self._is_plain = num_drafts == 0
        else:
            # After a change between drafts and none, shapes change and a draft reads the tokens it missed: lost time,
            # but not a cost of every step.
            is_first = self._is_plain != self._was_plain
            num, tokens = len(steps), 1 + num_accepted / len(steps)
            read_s = 0.0 if self._is_plain else self._read_s_per_token(num) * tokens * num
            was_on = self._at.is_on
            self._at.observe(times.step_s + read_s, tokens, num_drafts / num, is_first=is_first)
            if self._at.is_on != was_on:
                _log.info("drafts %s at batch %d: gain %.2f", "off" if was_on else "on", num, self._at.gain)
        self._was_plain = self._is_plain
        return True

    def read(self, num_tokens: int, draft_s: float | None) -> None:
        self._num_prompt += num_tokens
        if draft_s is not None:
            self._num_read += num_tokens
            self._read_s += draft_s
            if self._waiting is not None:
                self._waiting.wait(draft_s)
        if self._num_decoded > READING_MEMORY:
            self._num_decoded, self._num_prompt = self._num_decoded / 2, self._num_prompt / 2
            self._num_read, self._read_s = self._num_read / 2, self._read_s / 2

    def _read_s_per_token(self, num_slots: int) -> float:
        """Returns the draft's seconds of reading prompts per decoded token; a text has at least `LEAST_PAUSE`."""
        if not self._num_read:
            return 0.0
        prompts = self._num_prompt / max(self._num_decoded, LEAST_PAUSE * num_slots)
        return prompts * self._read_s / self._num_read

    def expects_drafts(self, num_active: int) -> bool:
        size = bucket_of(num_active)
        return (self._sizes.get((size, False)) or self._new(size, False)).expects_drafts

    def decisions(self) -> dict[str, Any]:
        """Returns by batch size whether drafts are on, and the measured gain: tokens/s over plain tokens/s."""
        return {
            f"{size}, some forced" if is_forced else str(size): known.json_from_comparison()
            for (size, is_forced), known in sorted(self._sizes.items())
        }

    def latest(self) -> dict[str, Any]:
        """Returns what `decisions` says of the batch size that decoded last, or what its budget estimated of drafts."""
        if self._latest is None:
            return {}
        found = self._latest.json_from_comparison()
        outlook = self._weighs.outlook if found["draft_token_cost"] is None and self._weighs is not None else None
        if outlook is not None:
            found |= {"draft_token_cost": outlook.cost, "accepted_share": outlook.accepted}
        return {**found, "is_expected": outlook is not None}
