# SPDX-License-Identifier: Apache-2.0
"""Predicted against measured milliseconds of a target's steps, and how far they differ.

    python bench/planner.py BUNDLE... [--threads 1,2] [--nodes 1,4,8,16] [--batches 1,8,32] [--cpu-time]

A prediction knows the sizes of the bundle's recipe and what `plan --measure` found on this machine, which is measured
anew with --measure; no figure of the bundle is used. Errors are |predicted / measured - 1|. Of --passes over all
bundles a step's fastest counts, as other tenants of the machine only add. Steps of more than --rows rows are left out:
they take seconds. "probe" is far from 1 beside a step that was never seen at the speed
of the measured machine.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from speccompile.backends.base import LoadJob
from speccompile.backends.measuring import CONTEXT
from speccompile.backends.onnxruntime.engine import load_engine
from speccompile.bundle.bundle import read_bundle
from speccompile.core.protocols import Engine
from speccompile.core.specs import GraphSpec, probe_inputs
from speccompile.planner.costs import GraphCosts, graphs_of_plan
from speccompile.planner.machine import Machine
from speccompile.planner.measuring import kept_machine, measure_machine
from speccompile.planner.stacks import Probe
from speccompile.recipe import find_device, load_recipe, resolve

TARGET = "target"
NUM_FEEDS = 16  # as in texts, whose steps choose other experts each


def rows_of_bundle(
    path: Path, machine: Machine, threads: int, shapes: list[tuple[int, int]], probe: Probe, patience_s: float
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
        for nodes in [n for n, b in shapes if b == batch]:
            feeds = itertools.cycle(feeds_of_tokens(spec, nodes, batch))
            beside, seconds = probe.time(partial(run_next, engine, feeds), patience_s=patience_s)
            rows.append(
                {"bundle": path.name, "precision": costs.precision, "threads": threads, "nodes": nodes, "batch": batch,
                 "predicted_ms": round(1e3 * costs.step_s(machine, nodes, batch, CONTEXT), 3),
                 "measured_ms": round(1e3 * seconds, 3), "probe": [round(one / machine.probe_s, 2) for one in beside]}
            )  # fmt: skip
    return rows


def run_next(engine: Engine, feeds: Iterator[dict[str, np.ndarray]]) -> None:
    engine.run(next(feeds))


def feeds_of_tokens(spec: GraphSpec, nodes: int, batch: int) -> list[dict[str, np.ndarray]]:
    """Returns feeds of one shape with other tokens each: equal ones choose experts that lie in the CPU's caches."""
    feeds = probe_inputs(spec, num_slots=batch, num_nodes=nodes, length=CONTEXT)
    rng, names = np.random.default_rng(nodes), [t.name for t in spec.plain_inputs if t.probe == "tokens"]
    return [{**feeds, **{n: rng.integers(0, spec.vocab_size, feeds[n].shape) for n in names}} for _ in range(NUM_FEEDS)]


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
    parser.add_argument(
        "--patience", type=float, default=3.0, help="seconds in which a step waits for the speed of rates"
    )
    parser.add_argument("--seconds", type=float, default=52.0, help="in which --measure waits for it")
    parser.add_argument("--passes", type=int, default=1)
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
        machine = kept or measure_machine(threads, clock=clock, seconds=args.seconds)
        with tempfile.TemporaryDirectory() as folder:
            probe = Probe(threads, clock, Path(folder), machine.probe_s)
        fastest: dict[Path, list[dict]] = {}
        for bundle in args.bundles * args.passes:
            found = rows_of_bundle(bundle.resolve(), machine, threads, shapes, probe, args.patience)
            pairs = zip(fastest.get(bundle, found), found, strict=True)
            fastest[bundle] = found = [min(pair, key=lambda row: row["measured_ms"]) for pair in pairs]
            rows = [row for row in rows if row["threads"] != threads]
            rows += [row for of_bundle in fastest.values() for row in of_bundle]
            if args.json is not None:
                args.json.write_text(json.dumps({"rows": rows, "machine": machine.source}, indent=1) + "\n")
            errors = [error_of(row) for row in found]
            print(
                f"{bundle}, {threads} threads: median error {median(errors):.0%}, worst {max(errors):.0%}", flush=True
            )
    print(
        "| bundle | weights | threads | nodes | batch | predicted ms | measured ms | probe us | error |\n"
        + "|---" * 9
        + "|"
    )
    for row in rows:
        print(f"| {' | '.join(str(value) for value in row.values())} | {error_of(row):.0%} |")
    errors = [error_of(row) for row in rows]
    print(f"all {len(rows)}: median {median(errors):.0%}, worst {max(errors):.0%}")


if __name__ == "__main__":
    main()
