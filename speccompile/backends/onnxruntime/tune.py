# SPDX-License-Identifier: Apache-2.0
"""Short measurements on the machine at hand: threads, and what a step of n nodes costs.

Run as a process of its own (`measure_graph` starts it): sessions of the parent would spin against the measured
one, and the first session of a process decides how denormals are treated.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from speccompile.core import specs
from speccompile.core.specs import GraphSpec, spec_from_json
from speccompile.errors import BuildError

NODE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
CONTEXT = 192  # rows in use while measuring: a typical short context, inside one cache bucket with 16 nodes
SECONDS_PER_SETTING = 1.5
MIN_REPEATS, MAX_REPEATS = 5, 40


def cpu_name() -> str:
    """Model name of the CPU with its core count; a tuning record made on another one is not reused."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        vector = sorted(
            set(fields.get("flags", "").split()) & {"amx_int8", "avx512_vnni", "avx_vnni", "avx512f", "avx2"}
        )
        return f"{fields.get('model name', platform.machine())} x{os.cpu_count()} {'+'.join(vector)}".strip()
    except OSError:
        return f"{platform.processor() or platform.machine()} x{os.cpu_count()}"


def thread_counts() -> list[int]:
    """The numbers of threads worth trying: 1, 2, 4 ... up to the CPUs this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counts = [1 << i for i in range(usable.bit_length()) if 1 << i <= usable]
    return counts if counts[-1] == usable else [*counts, usable]


def measure_graph(path: Path, spec: GraphSpec, threads: int | None = None) -> dict[str, Any]:
    """Measure a lowered graph in a child process.

    Args:
        path: the ONNX file.
        spec: its inputs and outputs.
        threads: measure with this many only; None tries `thread_counts()`.

    Returns:
        {"cpu", "threads", "spinning", "step_ms": {nodes: ms at batch 1}, "tried": [...]}.

    Raises:
        BuildError: the child died; the end of its output is in the message.
    """
    request = {"path": str(path), "spec": spec.json_from_spec(), "threads": [threads] if threads else thread_counts()}
    command = [sys.executable, "-m", "speccompile.backends.onnxruntime.tune"]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = done.stderr.strip()[-500:]
        raise BuildError(f"tuning {path}", f"exit code {done.returncode}: {tail}", "a measurement", "See the message.")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def adapt_tuning(path: Path, spec: GraphSpec, tuning: Mapping[str, Any], threads: int | None = None) -> dict[str, Any]:
    """The tuning record for the machine at hand.

    A record made on another CPU is measured anew, once: the result is kept in the user's cache folder
    ($SPECCOMPILE_CACHE or ~/.cache/speccompile) by graph and CPU.

    Args:
        path: the lowered graph.
        spec: its inputs and outputs.
        tuning: the record in the bundle.
        threads: measure with this many only.

    Raises:
        BuildError: see `measure_graph`.
    """
    cpu = cpu_name()
    if not tuning or tuning.get("cpu") == cpu:
        return dict(tuning)
    digest = hashlib.sha256(path.read_bytes() + f"{cpu} {threads}".encode()).hexdigest()[:32]
    folder = Path(os.environ.get("SPECCOMPILE_CACHE") or Path.home() / ".cache" / "speccompile") / "tuning"
    kept = folder / f"{digest}.json"
    if kept.exists():
        record: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        return record
    record = measure_graph(path, spec, threads)
    folder.mkdir(parents=True, exist_ok=True)
    fresh = kept.with_suffix(f".{os.getpid()}.tmp")
    fresh.write_text(json.dumps(record), encoding="utf-8")
    fresh.replace(kept)
    return record


def _measure(path: Path, spec: GraphSpec, settings: Mapping[str, Any]) -> dict[str, float]:
    from speccompile.backends.onnxruntime.engine import load_engine

    max_rows = min(CONTEXT + max(NODE_COUNTS), spec.max_rows or sys.maxsize)
    node_counts = [n for n in NODE_COUNTS if n <= max_rows]
    context = max_rows - node_counts[-1]
    # Without caches a step of n nodes is one of n slots.
    max_slots = 1 if spec.caches else max(node_counts)
    engine = load_engine(path, spec, max_slots=max_slots, max_rows=max_rows, settings=settings)
    feeds = {n: _feeds(spec, n, context) if spec.caches else _heads_feeds(spec, n) for n in node_counts}
    times: dict[int, list[float]] = {n: [] for n in node_counts}
    for n in node_counts:
        engine.run(feeds[n])
    start = time.perf_counter()
    while len(times[1]) < MAX_REPEATS:
        if len(times[1]) >= MIN_REPEATS and time.perf_counter() - start > SECONDS_PER_SETTING:
            break
        for n in node_counts:  # interleaved: a slow moment of the machine falls on all sizes
            begin = time.perf_counter()
            engine.run(feeds[n])
            times[n].append((time.perf_counter() - begin) * 1e3)
    # Noise of a shared machine only adds: a low quantile is nearer to the step itself than the median is.
    return {str(n): round(float(np.quantile(times[n], 0.2)), 4) for n in node_counts}


def _feeds(spec: GraphSpec, num_nodes: int, context: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(num_nodes).integers(0, spec.vocab_size, (1, num_nodes))
    feeds = {specs.TOKENS: tokens, specs.LENGTHS: np.array([context])}
    if any(t.name == specs.SAMPLED_TOKEN for t in spec.outputs):
        feeds[specs.SCORED_NODES] = np.array([[num_nodes - 1]])
    return feeds


def _heads_feeds(spec: GraphSpec, num_slots: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(num_slots)
    sizes: dict[Any, Any] = {"batch": num_slots, "nodes": spec.output(specs.SAMPLED_TOKENS).dims[1]}
    states = rng.normal(size=[sizes.get(d, d) for d in spec.input(specs.HIDDEN).dims])
    tokens = rng.integers(0, spec.vocab_size, (num_slots, 1))
    return {specs.TOKENS: tokens, specs.HIDDEN: states.astype(np.float32), specs.START_NODES: tokens[:, 0] * 0}


def main() -> None:
    """Child process: a request as JSON on standard input, the record as the last line of standard output."""
    request = json.load(sys.stdin)
    path, spec = Path(request["path"]), spec_from_json(request["spec"])
    tried = []
    for threads in request["threads"]:
        settings = {"threads": threads, "spinning": "stop"}
        tried.append({**settings, "step_ms": _measure(path, spec, settings)})
    # A draft-verify loop alternates between one node and a handful: both count, whatever their scale.
    best = min(tried, key=lambda t: t["step_ms"]["1"] * t["step_ms"]["4"])
    print(json.dumps({"cpu": cpu_name(), **best, "tried": tried}))


if __name__ == "__main__":
    main()
