#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where a step of a compiled graph goes on the CPU: ONNX Runtime's profile by kind of operator and number of nodes.

    python bench/step_profile.py BUNDLE [--graph target] [--nodes 1,8,16] [--rows 192] [--steps 100] [--threads 2]

Each number of nodes has a session of its own with ONNX Runtime's profiler on, one after the other. An operator's time
is the median of its times over all steps, so that single disturbed steps do not count; operators of one kind are
summed. `step` is the median of whole steps with the profiler on, `off` of the same steps in a session without it. The
graph is that of single kernels: sequences of them would be one line.
"""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime as ort

from speccompile.backends.base import LoadJob
from speccompile.backends.onnxruntime.engine import OrtEngine, session_options
from speccompile.backends.onnxruntime.kernel_library import register_kernels
from speccompile.bundle.bundle import read_bundle
from speccompile.core import specs

WARM_UP = 10


class ProfiledGraph:
    """A graph of a bundle, with ONNX Runtime's profiler on or off.

    Args:
        bundle: its folder.
        graph: its name.
        threads: of the session.
        rows: of the cache.
        prefix: where the profile is written; None: no profile.
    """

    def __init__(self, bundle: Path, graph: str, threads: int, rows: int, prefix: Path | None) -> None:
        opened = read_bundle(bundle)
        options = session_options({**opened.graphs[graph].get("tuning", {}), "threads": threads})
        register_kernels(options)
        if prefix is not None:
            options.enable_profiling, options.profile_file_prefix = True, str(prefix)
        path = opened.graph_path(graph)
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.engine = OrtEngine(LoadJob(path, opened.graph_spec(graph), max_rows=rows), self.session)

    def step(self, nodes: int, rows: int) -> float:
        """Runs one step after `rows` rows of context; returns its milliseconds."""
        feeds = {specs.TOKENS: np.full((1, nodes), 5), specs.LENGTHS: np.array([rows])}
        start = perf_counter()
        self.engine.run(feeds)
        return (perf_counter() - start) * 1e3

    def operators(self) -> dict[str, tuple[int, float]]:
        """Returns, by kind of operator, how many there are and the milliseconds of all of them; ends the profile."""
        events: list[dict[str, Any]] = json.loads(Path(self.session.end_profiling()).read_text())
        times: dict[tuple[str, str], list[float]] = defaultdict(list)
        for event in events:
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                times[event["args"]["op_name"], event["name"]].append(event["dur"] / 1e3)
        kinds: dict[str, tuple[int, float]] = {}
        for (kind, _), of in times.items():
            count, total = kinds.get(kind, (0, 0.0))
            kinds[kind] = count + 1, total + statistics.median(of[WARM_UP:] or of)
        return kinds


def timed(graph: ProfiledGraph, nodes: int, args: argparse.Namespace) -> float:
    """Returns the median milliseconds of a step."""
    return statistics.median([graph.step(nodes, args.rows) for _ in range(args.steps + WARM_UP)][WARM_UP:])


def main() -> None:
    """Profiles a bundle's graph, and prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--graph", default="target")
    parser.add_argument("--nodes", default="1,8,16")
    parser.add_argument("--rows", type=int, default=192, help="of context")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    counts = [int(n) for n in args.nodes.split(",")]
    room = args.rows + max(counts)
    with tempfile.TemporaryDirectory() as folder:

        def opened(prefix: Path | None) -> ProfiledGraph:
            return ProfiledGraph(args.bundle, args.graph, args.threads, room, prefix)

        off, step = dict[int, float](), dict[int, float]()
        kinds = dict[int, dict[str, tuple[int, float]]]()
        for n in counts:  # one session at a time: the threads of others would have their turn, too
            off[n] = timed(opened(None), n, args)
            graph = opened(Path(folder) / f"nodes_{n}")
            step[n] = timed(graph, n, args)
            kinds[n] = graph.operators()
    print("| ms | " + " | ".join(f"{n} nodes" for n in counts) + " |\n|---|" + "---|" * len(counts))
    for name, of in (("off", off), ("step", step)):
        print(f"| {name} | " + " | ".join(f"{of[n]:.3f}" for n in counts) + " |")
    last = kinds[counts[-1]]
    for kind in sorted(last, key=lambda kind: -last[kind][1]):
        cells = [f"{kinds[n].get(kind, (0, 0.0))[1]:.3f}" for n in counts]
        print(f"| {kind} ({last[kind][0]}) | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
