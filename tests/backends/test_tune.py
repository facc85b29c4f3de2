# SPDX-License-Identifier: Apache-2.0
"""Tuning records: made by measuring, reused on the same CPU, measured anew on another."""

import json
from pathlib import Path
from typing import Any

import pytest

from speccompile.backends import measuring
from speccompile.backends.measuring import NODE_COUNTS
from speccompile.backends.onnxruntime import tune
from speccompile.backends.onnxruntime.engine import session_options
from speccompile.errors import BuildError
from speccompile.runtime.bundle import weights_beside


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_graph_is_measured_in_a_child(compiled: Any, role: str) -> None:
    path, spec, _ = compiled("onnxruntime", "none", "fp32", role)
    record = tune.measure_graph(path, spec, threads=1)
    assert record["threads"] == 1 and record["cpu"] == tune.cpu_name()
    assert list(record["step_ms"]) == [str(n) for n in NODE_COUNTS]
    assert all(0 < ms < 1000 for ms in record["step_ms"].values())
    assert session_options(record).intra_op_num_threads == 1


def test_a_graph_that_cannot_be_opened_names_the_reason(tmp_path: Path, compiled: Any) -> None:
    _, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    (tmp_path / "graph.onnx").write_bytes(b"no graph")
    with pytest.raises(BuildError, match=r"tuning .*graph\.onnx: got exit code 1"):
        tune.measure_graph(tmp_path / "graph.onnx", spec, threads=1)


def test_a_record_of_another_cpu_is_measured_anew_once(
    compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path))
    calls: list[Path] = []

    def measure(graph: Path, *_: Any, tries: int) -> dict[str, Any]:
        calls.append(graph)
        return {"cpu": tune.cpu_name(), "threads": 2, "step_ms": {"1": 3.0}}

    monkeypatch.setattr(tune, "measure_graph", measure)
    here = {"cpu": tune.cpu_name(), "threads": 1}
    assert tune.adapt_tuning(path, spec, here) == here
    assert tune.adapt_tuning(path, spec, {}) == {}
    elsewhere = {"cpu": "Z80 x1", "threads": 64}
    assert tune.adapt_tuning(path, spec, elsewhere)["threads"] == 2
    assert tune.adapt_tuning(path, spec, elsewhere)["step_ms"] == {"1": 3.0}
    assert calls == [path]
    assert tune.adapt_tuning(path, spec, elsewhere, others_bytes=7)["threads"] == 2 and calls == [path] * 2
    next(tmp_path.glob("tuning/*.json")).unlink()
    (kept,) = tmp_path.glob("tuning/*.json")
    assert json.loads(kept.read_text())["threads"] == 2


def test_thread_counts_end_with_all_usable_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for usable, wanted in ((1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6])):
        monkeypatch.setattr(tune.os, "sched_getaffinity", lambda _, n=usable: set(range(n)))
        assert tune.thread_counts() == wanted


def test_what_a_graph_takes_turns_with_is_all_in_the_folders_of_the_others(tmp_path: Path) -> None:
    for name, sizes in {"target": (3, 50), "draft": (2, 40), "heads": (1,)}.items():
        (tmp_path / name / "scratch").mkdir(parents=True)
        for index, size in enumerate(sizes):
            (tmp_path / name / f"{index}.onnx").write_bytes(bytes(size))
    files = [tmp_path / name / "0.onnx" for name in ("target", "draft", "heads")]
    assert weights_beside(files[0], files) == 43 and weights_beside(files[1], files) == 54
    assert weights_beside(files[0], files[:1]) == 0


def test_other_weights_are_read_before_every_measured_step(monkeypatch: pytest.MonkeyPatch, compiled: Any) -> None:
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


def test_a_measurement_beside_other_work_is_made_again(monkeypatch: pytest.MonkeyPatch, compiled: Any) -> None:
    path, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    found = iter([disturbed(0.6), disturbed(0.3), disturbed(0.5), disturbed(0.0)])
    monkeypatch.setattr(tune, "_measure_once", lambda *_: next(found))
    assert tune.measure_graph(path, spec)["wait_share"] == 0.3  # three tries at most, the least disturbed counts
    assert tune.measure_graph(path, spec)["wait_share"] == 0.0
    assert list(found) == []


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_disturbed_record_is_measured_again_at_load_once_the_machine_is_quiet(
    compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    path, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "is_machine_busy", lambda: is_busy)
    found = iter([disturbed(0.2, threads=2), disturbed(0.01, threads=4)])
    monkeypatch.setattr(tune, "measure_graph", lambda *_, tries: next(found))
    built = disturbed(0.5)
    threads = [tune.adapt_tuning(path, spec, built)["threads"] for _ in range(4)]
    assert threads == ([1, 1, 1, 1] if is_busy else [2, 4, 4, 4])
