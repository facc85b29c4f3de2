# SPDX-License-Identifier: Apache-2.0
"""When a view is shrunk and kept caches are dropped; shared prefixes; counters and histograms."""

from types import SimpleNamespace

import numpy as np
import pytest

from speccompile.backends.feeds import bucket_rows
from speccompile.runtime.requests import StepOutput
from speccompile.runtime.slot_allocator import (
    COPIES,
    EVERY,
    HEADROOM,
    MIN_SHARED,
    ROW_PRICE,
    Kept,
    ViewKeeper,
    best_match,
    num_shared,
)
from speccompile.runtime.stats import Counters, Histogram

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


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("at", [0, 1, 62, 63, 64, 128, 199, 200])
def test_shared_tokens_are_counted_up_to_the_first_that_differs(length, at):
    first = np.random.default_rng(length).integers(0, 9, 200).tolist()
    second = [*first[:at], 99, *first[at + 1 :]][:length]
    assert num_shared(first, second) == num_shared(second, first) == min(at, length)


def test_the_longest_match_is_taken_and_short_ones_are_not():
    prompt = list(range(100))
    held = [(0, prompt[:MIN_SHARED]), (3, [*prompt[:50], 0]), (2, prompt[: MIN_SHARED - 1]), (1, prompt[:30])]
    assert best_match(prompt, held) == (3, 50)
    assert best_match(prompt, held[:1]) == (0, MIN_SHARED)
    assert best_match(prompt, held[2:3]) == (-1, 0) == best_match(prompt, [])
    assert best_match([7, *prompt], held) == (-1, 0)
    assert best_match(prompt, [(4, [*prompt, 5])]) == (4, 98)  # the last two are read anew
    assert best_match(prompt[: MIN_SHARED + 1], [(4, prompt)]) == (-1, 0)


def test_a_histogram_counts_up_to_each_bound():
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 5.1, 100):
        histogram.add(value)
    assert histogram.json_from_histogram() == {"bounds": [1, 2, 5], "counts": [2, 1, 1, 2], "sum": 113.1, "count": 6}


def test_counters_report_acceptance_by_position():
    counters = Counters()
    steps = [StepOutput(0, "", [1, 2, 3], 4, 2), StepOutput(1, "", [9], finish_reason="length")]
    counters.count_step(steps, 0.004)
    stats = {"queue_ms": 3.0, "time_to_first_token_ms": None, "time_per_token_ms": 7.0}
    counters.count_end("length", stats, 12.0, {(4, 2): 1, (3, 3): 2, (0, 0): 5})
    told = counters.json_from_counters()
    assert (told["num_tokens"], told["num_draft_tokens"], told["num_accepted"]) == (4, 4, 2)
    assert told["mean_acceptance_length"] == 2.0 and told["num_finished"] == {"length": 1}
    assert told["num_tried_by_position"] == [3, 3, 3, 0] and told["num_accepted_by_position"] == [3, 3, 2, 0]
    counts = {name: h["count"] for name, h in told["histograms"].items()}
    assert counts == {
        "batch": 1,
        "step_ms": 1,
        "queue_ms": 1,
        "time_to_first_token_ms": 0,
        "time_per_token_ms": 1,
        "request_ms": 1,
    }
