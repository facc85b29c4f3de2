# SPDX-License-Identifier: Apache-2.0
"""Rows of an engine's caches by slot: how many are in use, and how they change slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speccompile.core.jobs import PREFILL_CHUNK
from speccompile.core.specs import GraphSpec
from speccompile.core.tree import Ints

if TYPE_CHECKING:
    from speccompile.core.protocols import Engine

ROWS_STEP = 128  # of sliding caches: a multiple of the steps in which views grow


def rows_of_slot(spec: GraphSpec, seq_len: int, max_nodes: int, *, slides: bool) -> int:
    """Returns how many rows an engine's caches need for a sequence.

    That is all rows of the sequence, and those of a step's nodes after the last one, which pad ragged batches. Where
    every layer has a window, the rows that later ones see are enough, with what is written before rows can be dropped:
    a chunk of the prompt; the rows of a step.

    Args:
        spec: of the graph.
        seq_len: rows that a sequence may use.
        max_nodes: most nodes of a step.
        slides: the backend's engines have `slide_slot`.
    """
    num = seq_len + max_nodes + spec.rows_written_ahead
    if not (spec.window and slides):
        return num
    needed = spec.window - 1 + PREFILL_CHUNK + rows_of_step(max_nodes)
    return min(num, -(-needed // ROWS_STEP) * ROWS_STEP)


def rows_of_step(max_nodes: int) -> int:
    """Returns the most rows that a draft writes from one verdict to the next, from the first that is not read yet on.

    Those are the accepted path and masks; or the path, drafts that stay in place, and the nodes of an expansion.
    """
    return 3 * max_nodes


class CacheRows:
    """Moves what an engine's caches hold from slot to slot.

    Rows stay with the slot, not with its sequence: a slot keeps the rows of a sequence that has ended, for the next
    one that begins with the same tokens.

    Args:
        engine: owner of the caches.
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
