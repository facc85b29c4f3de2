# SPDX-License-Identifier: Apache-2.0
"""Keeps decoding with drafts from being slower than plain decoding, in the offline engine and in the server.

How far to draft is the method's own decision, by its budget (`speccompile.drafting.budget`). A budget has no
measurements of steps that it never takes: how long plain steps take at this moment, and all that drafts cost. So the
controller compares, for each batch size: a few steps with drafts and then a few without are timed, and the faster of
the two is used until the next comparison. Of the way in use all steps count and not only these few: where the budget
drafts now and then, what a draft costs shows in the steps after it as well, as its weights took the cache from the
target's, and plain steps soon after drafts take longer than others. Where the two ways are nearly as fast, a comparison
therefore has more steps, of which the first are not timed. A comparison loses tokens, as half of its steps are slower;
the next one comes when that loss is `MAX_LOSS` of the time in between, or `MAX_CLEAR_LOSS` where one way is clearly the
faster.

The more sequences, the more a draft token costs and the longer it takes until all of them have a draft to compare with.
So where drafts are clearly slower, a larger batch that is new begins without them, as if it had been compared itself.

While drafts are off, what lookups would bring is counted on the text (`speccompile.runtime.lookup_watch`), so that they
come back soon where a text begins to repeat itself. A draft that cannot read missed tokens later is told of every plain
step, which takes a tenth of a step of 0.25 ms: it has no further part in a sequence that ends before the next
comparison, nor in any where drafts are known to be slower. New sequences have one again when it is time to compare.

Only batches whose text does not depend on drafts may have a controller, as its decisions depend on measured times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from speccompile.core.proposer import Proposer
from speccompile.core.protocols import StepTimes
from speccompile.drafting.budget import Weighs
from speccompile.drafting.lookup import LooksUp
from speccompile.drafting.proposer import DropsDrafts
from speccompile.runtime.comparison import METHOD_DEFAULT, PLAIN, Comparison, Reading
from speccompile.runtime.lookup_watch import LookUp, LookupWatch
from speccompile.runtime.requests import StepOutput
from speccompile.runtime.sequences import TokenSequence

DropDraft = Callable[[TokenSequence], None]

MOST_RESTS = 64  # see `Planner.num_rests`: asking and telling takes 17 us, in caches that the target has filled


class Planner(Protocol):
    """Decides before each step whether it may draft, and learns from it afterwards. Called on one thread.

    Attributes:
        num_rests: after `plan`: drafts are off, and so many steps of the same sequences, that one included, need
            neither `plan` nor `observe` nor the proposer's `observe`, but `rested`; 0: none.
    """

    num_rests: int

    def plan(self, sequences: Sequence[TokenSequence]) -> int | None:
        """Returns the most draft tokens on one path in the next step.

        It applies to sequences whose `speculation` is `auto`: these leave the decision to the planner. Those with `on`
        always draft: as many tokens as the limit says, or `loop.FORCED_LENGTH` where it is 0 or None; those with `off`
        never do.

        Args:
            sequences: all active sequences, by slot index.

        Returns:
            0: decode plainly; above 0: chains of so many tokens, whatever they cost; None: as decided by the method's
            budget.
        """
        ...

    def observe(self, sequences: Sequence[TokenSequence], steps: Sequence[StepOutput], times: StepTimes) -> None:
        """Updates the planner with a step."""
        ...

    def rested(self, sequences: Sequence[TokenSequence], num_steps: int, seconds: float) -> None:
        """Updates the planner with plain steps.

        Args:
            sequences: as given to `plan`; all have made all of them.
            num_steps: at most `num_rests`.
        """
        ...

    def read(self, num_tokens: int, draft_s: float | None) -> None:
        """Updates the planner with a chunk of a prompt that was read.

        Args:
            draft_s: seconds that the draft took to read it, which plain decoding would not need; None: it did not.
        """
        ...

    def expects_drafts(self, num_active: int) -> bool:
        """Returns whether a new sequence will probably draft, or is needed for a comparison.

        Otherwise the draft does not read its prompt; see `TokenSequence.has_draft`.

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

    num_rests = 0

    def __init__(self, limit: int | None = METHOD_DEFAULT) -> None:
        self.limit = limit

    def plan(self, sequences: Sequence[TokenSequence]) -> int | None:
        return self.limit

    def observe(self, sequences: Sequence[TokenSequence], steps: Sequence[StepOutput], times: StepTimes) -> None: ...

    def rested(self, sequences: Sequence[TokenSequence], num_steps: int, seconds: float) -> None: ...

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


def _first_to_watch(sequences: Sequence[TokenSequence]) -> TokenSequence | None:
    """Returns the first sequence on which lookups can be counted; None: there is none."""
    for sequence in sequences:
        if sequence.has_draft and sequence.speculation == "auto" and sequence.grammar is None:
            return sequence
    return None


def controller_of(proposer: Proposer) -> Controller:
    """Returns a controller that knows whether a proposer looks up, and how it drops the draft of a sequence."""
    look_up = proposer.look_up if isinstance(proposer, LooksUp) else None

    def drop_draft(sequence: TokenSequence) -> None:
        proposer.flush()  # what it still has of the target's outputs will be void
        sequence.has_draft = False

    weighs = proposer if isinstance(proposer, Weighs) else None
    if isinstance(proposer, DropsDrafts):
        return Controller(look_up, proposer.drop_draft, weighs)
    return Controller(look_up, None if proposer.catches_up else drop_draft, weighs)


class Controller:
    """See `Planner`.

    Args:
        look_up: what the method's lookups would draft; None: it has none.
        drop_draft: called with a sequence whose plain steps the draft need no longer be told of; None: it never is.
        weighs: the proposer, where its budget decides whether to draft.
    """

    def __init__(
        self, look_up: LookUp | None = None, drop_draft: DropDraft | None = None, weighs: Weighs | None = None
    ) -> None:
        self._look_up, self._drop_draft, self._weighs = look_up, drop_draft, weighs
        self._sizes: dict[tuple[int, bool], Comparison] = {}  # by batch size, and whether some must draft
        self._reading = Reading()
        self._at: Comparison | None = None  # of this step; None: no sequence has `auto`
        self._latest: Comparison | None = None  # of the last step in which a sequence had `auto`
        self._waiting: Comparison | None = None  # drafts are off, and it wants all sequences to have one
        self._is_plain = False  # this step
        self._was_plain = False  # the step before it
        self.num_rests = 0

    def plan(self, sequences: Sequence[TokenSequence]) -> int | None:
        """See `Planner.plan`."""
        num_auto = num_ready = self.num_rests = 0
        is_forced = False
        for sequence in sequences:
            if sequence.speculation == "auto":
                num_auto += 1
                num_ready += sequence.has_draft
            elif sequence.speculation == "on":
                is_forced = True
        if not num_auto:
            self._at = None
            return METHOD_DEFAULT
        key = (bucket_of(len(sequences)), is_forced)
        at = self._sizes.get(key) or self._sizes.setdefault(key, self._first(*key))
        self._latest = at
        # A comparison waits for a batch whose sequences all have a draft; drafts need at least one that has.
        is_short = num_ready < num_auto
        self._waiting = at if is_short and at.is_comparing and not at.is_on else None
        if is_short and (at.is_comparing or (at.is_on and not num_ready)):
            self._at = None
            return METHOD_DEFAULT if at.is_on and num_ready else PLAIN
        self._at, limit = at, at.next_limit
        self._is_plain = limit == PLAIN
        self.num_rests = min(at.num_rests, MOST_RESTS)
        if self.num_rests and self._drop_draft is not None:
            for sequence in sequences:
                num_left = sequence.num_prompt + sequence.sampling.max_new_tokens - len(sequence.tokens)
                is_useless = at.is_clearly_off or at.num_rests >= num_left
                if is_useless and sequence.has_draft and sequence.speculation == "auto":
                    self._drop_draft(sequence)
        return limit

    def _first(self, size: int, is_forced: bool) -> Comparison:
        smaller = [known for known, forced in self._sizes if forced == is_forced and known < size]
        watch = None if self._look_up is None else LookupWatch(self._look_up, size)
        return Comparison(self._sizes[max(smaller), is_forced] if smaller else None, size, watch)

    def observe(self, sequences: Sequence[TokenSequence], steps: Sequence[StepOutput], times: StepTimes) -> None:
        """See `Planner.observe`."""
        if self.num_rests:
            self.rested(sequences, 1, times.step_s)
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
            read_s = 0.0 if self._is_plain else self._reading.s_per_token(len(steps)) * tokens * len(steps)
            self._at.observe(times.step_s, read_s, tokens, is_first=is_first, drafts=num_drafts / len(steps))
        self._was_plain = self._is_plain

    def rested(self, sequences: Sequence[TokenSequence], num_steps: int, seconds: float) -> None:
        assert self._at is not None
        self._at.rest(num_steps, seconds, None if self._look_up is None else _first_to_watch(sequences))
        self._reading.decoded(num_steps * len(sequences))
        self._was_plain = True

    def read(self, num_tokens: int, draft_s: float | None) -> None:
        self._reading.read(num_tokens, draft_s)
        if draft_s is not None and self._waiting is not None:
            self._waiting.wait(draft_s)

    def expects_drafts(self, num_active: int) -> bool:
        size = bucket_of(num_active)
        known = self._sizes.get((size, False)) or self._first(size, False)
        return known.is_on or known.is_comparing

    def decisions(self) -> dict[str, Any]:
        """Returns by batch size whether drafts are on, and the measured gain: tokens/s over plain tokens/s."""
        return {
            f"{size}, some forced" if is_forced else str(size): known.json_from_comparison()
            for (size, is_forced), known in sorted(self._sizes.items())
        }

    def latest(self) -> dict[str, Any]:
        """Returns what `decisions` says of the batch size that decoded last.

        Where the budget drafted nothing that could be compared, the two numbers are those by which it decided so.
        """
        if self._latest is None:
            return {}
        found = self._latest.json_from_comparison()
        outlook = self._weighs.outlook if found["draft_token_cost"] is None and self._weighs is not None else None
        if outlook is not None:
            found |= {"draft_token_cost": outlook.cost, "accepted_share": outlook.accepted}
        return {**found, "is_expected": outlook is not None}
