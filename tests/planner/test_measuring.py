# SPDX-License-Identifier: Apache-2.0
"""Stacks hold our operators, joined as in a bundle; what is measured predicts products of every kind."""

from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from speccompile.backends.onnxruntime.kernel_library import sequences_path
from speccompile.planner import measuring
from speccompile.planner.machine import BITS, CACHES, INT8_CACHES, OTHER_BITS
from speccompile.planner.stacks import (
    CONTEXT,
    Probe,
    Stack,
    Timed,
    caches,
    launches,
    linears,
    open_stack,
    states,
    times_by_rows,
)
from tests.plugins.cpu_lab import needs_compiler

pytestmark = [needs_compiler, pytest.mark.plan]


def test_stacks_have_the_sizes_that_they_count():
    linear = linears("Int8", 3 << 20)
    shapes = [(call.attributes["num_in"], call.attributes["num_out"]) for call in linear.calls]
    assert shapes == [(512, 768), (512, 512), (512, 2816), (1408, 512), (512, 768)] and linear.num == sum(
        a * b for a, b in shapes
    )
    for kind in (CACHES, INT8_CACHES):
        stack = caches(kind, 3 << 20)
        read = stack.num * OTHER_BITS[kind][0] / 8
        held = sum(array.nbytes for name, array in stack.feeds(8).items() if name.startswith(("k_", "v_")))
        assert 3 << 20 <= read < 4 << 20 and held == read * (CONTEXT + 16) / CONTEXT  # 16: room for most queries
    assert states(1 << 20).num == 2 * 4 * 8 * 64 * 64


def test_a_stack_is_opened_as_a_bundle_is(tmp_path):
    made = [linears("Int4", 3 << 20), caches(CACHES, 3 << 20), caches(INT8_CACHES, 3 << 20), states(3 << 20)]
    for number, stack in enumerate(made):
        path = tmp_path / str(number)
        session, feeds = open_stack(stack, 1, path), stack.feeds(stack.rows[-1])
        model = onnx.load(path / "graph.onnx", load_external_data=False)
        assert not model.functions, "bodies would run where a kernel is missing"
        if stack is not made[-1]:  # recurrent operators run one by one
            joined = onnx.load(sequences_path(path / "graph.onnx"), load_external_data=False)
            assert len(joined.graph.node) == 1 < len(model.graph.node)
        outputs = dict(zip([value.name for value in session.get_outputs()], session.run(None, feeds), strict=True))
        assert all(np.isfinite(array).all() for array in outputs.values())
        states_of = [name.removesuffix(".out") for name in outputs if name.removesuffix(".out") in feeds]
        assert len(states_of) == (0, 2, 4, 1.5)[number] * len(stack.calls)
        assert all(outputs[f"{name}.out"].shape == feeds[name].shape for name in states_of)


def test_a_measured_machine_knows_every_kind(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(measuring, "_SIZES", (1, 1 << 21))
    machine = measuring.measure_machine(1, seconds=0.0)
    assert set(machine.measured) == {*BITS, *OTHER_BITS} and measuring.kept_machine(1) == machine
    for kind in machine.measured:
        few, many = (machine.product_s(kind, 1e6, rows, 1e6) for rows in (1, 512))
        assert 0 < few < many
    assert 0 < machine.launch_s < 1e-3 and 0.1 < machine.host < 100


@pytest.fixture
def one_stack(tmp_path, monkeypatch):
    """All that is measured."""
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(measuring, "_SIZES", (1,))
    monkeypatch.setattr(measuring, "_KINDS", {"float32": measuring._KINDS["float32"]})


def test_time_outside_of_the_engines_is_that_of_this_machine(one_stack, monkeypatch):
    monkeypatch.setattr(measuring, "_HOST_RUNS", 2)
    monkeypatch.setattr(measuring, "_work_of_host", partial(sleep, 1000 * measuring._HOST_S))
    assert measuring.measure_machine(1, seconds=0.0).host >= 1000


def test_a_machine_that_was_busy_says_so(one_stack, monkeypatch, with_wait_share):
    for share, says_so in ((0.36, True), (0.01, False)):
        monkeypatch.setattr(measuring.WaitClock, "share", lambda self, share=share: share)
        assert ("waited for a CPU in 36%" in measuring.measure_machine(1, seconds=0.0).source) == says_so


class _Ticks:
    """A clock of a machine that changes its speed: a run takes 10 ticks at full speed, the probe 1."""

    def __init__(self, *factors: float) -> None:
        self.now, self.factors, self.factor = 0.0, list(factors), 1.0

    def work(self, ticks: float) -> None:
        self.now += ticks * _TICK * self.factor

    def run(self) -> None:
        self.factor = self.factors.pop(0) if self.factors else self.factor
        self.work(10)

    def time(self, folder: Path, usual_s: float | None, patience_s: float) -> tuple[list[float], float]:
        probe = Probe(1, lambda: self.now, folder, usual_s)
        probe._run = lambda: self.work(1)
        beside, seconds = probe.time(self.run, patience_s=patience_s)
        return [round(one / _TICK, 6) for one in beside], round(seconds / _TICK, 6)


_TICK = 1e-2  # so that runs are long, and none is repeated to warm up


def test_runs_at_the_usual_speed_count(tmp_path):
    # Between two speeds the probe before a run differs from the one after it, so that the run does not count.
    phases = (1, 2, 2, 1, 1.15, 1, 1, 1, 2, 1, 1)
    assert _Ticks(*phases).time(tmp_path / "fast", _TICK, 60) == ([1, 1], 10)
    assert _Ticks(*phases, 2, 2, 2).time(tmp_path / "slow", 2 * _TICK, 60) == ([2, 2], 20)


def test_runs_that_fill_the_caches_do_not_count(tmp_path):
    class Cold(_Ticks):
        """After a probe the first three runs take three times as long."""

        num_cold = 3

        def run(self) -> None:
            self.work(0.3 if self.num_cold > 0 else 0.1)
            self.num_cold -= 1

        def work(self, ticks: float) -> None:
            super().work(ticks)
            self.num_cold = 3 if ticks == 1 else self.num_cold

    assert Cold().time(tmp_path, _TICK, 60) == ([1, 1], 0.1)


def test_more_rows_take_no_less_time(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(measuring, "_SIZES", (1,))

    def times(stack: Stack, threads: int, probe: Probe, folder: Path) -> dict[int, Timed]:
        took = {1: 2.0, 2: 9.0, 4: 8.0, 8: 3.0}  # 2 and 4 rows were held up
        return {rows: ((probe.usual_s, probe.usual_s), took.get(rows, 4.0)) for rows in stack.rows}

    monkeypatch.setattr(measuring, "times_by_rows", times)
    [(_, points)] = measuring.measure_machine(1, seconds=0.0).measured["int8"]
    first = points[0][1]
    assert [round(seconds / first, 6) for _, seconds in points[:5]] == [1, 1.5, 1.5, 1.5, 2]


def test_farther_numbers_take_no_less_time(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(measuring, "_SIZES", (1, 1 << 20, 2 << 20))
    took = iter((2.0, 5.0, 4.0))  # the second was held up

    def times(stack: Stack, threads: int, probe: Probe, folder: Path) -> dict[int, Timed]:
        seconds = next(took, 1.0) * stack.num
        return dict.fromkeys(stack.rows, ((probe.usual_s, probe.usual_s), seconds))

    monkeypatch.setattr(measuring, "times_by_rows", times)
    found = measuring.measure_machine(1, seconds=0.0).measured["float32"]
    assert [points[0][1] for _, points in found] == pytest.approx([2.0, 4.0, 4.0])


def test_another_speed_is_told(tmp_path):
    assert _Ticks(2).time(tmp_path, _TICK, 0.0) == ([2, 2], 20)


def test_what_had_another_speed_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(measuring, "_SIZES", (1,))
    asked: list[tuple[int, ...]] = []
    kinds = len(measuring._KINDS)

    def times(stack: Stack, threads: int, probe: Probe, folder: Path) -> dict[int, Timed]:
        probe._given = 2.0
        asked.append(tuple(stack.rows))
        found: dict[int, Timed] = dict.fromkeys(stack.rows, ((2.0, 2.1), 3.0))
        return found | ({32: ((1.0, 2.0), 2.0), 64: ((2.0, 4.0), 5.0)} if len(asked) == 1 else {})

    monkeypatch.setattr(measuring, "times_by_rows", times)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(monotonic=lambda: len(asked)))
    machine = measuring.measure_machine(1, clock=perf_counter, seconds=kinds + 2)
    # Then all of it while there is time, of which the fastest counts.
    assert asked[kinds] == (32, 64) and asked[kinds + 1] == asked[1] and machine.probe_s == 2.0
    [(_, points)] = machine.measured["float32"]
    assert len({seconds for _, seconds in points}) == 1


def test_seconds_are_of_one_run(tmp_path):
    ticks = iter(range(10**6))
    probe = Probe(1, lambda: float(next(ticks)), tmp_path / "probe")
    assert times_by_rows(launches(), 1, probe, tmp_path) == {1: ((1.0, 1.0), 1.0)}
