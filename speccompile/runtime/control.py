# SPDX-License-Identifier: Apache-2.0
"""Keeps decoding with drafts from being slower than plain decoding, in the offline engine and in the server.

A method's budget (`speccompile.drafting.budget`) has no measurements of steps that it never takes. So the controller
compares both ways for each batch size (`speccompile.runtime.comparison`) and uses the faster one, in batches whose text
does not depend on drafts: its decisions depend on measured times.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from speccompile.core.proposer import Proposer
from speccompile.core.protocols import StepTimes
from speccompile.drafting.budget import Weighs
from speccompile.runtime.comparison import LEAST_PAUSE, METHOD_DEFAULT, PLAIN, Comparison
from speccompile.runtime.requests import StepOutput
from speccompile.runtime.sequences import TokenSequence

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

    def observe(self, sequences: Sequence[TokenSequence], steps: Sequence[StepOutput], times: StepTimes) -> None:
        """Updates the planner with a step."""
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

    def observe(self, sequences: Sequence[TokenSequence], steps: Sequence[StepOutput], times: StepTimes) -> None: ...

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

    def observe(self, sequences: Sequence[TokenSequence], steps: Sequence[StepOutput], times: StepTimes) -> None:
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
