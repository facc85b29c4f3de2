# SPDX-License-Identifier: Apache-2.0
"""One thread where other processes hold the cores: the decision on simulated times, and an engine that follows it."""

import numpy as np
import pytest

from speccompile.backends.onnxruntime.crowding import HOLD, PAUSE, SLOW, TURN, Crowding
from speccompile.core.jobs import StepCosts
from speccompile.core.specs import LOGITS
from tests.backends.test_engines import FORMS, TOKENS, feed

COSTS = StepCosts(((1, 2.0), (4, 3.0)))


def run(crowding, num_steps, all_threads, one_thread, seed=0, nodes=1):
    """Returns by step whether it had one thread; times are ratios to the recorded one, with a noise of 20 %."""
    rng, single = np.random.default_rng(seed), []
    for _ in range(num_steps):
        single.append(crowding.is_single)
        ratio = one_thread if crowding.is_single else all_threads
        crowding.observe(nodes, ratio * rng.lognormal(0, 0.2) * COSTS.ms(nodes) / 1e3)
    return single


@pytest.mark.parametrize("nodes", [1, 3, 4])
def test_all_threads_stay_where_steps_take_as_long_as_recorded(nodes):
    assert not any(run(Crowding(COSTS, "g"), 20_000, 0.7 * SLOW, 0.1, nodes=nodes))


def test_single_interruptions_change_nothing():
    crowding = Crowding(COSTS, "g")
    for step in range(3000):
        crowding.observe(1, (0.2 if step % (2 * TURN) == 7 else 0.002))
        assert not crowding.is_single


def test_slices_of_time_that_others_take_count_though_most_steps_are_fast():
    crowding, single = Crowding(COSTS, "g"), []
    for step in range(2000):
        single.append(crowding.is_single)
        crowding.observe(1, 0.004 if crowding.is_single else 0.010 if step % 3 == 0 else 0.002)
    assert single.index(True) == 2 * TURN and all(single[6 * TURN : HOLD])


def test_one_thread_is_used_while_others_hold_the_cores_and_no_longer():
    crowding = Crowding(COSTS, "g")
    single = run(crowding, 6000, 15.0, 3.0)
    assert single.index(True) == 2 * TURN == 16
    assert np.mean(single) > 0.95
    assert not all(single[6 * TURN :])  # all threads have had another turn
    single = run(crowding, HOLD + 8 * TURN, 1.0, 1.8, seed=1)
    assert not any(single[-TURN:])
    assert not any(run(crowding, PAUSE - TURN, 1.0, 1.8, seed=2))


def test_where_one_thread_is_slower_still_it_is_tried_rarely():
    single = run(Crowding(COSTS, "g"), 4 * PAUSE, 4.0, 8.0)
    assert 16 <= sum(single) <= 64


def test_other_work_that_ends_during_a_comparison_leaves_all_threads():
    crowding = Crowding(COSTS, "g")
    run(crowding, 3 * TURN, 15.0, 3.0)
    single = run(crowding, HOLD + 8 * TURN, 1.0, 1.8)
    assert single[0] is False and not single[-1]


@pytest.mark.parametrize(("quantization", "form"), FORMS)
def test_an_engine_changes_its_threads_and_no_number(open_engine, quantization, form):
    """Recorded times that no machine reaches: every step seems slow, so both numbers of threads have their turns."""
    tuning = {"threads": 2, "step_ms": {"1": 1e-5, "4": 2e-5}}
    engine = open_engine(quantization=quantization, form=form, tuning=tuning)
    plain = open_engine(quantization=quantization, form=form)
    sessions = set()
    for at, token in enumerate(TOKENS[: 6 * TURN]):
        sessions.add(id(engine.session))
        logits = engine.run(feed([token], at))[LOGITS]
        np.testing.assert_array_equal(logits, plain.run(feed([token], at))[LOGITS])
    assert len(sessions) == 2


def test_nothing_is_watched_without_recorded_times_or_with_one_thread(open_engine):
    for tuning in ({"threads": 2}, {"threads": 1, "step_ms": {"1": 1e-5}}, {"threads": 2, "step_ms": {"1": 0.0}}):
        engine = open_engine(tuning=tuning)
        session = engine.session
        for at, token in enumerate(TOKENS[: 2 * TURN]):
            engine.run(feed([token], at))
        assert engine.session is session
