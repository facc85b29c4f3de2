# SPDX-License-Identifier: Apache-2.0
"""Measurements beside other work are detected by the kernel's account of waiting threads."""

from pathlib import Path
from typing import Any

import pytest

from speccompile.backends import machine
from speccompile.backends.machine import WaitClock, is_disturbed


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
