# SPDX-License-Identifier: Apache-2.0
"""Shrinks the views of caches after long sequences have left: some engines' steps work on every row of a view."""

from __future__ import annotations

from collections.abc import Sequence

from speccompile.backends.kv_rows import bucket_rows
from speccompile.runtime.slot_allocator import SlotAllocator
from speccompile.runtime.stats import TimedEngine

EVERY = 16  # steps between two checks
HEADROOM = 128  # rows that sequences may grow by before the view must grow again
ROW_PRICE = 1000  # cache rows that attention reads in the time of one prompt token, roughly
COPIES = 4  # shrinking a view and growing it again reads and writes it twice


class ViewKeeper:
    """Shrinks views where that saves time.

    The cost of rows that a view has too many is summed over the steps. Once it reaches the cost of shrinking the view,
    and of reading again the kept caches that are too long for it, the view is shrunk and these caches are dropped. So
    at most twice the least possible time is lost.

    Args:
        max_rows: cache rows that a sequence may use.
    """

    def __init__(self, engines: Sequence[TimedEngine], allocator: SlotAllocator, max_rows: int) -> None:
        self.engines, self.allocator, self.max_rows = tuple(engines), allocator, max_rows
        self.num_shrinks = self.num_dropped = 0
        self._wasted = 0

    def check(self) -> None:
        """Checks the views, once in `EVERY` steps."""
        allocator, view = self.allocator, max((engine.view_rows for engine in self.engines), default=0)
        lengths, num = allocator.verifier.lengths, len(allocator.active)
        used = max(lengths[:num].tolist(), default=0)
        if allocator.reading is not None:
            used = max(used, allocator.reading.num_prompt)
        needed = bucket_rows(used + HEADROOM, self.max_rows)
        if needed >= view or num == 0:
            self._wasted = 0
            return
        self._wasted += EVERY * num * (view - needed)
        too_long = [slot for slot, tokens in allocator.kept.items() if len(tokens) > needed]
        price = COPIES * allocator.max_slots * view + ROW_PRICE * sum(int(lengths[slot]) for slot in too_long)
        if self._wasted < price:
            return
        for slot in too_long:
            allocator.kept.drop(slot)
        for engine in self.engines:
            if engine.view_rows:
                engine.shrink(needed)
        self.num_shrinks += 1
        self.num_dropped += len(too_long)
        self._wasted = 0
