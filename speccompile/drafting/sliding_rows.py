# SPDX-License-Identifier: Apache-2.0
"""Cache rows of a draft; those of one whose layers all have a window slide, so that the cache can be short.

Row r of a slot's cache then has the position `firsts[slot]` + r. Only rows of accepted positions are in use: nodes of a
tree and masks are written after them, and overwritten by the next run. Before a step without room, the last `window -
1` rows in use move to its front. A later position p sees rows from p - window + 1 on and is at least the number of rows
in use, so it sees the rows that a cache which keeps all would show. `rows_of_slot` suffices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speccompile.core.jobs import PREFILL_CHUNK
from speccompile.core.proposer import CacheRows
from speccompile.core.protocols import Engine
from speccompile.core.specs import LENGTHS, GraphSpec
from speccompile.core.tree import Ints
from speccompile.graph_kinds.features import FIRST_POSITIONS

ROWS_STEP = 128  # of sliding caches: that in which views grow


def rows_of_slot(spec: GraphSpec, seq_len: int, max_nodes: int, *, slides: bool) -> int:
    """Returns how many rows an engine's caches need for a sequence and a step's nodes after the last row.

    Where every layer has a window, it is those that later rows see, a chunk of the prompt, and the rows of a step.
    """
    num = seq_len + max_nodes + spec.rows_written_ahead
    if not (spec.window and slides):
        return num
    needed = spec.window - 1 + PREFILL_CHUNK + rows_of_step(max_nodes)
    return min(num, -(-needed // ROWS_STEP) * ROWS_STEP)


def rows_of_step(max_nodes: int) -> int:
    """Returns the most rows that a draft writes between two verdicts: the path, then masks, or drafts and nodes."""
    return 3 * max_nodes


class GrowingRows(CacheRows):
    """Rows of caches that keep all rows of their sequences."""

    @property
    def most_rows(self) -> int:
        """The most rows that the cache can hold after those that it must keep."""
        return self.engine.max_rows

    def feeds(self, starts: Sequence[int], first_slot: int = 0) -> dict[str, Ints]:
        """Returns the inputs by which a run writes its nodes from the positions `starts` on, by slot."""
        return {LENGTHS: np.array(starts, dtype=np.int64)}

    def make_room(self, slot: int, num_rows: int) -> None:
        """Makes sure that the cache can hold so many rows after those in use."""

    def cut(self, slot: int, num_rows: int) -> None:
        """Keeps the first `num_rows` rows of a slot, or fewer: those from `lengths[slot]` on are to be read again."""
        self.lengths[slot] = max(min(int(self.lengths[slot]), num_rows), 0)


class SlidingRows(GrowingRows):
    """Rows of caches that keep what later positions see; `lengths` count rows that have slid out, too."""

    def __init__(self, engine: Engine, lengths: list[int] | Ints) -> None:
        super().__init__(engine, lengths)
        self.firsts = [0] * engine.max_slots  # by slot, the position of row 0
        self._least = [0] * engine.max_slots  # by slot, the fewest rows to which it can be cut
        self._num_seen = engine.spec.window - 1  # rows before its own that a position sees
        # K and V of a layer are made of what the layer before it has seen, so that many rows make those of all exact.
        self._reach = self._num_seen * (len(engine.spec.caches) // 2)

    @property
    def most_rows(self) -> int:
        return self.engine.max_rows - self._num_seen

    def feeds(self, starts: Sequence[int], first_slot: int = 0) -> dict[str, Ints]:
        firsts = np.array(self.firsts[first_slot : first_slot + len(starts)], dtype=np.int64)
        return {LENGTHS: np.array(starts, dtype=np.int64) - firsts, FIRST_POSITIONS: firsts}

    def make_room(self, slot: int, num_rows: int) -> None:
        length = int(self.lengths[slot])
        num_held = length - self.firsts[slot]
        num_kept = min(num_held, self._num_seen)
        if num_held + num_rows > self.engine.max_rows and num_held > num_kept:
            self.engine.slide_slot(slot, num_held - num_kept, num_kept)
            self.firsts[slot] = length - num_kept
            self._least[slot] = max(self._least[slot], length)

    def cut(self, slot: int, num_rows: int) -> None:
        num = max(num_rows, 0)
        if num >= self._least[slot]:
            self.lengths[slot] = min(int(self.lengths[slot]), num)
            return
        start = max(num - self._reach, 0)
        self.lengths[slot] = self.firsts[slot] = start
        self._least[slot] = num if start else 0

    def copy(self, source: int, dest: int, num_rows: int) -> None:
        self.engine.move_slot(source, dest, int(self.lengths[source]) - self.firsts[source])
        for held in (self.lengths, self.firsts, self._least):
            held[dest] = held[source]
        self.cut(dest, num_rows)

    def swap(self, first: int, second: int) -> None:
        num = max(int(self.lengths[slot]) - self.firsts[slot] for slot in (first, second))
        self.engine.swap_slots(first, second, num)
        for held in (self.lengths, self.firsts, self._least):
            held[first], held[second] = held[second], held[first]


def draft_rows(engine: Engine, lengths: list[int], num_rows: int) -> GrowingRows:
    """Returns the rows of a draft's caches: sliding ones where these are shorter than a sequence needs."""
    is_short = engine.spec.window > 0 and engine.max_rows < num_rows
    return SlidingRows(engine, lengths) if is_short else GrowingRows(engine, lengths)
