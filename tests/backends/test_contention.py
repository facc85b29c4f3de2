# SPDX-License-Identifier: Apache-2.0
"""Other work on the cores: measurements beside it are detected, and engines then run in one thread."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speccompile.backends import machine
from speccompile.backends.machine import WaitClock, is_disturbed
from speccompile.backends.onnxruntime.crowding import HOLD, PAUSE, SLOW, TURN, Crowding
from speccompile.core.jobs import StepCosts
from speccompile.core.specs import LOGITS
from tests.backends.test_engines import FORMS, TOKENS, feed


def write_task(root: Path, name: str, ran: int, waited: int) -> None:
    (root / name).mkdir(parents=True, exist_ok=True)
    (root / name / "schedstat").write_text(f"{ran} {waited} 17\n")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "_TASKS", tmp_path / "task")
    monkeypatch.setattr(machine, "_STAT", tmp_path / "stat")
    (tmp_path / "stat").write_text("cpu 100 0 100 800 0 0 0 10 0 0\ncpu0 0\n")
    write_task(tmp_path / "task", "1", 1000, 500)
    write_task(tmp_path / "task", "2", 1000, 0)
    return tmp_path


def test_the_share_counts_all_threads_since_the_clock_was_made(proc):
    clock = WaitClock()
    assert clock.share() == 0.0
    write_task(proc / "task", "1", 1600, 800)  # 600 run, 300 waited
    write_task(proc / "task", "2", 1300, 100)  # 300 run, 100 waited
    assert clock.share() == round(400 / 1300, 3)


def test_threads_that_end_and_begin_meanwhile_hide_nothing_of_the_others(proc):
    clock = WaitClock()
    (proc / "task" / "2" / "schedstat").unlink()  # as it is while a thread ends
    write_task(proc / "task", "1", 1600, 800)  # 600 run, 300 waited
    write_task(proc / "task", "3", 90, 10)
    assert clock.share() == 0.31


def test_time_that_a_hypervisor_took_counts_too(proc):
    clock = WaitClock()
    write_task(proc / "task", "1", 2000, 500)
    (proc / "stat").write_text("cpu 130 0 110 830 0 0 0 40 0 0\n")
    assert clock.share() == 0.3


def test_a_kernel_that_does_not_count_gives_zero(proc):
    clock = WaitClock()
    for name in "12":
        (proc / "task" / name / "schedstat").unlink()
    (proc / "stat").unlink()
    assert clock.share() == 0.0


@pytest.mark.usefixtures("with_wait_share")
def test_a_record_is_disturbed_above_the_bound_alone():
    most = machine.MAX_WAIT_SHARE
    assert [is_disturbed(r) for r in ({}, {"wait_share": most}, {"wait_share": most + 0.01})] == [False, False, True]


@pytest.mark.parametrize(("load", "busy"), [(0.2, False), (1.0, False), (1.3, True)])
def test_a_machine_is_busy_above_half_its_cpus(monkeypatch, load, busy):
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    assert machine.is_machine_busy() is busy


@pytest.mark.live
def test_a_process_on_a_busy_machine_is_disturbed():
    """The real kernel: twice as many spinning threads as CPUs wait about half of their time."""
    import os
    import subprocess
    import sys

    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel does not count waiting")
    code = (
        "import os, time\n"
        "from speccompile.backends.machine import WaitClock\n"
        "clock = WaitClock(); end = time.monotonic() + 0.6\n"
        "while time.monotonic() < end: pass\n"
        "print(clock.share())"
    )
    cpu = min(os.sched_getaffinity(0))
    pinned: dict[str, Any] = {"preexec_fn": lambda: os.sched_setaffinity(0, {cpu})}
    crowd = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, **pinned) for _ in "abcd"
    ]
    shares = [float(child.communicate()[0]) for child in crowd]
    assert sum(shares) / len(shares) > 0.3


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


@pytest.mark.parametrize(("quantization", "form", "kv_cache"), FORMS)
def test_an_engine_changes_its_threads_and_no_number(open_engine, quantization, form, kv_cache):
    """Recorded times that no machine reaches: every step seems slow, so both numbers of threads have their turns."""
    tuning = {"threads": 2, "step_ms": {"1": 1e-5, "4": 2e-5}}
    kind = {"quantization": quantization, "form": form, "kv_cache": kv_cache}
    engine, plain = open_engine(**kind, tuning=tuning), open_engine(**kind)
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
