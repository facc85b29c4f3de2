# SPDX-License-Identifier: Apache-2.0
"""Predicted against measured milliseconds of a target's steps, and how far they differ.

    python bench/planner.py BUNDLE... [--threads 1,2] [--nodes 1,4,8,16] [--batches 1,8,32] [--cpu-time]

A prediction knows the sizes of the bundle's recipe and what `plan --measure` found on this machine, which is measured
anew with --measure; no figure of the bundle is used. Errors are |predicted / measured - 1|. Steps of more than --rows
rows are left out: they take seconds.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from speccompile.backends.base import LoadJob
from speccompile.backends.measuring import CONTEXT
from speccompile.backends.onnxruntime.engine import load_engine
from speccompile.bundle.bundle import read_bundle
from speccompile.core.specs import probe_inputs
from speccompile.planner.costs import GraphCosts, graphs_of_plan
from speccompile.planner.machine import Machine
from speccompile.planner.measuring import kept_machine, measure_machine
from speccompile.recipe import find_device, load_recipe, resolve

TARGET = "target"
Clock = Callable[[], float]
LEAST, MOST, SECONDS = 3, 40, 0.15  # repeats of a step, and their time
PASSES = 2  # of which the faster one counts, as of the machine's rates


def measured_ms(engine, nodes: int, batch: int, clock: Clock) -> float:
    """Returns the milliseconds of a step: a low quantile, as noise only adds."""
    feeds = probe_inputs(engine.spec, num_slots=batch, num_nodes=nodes, length=CONTEXT)
    engine.run(feeds)
    times: list[float] = []
    while len(times) < LEAST or (sum(times) < SECONDS and len(times) < MOST):
        start = clock()
        engine.run(feeds)
        times.append(clock() - start)
    return 1e3 * float(np.quantile(times, 0.05))


def rows_of_bundle(
    path: Path, machine: Machine, threads: int, shapes: list[tuple[int, int]], clock: Clock
) -> list[dict]:
    """Returns {"bundle", "precision", "threads", "nodes", "batch", "predicted_ms", "measured_ms"} for each shape."""
    bundle = read_bundle(path, verify=False)
    plan = resolve(load_recipe(path / "recipe.yaml"), find_device("cpu"))
    costs: GraphCosts = graphs_of_plan(plan)[TARGET]
    spec = bundle.graph_spec(TARGET)
    max_rows = min(CONTEXT + max(n for n, _ in shapes) + spec.rows_written_ahead + 8, spec.max_rows or 1 << 30)
    rows = []
    for batch in sorted({b for _, b in shapes}):
        job = LoadJob(bundle.graph_path(TARGET), spec, batch, max_rows, {"threads": threads, "spinning": "stop"})
        engine = load_engine(job)
        passes = [{n: measured_ms(engine, n, batch, clock) for n, b in shapes if b == batch} for _ in range(PASSES)]
        for nodes in passes[0]:
            predicted, seen = 1e3 * costs.step_s(machine, nodes, batch, CONTEXT), min(one[nodes] for one in passes)
            rows.append(
                {"bundle": path.name, "precision": costs.precision, "threads": threads, "nodes": nodes, "batch": batch,
                 "predicted_ms": round(predicted, 3), "measured_ms": round(seen, 3)}
            )  # fmt: skip
    return rows


def error_of(row: dict) -> float:
    return abs(row["predicted_ms"] / row["measured_ms"] - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--nodes", default="1,4,8,16")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, on a machine that others use too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.cpu_time and args.threads != "1":
        parser.error("--cpu-time needs --threads 1: waiting for other threads is CPU time too")
    clock = time.process_time if args.cpu_time else time.perf_counter
    nodes, batches = ([int(part) for part in text.split(",")] for text in (args.nodes, args.batches))
    shapes = [(n, b) for n in nodes for b in batches if n * b <= args.rows]
    rows = []
    for threads in map(int, args.threads.split(",")):
        kept = None if args.measure else kept_machine(threads)
        machine = kept or measure_machine(threads, clock=clock)
        for bundle in args.bundles:
            found = rows_of_bundle(bundle.resolve(), machine, threads, shapes, clock)
            rows += found
            errors = [error_of(row) for row in found]
            print(
                f"{bundle}, {threads} threads: median error {median(errors):.0%}, worst {max(errors):.0%}", flush=True
            )
    print("| bundle | weights | threads | nodes | batch | predicted ms | measured ms | error |\n" + "|---" * 8 + "|")
    for row in rows:
        print(f"| {' | '.join(str(value) for value in row.values())} | {error_of(row):.0%} |")
    errors = [error_of(row) for row in rows]
    print(f"all {len(rows)}: median {median(errors):.0%}, worst {max(errors):.0%}")
    if args.json is not None:
        args.json.write_text(json.dumps({"rows": rows, "machine": machine.source}, indent=1) + "\n")


if __name__ == "__main__":
    main()
