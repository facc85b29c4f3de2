# SPDX-License-Identifier: Apache-2.0
"""Where a step of a compiled graph goes on the CPU: ONNX Runtime's profile by kind of operator.

An operator's time is the median over all steps; operators of one kind are summed.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import onnxruntime as ort

from speccompile.backends.base import LoadJob
from speccompile.backends.onnxruntime.engine import OrtEngine, StateOrtEngine, session_options
from speccompile.backends.onnxruntime.kernel_library import register_kernels
from speccompile.bundle.bundle import Bundle
from speccompile.core.specs import probe_inputs
from speccompile.errors import RuntimeFault

WARM_UP = 10


@dataclass(frozen=True)
class StepProfile:
    """Milliseconds of the steps of a graph with some number of nodes.

    Args:
        off_ms, step_ms: medians of whole steps, without the profiler and with it.
        kinds: by kind of operator, how many there are and the milliseconds of all of them; the largest first.
    """

    off_ms: float
    step_ms: float
    kinds: dict[str, tuple[int, float]]


def profile_graph(
    bundle: Bundle, graph: str, node_counts: Sequence[int], *, rows: int = 192, steps: int = 100, threads: int = 1
) -> dict[int, StepProfile]:
    """Returns the profile of a graph by number of nodes, after `rows` of context or fewer, one session each.

    Raises:
        RuntimeFault: there is no such graph, or it does not run on ONNX Runtime's CPU alone; or too many nodes.
    """
    engine = bundle.recipe.engine
    rows = min(rows, engine.max_seq_len - max(node_counts))
    if rows < 0:
        got, expected = f"{max(node_counts)} nodes", f"at most {engine.max_seq_len}"
        raise RuntimeFault("--nodes", got, expected, "Give smaller numbers.")
    job = _job(bundle, graph, rows + max(node_counts))
    if engine.backend != "onnxruntime" or engine.device != "cpu":
        got = f"a bundle for {engine.backend} on {engine.device}"
        raise RuntimeFault("--graph", got, "onnxruntime on cpu", "Leave --graph out.")
    profiles = {}
    with tempfile.TemporaryDirectory() as folder:
        for num in node_counts:
            off_ms = _time_steps(_open(job, threads, None), num, rows, steps)
            profiled = _open(job, threads, Path(folder) / f"nodes_{num}")
            step_ms = _time_steps(profiled, num, rows, steps)
            profiles[num] = StepProfile(off_ms, step_ms, _kinds(Path(profiled.session.end_profiling())))
    return profiles


def _job(bundle: Bundle, graph: str, max_rows: int) -> LoadJob:
    if graph not in bundle.graphs:
        raise RuntimeFault("--graph", repr(graph), f"one of {', '.join(bundle.graphs)}", "Correct the name.")
    tuning = bundle.graph(graph).tuning
    return LoadJob(bundle.graph_path(graph), bundle.graph_spec(graph), max_rows=max_rows, tuning=tuning)


def _open(job: LoadJob, threads: int, prefix: Path | None) -> OrtEngine:
    """Returns an engine of single kernels; sequences of them would be one line of the profile."""
    options = session_options({**job.tuning, "threads": threads})
    register_kernels(options)
    if prefix is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(prefix)
    session = ort.InferenceSession(str(job.path), options, providers=["CPUExecutionProvider"])
    return (StateOrtEngine if job.spec.states else OrtEngine)(job, session)


def _time_steps(engine: OrtEngine, num_nodes: int, rows: int, steps: int) -> float:
    feeds, times = probe_inputs(engine.spec, num_nodes=num_nodes, length=rows), []
    for _ in range(steps + WARM_UP):
        start = perf_counter()
        engine.run(feeds)
        times.append((perf_counter() - start) * 1e3)
    return statistics.median(times[WARM_UP:])


def _kinds(file: Path) -> dict[str, tuple[int, float]]:
    events: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            times[event["args"]["op_name"], event["name"]].append(event["dur"] / 1e3)
    kinds: dict[str, tuple[int, float]] = {}
    for (kind, _), of_node in times.items():
        count, total = kinds.get(kind, (0, 0.0))
        kinds[kind] = count + 1, total + statistics.median(of_node[WARM_UP:] or of_node)
    return dict(sorted(kinds.items(), key=lambda item: -item[1][1]))
