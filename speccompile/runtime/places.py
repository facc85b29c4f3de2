# SPDX-License-Identifier: Apache-2.0
"""Who sits where: places 0 .. active - 1 decode, one behind them may be reading its prompt, the others are free."""

from __future__ import annotations

from speccompile.core.protocols import Proposer
from speccompile.runtime.slots import Slots
from speccompile.runtime.tickets import Output
from speccompile.runtime.verifier import Verifier


class Places:
    """The places of an engine.

    Steps run over a contiguous range of places, so a sequence that ends is replaced by the last one that decodes.

    Args:
        verifier: the target.
        proposer: the drafts.
        slots: what the loop's steps are given; kept in accord with `active`.
    """

    def __init__(self, verifier: Verifier, proposer: Proposer, slots: Slots) -> None:
        self.verifier, self.proposer, self.slots = verifier, proposer, slots
        self.max_places = slots.max_slots
        self.active: list[Output] = []
        self.reading: Output | None = None
        self.reading_place = 0

    @property
    def has_room(self) -> bool:
        """Whether a prompt could begin to be read."""
        return self.reading is None and len(self.active) < self.max_places

    def open(self, output: Output) -> None:
        """Give a place to an output whose prompt is to be read."""
        self.reading, self.reading_place = output, len(self.active)
        self.verifier.lengths[self.reading_place] = 0
        self.proposer.start(self.reading_place, output.slot)

    def join(self) -> None:
        """The prompt is read: decode from the next step on."""
        output, place = self.reading, len(self.active)
        assert output is not None
        self._move(self.reading_place, place)
        self.reading = None
        self.active.append(output)
        self.slots.slots.append(output.slot)
        self.slots.changed()

    def leave(self, output: Output) -> None:
        """Free the place of an output that decodes or reads."""
        if output is self.reading:
            self.reading = None
            return
        place, last = self.active.index(output), len(self.active) - 1
        self._move(last, place)
        self.active[place], self.slots.slots[place] = self.active[last], self.slots.slots[last]
        self.active.pop()
        self.slots.slots.pop()
        self.slots.changed()

    def clear(self) -> None:
        """Nobody has a place."""
        self.active.clear()
        self.slots.slots.clear()
        self.slots.changed()
        self.reading = None

    def _move(self, source: int, dest: int) -> None:
        if source != dest:
            self.verifier.move(source, dest)
            self.proposer.move(source, dest)
