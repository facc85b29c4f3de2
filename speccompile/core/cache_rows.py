# SPDX-License-Identifier: Apache-2.0
"""Rows of an engine's caches by slot: how many are in use, and how they change slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speccompile.core.tree import Ints

if TYPE_CHECKING:
    from speccompile.core.protocols import Engine


class CacheRows:
    """Moves what an engine's caches hold from slot to slot.

    Rows stay with the slot, not with its sequence: a slot keeps the rows of a sequence that has ended, for the next
    one that begins with the same tokens.

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
        lengths = self.lengths
        self.engine.swap_slots(first, second, int(max(lengths[first], lengths[second])))
        lengths[first], lengths[second] = lengths[second], lengths[first]
