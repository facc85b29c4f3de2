# SPDX-License-Identifier: Apache-2.0
"""What a proposer promises, and the rows of the caches that it owns: how they change slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from speccompile.core.protocols import Batch, Engine, Outputs, StepTimes, TokenSequence
from speccompile.core.tree import Ints, TokenTree, Verdict


class CacheRows:
    """Moves what an engine's caches hold from slot to slot.

    Rows stay with the slot of a sequence that has ended, for the next one that begins with the same tokens.

    Args:
        lengths: [max_slots] rows in use by slot. The caller writes it in place as rows are added and dropped.
    """

    def __init__(self, engine: Engine, lengths: list[int] | Ints) -> None:
        self.engine, self.lengths = engine, lengths

    def move(self, source: int, dest: int) -> None:
        """Copies all rows of slot `source` to slot `dest`; its former rows are void."""
        self.copy(source, dest, int(self.lengths[source]))

    def copy(self, source: int, dest: int, num_rows: int) -> None:
        """Copies the first `num_rows` rows of slot `source` to slot `dest`, or as many as there are."""
        num = min(int(self.lengths[source]), num_rows)
        self.engine.move_slot(source, dest, num)
        self.lengths[dest] = num

    def reusable(self, slot: int, num_rows: int) -> int:
        """Returns how many of the first `num_rows` tokens of a slot a sequence can go on from: `States.reusable`."""
        states = self.engine.states
        return num_rows if states is None else states.reusable(slot, num_rows)

    def resume(self, slot: int, num_rows: int) -> None:
        """Keeps the first `num_rows` rows of a slot: 0, or a number that `reusable` returned."""
        if (states := self.engine.states) is not None:
            states.resume(slot, num_rows)
        self.lengths[slot] = num_rows

    def take_snapshot(self, slot: int) -> None:
        """Copies what of a slot cannot be cut to fewer rows; see `States.take_snapshot`."""
        if (states := self.engine.states) is not None:
            states.take_snapshot(slot)

    def swap(self, first: int, second: int) -> None:
        """Exchanges the rows of two slots."""
        lengths = self.lengths
        self.engine.swap_slots(first, second, int(max(lengths[first], lengths[second])))
        lengths[first], lengths[second] = lengths[second], lengths[first]


class Proposer(Protocol):
    """Drafts tokens. It sees the target's tokens, verdicts and, if asked for, hidden states, and nothing else of it.

    The order of calls for a slot is start, prefill (once per chunk of all tokens but the last), then propose and commit
    in turn. Where reading the prompt gives the first new token, that is the last when the last chunk comes. Slots may
    start, end and move between two steps, and prompts may be read in parts: `flush` comes before each part. Any call
    may be the last one: after an abandoned run comes `start`.

    Its state for a sequence is kept on the sequence (`TokenSequence.draft_state`) and travels with it. Rows in caches
    of engines stay with their slot: the runtime moves, exchanges and copies those that `caches` names.
    """

    # It reads missed tokens before it drafts: it needs no `prefill`, `skip` or `flush`.
    catches_up: bool
    # Where a batch may draw (`Batch.may_draw`), it draws drafts from its own distribution: their number changes texts.
    may_draw: bool

    @property
    def caches(self) -> Sequence[CacheRows]:
        """The caches that the proposer owns."""
        ...

    def start(self, slot: int, sequence: TokenSequence) -> None:
        """Starts a new sequence in slot `slot`; what the slot held before is void."""
        ...

    def prefill(self, slot: int, sequence: TokenSequence, tokens: Ints, start: int, outputs: Outputs) -> None:
        """Takes the target's outputs for `tokens` [1, nodes] of the prompt, the first at position `start`."""
        ...

    def propose(self, batch: Batch) -> TokenTree:
        """Returns drafts for every slot; node 0 is the root, and no path is deeper than the slot's `max_drafts`."""
        ...

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        """Takes the verdict on the drafts. `batch` still holds the tokens that `tree` was made from.

        `outputs` of the target in that step are valid during the call.
        """
        ...

    def skip(self, batch: Batch, verdict: Verdict, outputs: Outputs) -> None:
        """Takes the outputs of a step in which it drafted nothing: `commit` is not called.

        `batch` still holds the tokens that were scored; `outputs` are valid during the call.
        """
        ...

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        """Takes the times of a step, with drafts or without, unless drafts may be drawn or costs must stay as recorded.

        Args:
            num_nodes: that the target scored in each, root and padding included.
        """
        ...

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        """As `start`, but slot and target still have rows of the sequence's first tokens; returns how many may be kept.

        `prefill` starts there.

        Args:
            num_rows: how many tokens these are; at most all of the prompt but its last two.
        """
        ...

    def flush(self) -> None:
        """Reads what is left of the target's last outputs: its next run, for other sequences, makes them void."""
        ...
