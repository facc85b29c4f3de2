# SPDX-License-Identifier: Apache-2.0
"""The soak test finds servers that mix or lose answers, or leak."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("httpx")

from bench.server_soak.load import Load, Outcome, Task, percentile_ms, run_load
from bench.server_soak.main import faults_from_phase

TASKS = [Task("a", 2, "xy"), Task("b", 2, "zw")]


class FakeServer:
    name = "fake"

    def __init__(self, answer=lambda task: task.text, refusal=None):
        self.answer, self.refusal = answer, refusal

    def pids(self):
        return [os.getpid()]

    async def ask(self, client, task, streams, most_step_outputs):
        await asyncio.sleep(0)
        text = self.answer(task)
        if text is None:
            return Outcome(error="lost")
        return Outcome(text[:1] if most_step_outputs is not None else text, 0.001, 2)

    async def ask_wrongly(self, client, rng):
        await asyncio.sleep(0)
        return self.refusal

    def counts(self):
        return {"active": 0.0, "queued": 0.0, "prefilling": 0.0, "taken": 5.0, "finished": 5.0}

    def stop(self):
        return 0


def soak(server):
    load = Load(clients=4, seconds=0.05, cancels=0.3, malformed=0.2)
    return asyncio.run(run_load(server, TASKS, load)).json_from_report()


def test_a_good_server_has_no_faults():
    report = soak(FakeServer())
    assert faults_from_phase(report, FakeServer().counts()) == []
    assert report["ends"].keys() == {"right", "cancelled", "refused"} and report["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("server", "fault"),
    [
        (FakeServer(lambda task: "xy"), "'xy' is not 'zw'"),
        (FakeServer(lambda task: "x?"), "'x?' is not 'xy'"),
        (FakeServer(lambda task: "?"), "mixed: '?' is no beginning of"),
        (FakeServer(lambda task: None), "lost"),
        (FakeServer(refusal="200 where 400 had to come"), "200 where 400 had to come"),
    ],
)
def test_the_faults_of_a_bad_server_are_reported(server, fault):
    assert any(fault in found for found in faults_from_phase(soak(server), server.counts()))


@pytest.mark.parametrize(
    ("change", "fault"),
    [({"active": 1.0}, "left in the server: {'active': 1.0}"), ({"finished": 4.0}, "5 requests were taken, 4 ended")],
)
def test_leaks_are_reported(change, fault):
    assert faults_from_phase(soak(FakeServer()), {**FakeServer().counts(), **change}) == [fault]


def test_memory_that_grows_is_reported():
    report = {**soak(FakeServer()), "resident_mib": [50.0, 100.0, 110.0, 120.0]}
    assert faults_from_phase(report, FakeServer().counts()) == ["memory grew from 100.0 to 120.0 MiB"]


def test_percentiles():
    values = [i / 1000 for i in range(1, 101)]
    assert percentile_ms(values, 0.5) == 51 and percentile_ms(values, 0.99) == 100
    assert percentile_ms([0.004], 0.99) == 4 and percentile_ms([], 0.5) is None


def test_a_server_does_not_outlive_a_killed_soak():
    """Its memory of a GPU would be missing for what runs next."""
    code = "import os, subprocess; from bench.server_soak.serve import end_with_parent as end\n"
    code += "quiet = {'stdout': subprocess.DEVNULL, 'start_new_session': True}\n"
    code += "child = subprocess.Popen(['sleep', '600'], preexec_fn=end, **quiet)\n"
    code += "print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    status, deadline = Path(f"/proc/{int(done.stdout)}/status"), time.monotonic() + 10
    while status.exists() and "zombie" not in status.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not status.exists() or "zombie" in status.read_text()
