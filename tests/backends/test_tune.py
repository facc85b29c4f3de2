# SPDX-License-Identifier: Apache-2.0
"""Tuning records: made by measuring, reused on the same CPU, measured anew on another."""

import json
from pathlib import Path
from typing import Any

import pytest

from speccompile.backends.measuring import NODE_COUNTS
from speccompile.backends.onnxruntime import tune
from speccompile.backends.onnxruntime.engine import session_options
from speccompile.errors import BuildError


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

    def measure(graph: Path, *_: Any) -> dict[str, Any]:
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
    (kept,) = tmp_path.glob("tuning/*.json")
    assert json.loads(kept.read_text())["threads"] == 2


def test_thread_counts_end_with_all_usable_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for usable, wanted in ((1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6])):
        monkeypatch.setattr(tune.os, "sched_getaffinity", lambda _, n=usable: set(range(n)))
        assert tune.thread_counts() == wanted
