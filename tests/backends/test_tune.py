# SPDX-License-Identifier: Apache-2.0
"""Tuning records: made by measuring, reused on the same CPU, measured again on another."""

import json
from pathlib import Path
from typing import Any

import pytest

from speccompile.backends import measuring
from speccompile.backends.base import LoadJob
from speccompile.backends.measuring import NODE_COUNTS
from speccompile.backends.onnxruntime import tune
from speccompile.backends.onnxruntime.engine import session_options
from speccompile.bundle.format import weights_beside
from speccompile.errors import BuildError

pytestmark = pytest.mark.export


@pytest.mark.parametrize(("role", "node_counts"), [("target", NODE_COUNTS), ("draft", (1, 4))])
def test_a_graph_is_measured_in_a_child(compiled, role, node_counts):
    path, spec, _ = compiled("onnxruntime", "none", "fp32", role)
    record = tune.measure_graph(LoadJob(path, spec, threads=1), node_counts)
    assert record["threads"] == 1 and record["cpu"] == tune.cpu_name()
    assert list(record["step_ms"]) == [str(n) for n in node_counts]
    assert all(0 < ms < 1000 for ms in record["step_ms"].values())
    assert session_options(record).intra_op_num_threads == 1


def test_a_graph_that_cannot_be_opened_names_the_reason(tmp_path, compiled):
    _, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    (tmp_path / "graph.onnx").write_bytes(b"no graph")
    with pytest.raises(BuildError, match=r"tuning .*graph\.onnx: got exit code 1"):
        tune.measure_graph(LoadJob(tmp_path / "graph.onnx", spec, threads=1))


def test_a_record_of_another_cpu_is_measured_again_once(compiled, tmp_path, monkeypatch):
    path, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path))
    calls: list[Path] = []

    def measure(job: LoadJob, tries: int) -> dict[str, Any]:
        calls.append(job.path)
        return {"cpu": tune.cpu_name(), "threads": 2, "step_ms": {"1": 3.0}}

    monkeypatch.setattr(tune, "measure_graph", measure)
    here = {"cpu": tune.cpu_name(), "threads": 1}
    assert tune.adapt_tuning(LoadJob(path, spec, tuning=here)) == here
    assert tune.adapt_tuning(LoadJob(path, spec)) == {}
    elsewhere = {"cpu": "Z80 x1", "threads": 64}
    assert tune.adapt_tuning(LoadJob(path, spec, tuning=elsewhere))["threads"] == 2
    assert tune.adapt_tuning(LoadJob(path, spec, tuning=elsewhere))["step_ms"] == {"1": 3.0}
    assert calls == [path]
    assert tune.adapt_tuning(LoadJob(path, spec, tuning=elsewhere, others_bytes=7))["threads"] == 2
    assert calls == [path] * 2
    next(tmp_path.glob("tuning/*.json")).unlink()
    (kept,) = tmp_path.glob("tuning/*.json")
    assert json.loads(kept.read_text())["threads"] == 2


def test_a_cache_that_cannot_be_written_is_named_or_done_without(compiled, tmp_path, monkeypatch):
    path, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    (tmp_path / "file").write_text("mine")
    fresh = {"cpu": tune.cpu_name(), "threads": 2, "step_ms": {"1": 3.0}}
    monkeypatch.setattr(tune, "measure_graph", lambda *_, tries: fresh)
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="SPECCOMPILE_CACHE: got a file at"):
        tune.adapt_tuning(LoadJob(path, spec, tuning={"cpu": "Z80 x1"}))
    monkeypatch.delenv("SPECCOMPILE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert tune.adapt_tuning(LoadJob(path, spec, tuning={"cpu": "Z80 x1"})) == fresh


def test_thread_counts_end_with_all_usable_cpus(monkeypatch):
    for usable, wanted in ((1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6])):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=usable: set(range(n)))
        assert tune.thread_counts() == wanted and f" x{usable}" in tune.cpu_name()


def test_what_a_graph_takes_turns_with_is_all_in_the_folders_of_the_others(tmp_path):
    for name, sizes in {"target": (3, 50), "draft": (2, 40), "heads": (1,)}.items():
        (tmp_path / name / "scratch").mkdir(parents=True)
        for index, size in enumerate(sizes):
            (tmp_path / name / f"{index}.onnx").write_bytes(bytes(size))
    files = [tmp_path / name / "0.onnx" for name in ("target", "draft", "heads")]
    assert weights_beside(files[0], files) == 43 and weights_beside(files[1], files) == 54
    assert weights_beside(files[0], files[:1]) == 0


def test_other_weights_are_read_before_every_measured_step(monkeypatch, compiled):
    _, graph_spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    events: list[str] = []

    class Others:
        def sum(self) -> None:
            events.append("read")

    class Engine:
        spec, max_rows, max_slots = graph_spec, 64, 1

        def run(self, feeds: Any) -> None:
            events.append("run")

    monkeypatch.setattr(measuring.np, "ones", lambda num, dtype: events.append(str(num)) or Others())
    measuring.measure_steps(Engine(), others_bytes=1 << 40)  # type: ignore[arg-type]
    warm, (size, *rest) = events[: (at := events.index(str(measuring.MAX_OTHERS_BYTES // 8)))], events[at:]
    assert size and warm == ["run"] * len(NODE_COUNTS)
    assert rest == ["read", "run"] * (len(rest) // 2) and len(rest) >= 2 * measuring.MIN_REPEATS * len(NODE_COUNTS)


def disturbed(share: float, threads: int = 1) -> dict[str, Any]:
    return {"cpu": tune.cpu_name(), "threads": threads, "step_ms": {"1": 3.0}, "wait_share": share}


@pytest.mark.usefixtures("with_wait_share")
def test_a_measurement_beside_other_work_is_made_again(monkeypatch, compiled):
    path, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    found = iter([disturbed(0.6), disturbed(0.3), disturbed(0.5), disturbed(0.0)])
    monkeypatch.setattr(tune, "_measure_once", lambda *_: next(found))
    assert (
        tune.measure_graph(LoadJob(path, spec))["wait_share"] == 0.3
    )  # three tries at most, the least disturbed counts
    assert tune.measure_graph(LoadJob(path, spec))["wait_share"] == 0.0
    assert list(found) == []


@pytest.mark.parametrize("is_busy", [True, False])
@pytest.mark.usefixtures("with_wait_share")
def test_a_disturbed_record_is_measured_again_at_load_once_the_machine_is_quiet(
    compiled, tmp_path, monkeypatch, is_busy
):
    path, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "is_machine_busy", lambda: is_busy)
    found = iter([disturbed(0.2, threads=2), disturbed(0.01, threads=4)])
    monkeypatch.setattr(tune, "measure_graph", lambda *_, tries: next(found))
    built = disturbed(0.5)
    threads = [tune.adapt_tuning(LoadJob(path, spec, tuning=built))["threads"] for _ in range(4)]
    assert threads == ([1, 1, 1, 1] if is_busy else [2, 4, 4, 4])


class Ticking:
    """An engine whose steps take so many seconds each, and the clock that tells it."""

    def __init__(self, spec: Any, *seconds: float) -> None:
        self.spec, self.max_rows, self.max_slots = spec, 64, 1
        self.seconds, self.now, self.num_runs = list(seconds), 0.0, 0

    def run(self, feeds: Any) -> None:
        self.now += self.seconds[min(self.num_runs, len(self.seconds) - 1)]
        self.num_runs += 1

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "ms", "num_runs"),
    [
        ((9.0, 1.0), 1000.0, 7),  # long steps: six, and one before them
        ((9.0, 0.005, 0.004, 0.003), 3.0, 1 + 16),  # 50 ms of short ones: 5 + 4 + 14 times 3
        ((9.0, 1e-4), 0.1, 1 + measuring.MAX_REPEATS),
        ((9.0, 7.0, 0.01, 0.01), 10.0, 7),  # one slow step is not typical
    ],
)
def test_a_few_steps_give_the_time_of_one(compiled, seconds, ms, num_runs):
    _, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    engine = Ticking(spec, *seconds)
    assert measuring.typical_step_ms(engine, clock=engine.clock) == pytest.approx(ms)  # type: ignore[arg-type]
    assert engine.num_runs == num_runs


class Drift:
    """A machine whose steps take `ms` now, and what is measured on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ms: float, share: float = 0.0, is_busy: bool = False) -> None:
        self.checked = self.measured = 0
        self.ms, self.wait_share = ms, share
        monkeypatch.setattr(tune, "is_machine_busy", lambda: is_busy)
        monkeypatch.setattr(tune, "WaitClock", lambda: self)
        monkeypatch.setattr(tune, "typical_step_ms", self.check)
        monkeypatch.setattr(tune, "measure_graph", self.measure)

    def share(self) -> float:
        return self.wait_share

    def check(self, engine: Any, others_bytes: int) -> float:
        self.checked += 1
        assert engine.session.get_session_options().intra_op_num_threads == 1  # the recorded choice
        return self.ms

    def measure(self, *_: Any, tries: int) -> dict[str, Any]:
        self.measured += 1
        return {"cpu": tune.cpu_name(), "threads": 2, "step_ms": {"1": self.ms}, "wait_share": 0.0}


@pytest.mark.parametrize(("ms", "is_wrong"), [(3.0, False), (5.9, False), (1.6, False), (6.1, True), (1.4, True)])
@pytest.mark.usefixtures("with_wait_share")
def test_a_record_is_compared_once_with_present_step_times(compiled, tmp_path, monkeypatch, ms, is_wrong):
    path, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path))
    machine, built = Drift(monkeypatch, ms), disturbed(0.0)
    records = [tune.adapt_tuning(LoadJob(path, spec, tuning=built)) for _ in range(3)]
    assert (machine.checked, machine.measured) == (1, int(is_wrong))
    assert records == [records[0]] * 3 and records[0]["threads"] == (2 if is_wrong else 1)
    assert built == disturbed(0.0)
    again = {**built, "step_ms": {"1": 3.0, "4": 5.0}}
    tune.adapt_tuning(LoadJob(path, spec, tuning=again))
    assert machine.checked == 2


@pytest.mark.parametrize(("share", "is_busy", "checked"), [(0.2, False, 3), (0.0, True, 0)])
@pytest.mark.usefixtures("with_wait_share")
def test_a_record_is_not_judged_beside_other_work(compiled, tmp_path, monkeypatch, share, is_busy, checked):
    path, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path))
    machine, built = Drift(monkeypatch, 99.0, share, is_busy), disturbed(0.0)
    assert [tune.adapt_tuning(LoadJob(path, spec, tuning=built)) for _ in range(3)] == [built] * 3
    assert (machine.checked, machine.measured, list(tmp_path.iterdir())) == (checked, 0, [])
