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
        engines: all of a bundle.
        allocator: of the scheduler.
        max_rows: cache rows that a sequence may use.
    """

    def __init__(self, engines: Sequence[TimedEngine], places: SlotAllocator, max_rows: int) -> None:
        self.engines, self.places, self.max_rows = tuple(engines), places, max_rows
        self.num_shrinks = self.num_dropped = 0
        self._wasted = self._steps = 0

    def after_step(self) -> None:
        """Counts a decoded step, and checks the views after every `EVERY` steps."""
        self._steps += 1
        if self._steps % EVERY == 0:
            self._look()

    def _look(self) -> None:
        places, view = self.places, max(engine.view_rows for engine in self.engines)
        lengths, num = places.verifier.lengths, len(places.active)
        used = max(lengths[:num].tolist(), default=0)
        if places.reading is not None:
            used = max(used, places.reading.slot.num_prompt)
        needed = bucket_rows(used + HEADROOM, self.max_rows)
        if needed >= view or num == 0:
            self._wasted = 0
            return
        self._wasted += EVERY * num * (view - needed)
        in_the_way = [place for place, tokens in places.kept.items() if len(tokens) > needed]
        price = COPIES * places.max_places * view + ROW_PRICE * sum(int(lengths[place]) for place in in_the_way)
        if self._wasted < price:
            return
        for place in in_the_way:
            places.kept.drop(place)
        for engine in self.engines:
            if engine.view_rows:
                engine.shrink(needed)
        self.num_shrinks += 1
        self.num_dropped += len(in_the_way)
        self._wasted = 0
