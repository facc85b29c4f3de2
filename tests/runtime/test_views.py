# SPDX-License-Identifier: Apache-2.0
"""When a view that is too long is shrunk, and which kept caches are dropped for it."""

from types import SimpleNamespace

import numpy as np

from speccompile.backends.kv_rows import bucket_rows
from speccompile.runtime.slot_allocator import COPIES, EVERY, HEADROOM, ROW_PRICE, Kept, ViewKeeper

MAX_ROWS, PLACES = 8192, 4


class GrowingEngine:
    """An engine with a view, or without."""

    def __init__(self, view_rows):
        self.view_rows, self.shrunk = view_rows, []

    def shrink(self, rows):
        self.view_rows = bucket_rows(rows, MAX_ROWS)
        self.shrunk.append(rows)


def make(lengths, num_active, kept, view_rows, reading=None):
    held = Kept()
    for slot in kept:
        held.put(slot, [0] * lengths[slot])
    allocator = SimpleNamespace(
        verifier=SimpleNamespace(lengths=np.array(lengths)),
        active=[None] * num_active,
        reading=reading,
        kept=held,
        max_slots=PLACES,
    )
    engines = [GrowingEngine(view_rows), GrowingEngine(0)]
    return ViewKeeper(engines, allocator, MAX_ROWS), engines, held


def steps_until(keeper, is_there, most=100_000):
    for step in range(most):
        if is_there():
            return step
        if step % EVERY == EVERY - 1:
            keeper.check()
    return None


def test_a_view_shrinks_once_its_waste_has_cost_as_much():
    keeper, (engine, other), _ = make([100, 0, 0, 0], 1, (), 4096)
    needed = bucket_rows(100 + HEADROOM, MAX_ROWS)
    num = steps_until(keeper, lambda: engine.shrunk)
    wasted = num * (4096 - needed)
    assert COPIES * PLACES * 4096 <= wasted <= COPIES * PLACES * 4096 + EVERY * 4096
    assert engine.shrunk == [needed] and other.shrunk == [] and keeper.num_shrinks == 1
    assert steps_until(keeper, lambda: len(engine.shrunk) > 1, 5000) is None  # nothing is wasted any more


def test_a_long_kept_cache_goes_when_it_has_cost_as_much_as_to_read_it_anew():
    keeper, (engine, _), held = make([100, 3000, 90, 0], 1, (1, 2), 4096)
    needed = bucket_rows(100 + HEADROOM, MAX_ROWS)
    num = steps_until(keeper, lambda: engine.shrunk)
    price = COPIES * PLACES * 4096 + 3000 * ROW_PRICE
    assert price <= num * (4096 - needed) <= price + EVERY * 4096
    assert 1 not in held and 2 in held and keeper.num_dropped == 1


def test_nothing_is_shrunk_that_is_in_use_or_about_to_be():
    for lengths, num_active, reading in (
        ([3900, 10, 0, 0], 1, None),
        ([10, 0, 0, 0], 1, 3900),
        ([10, 0, 0, 0], 0, None),
    ):
        output = None if reading is None else SimpleNamespace(num_prompt=reading)
        keeper, (engine, _), _ = make(lengths, num_active, (), 4096, output)
        assert steps_until(keeper, lambda engine=engine: engine.shrunk, 5000) is None


def test_engines_without_a_view_lose_nothing():
    keeper, engines, held = make([100, 3000, 90, 0], 1, (1, 2), 0)
    assert steps_until(keeper, lambda: len(held) < 2, 5000) is None and engines[0].shrunk == []
