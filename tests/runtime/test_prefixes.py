# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from speccompile.runtime.requests import StepOutput
from speccompile.runtime.slot_allocator import MIN_SHARED, Kept, best_match, num_shared
from speccompile.runtime.stats import Counters, Histogram


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


def test_kept_caches_age_by_use_and_keep_their_age_when_they_move():
    kept = Kept()
    for slot in (4, 2, 3):
        kept.put(slot, [slot])
    kept.use(4)
    assert kept.oldest() == 2 and len(kept) == 3 and 4 in kept
    kept.rename(2, 7)
    assert kept.oldest() == 7 and 2 not in kept and dict(kept.items())[7] == [2]
    assert kept.drop(7) == [2] and kept.oldest() == 3
    kept.clear()
    assert len(kept) == 0


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
