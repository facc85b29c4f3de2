# SPDX-License-Identifier: Apache-2.0
"""Step time follows the context in use, not max_seq_len.

    python bench/context.py BUNDLE [--nodes 4] [--json OUT]

One engine for each max_seq_len, one thread, steps interleaved; medians in milliseconds. A row is a context in use,
a column is a capacity: columns agree, rows differ.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from speccompile.backends.onnxruntime.engine import OrtEngine, load_engine
from speccompile.bundle.bundle import read_bundle
from speccompile.core import specs

CAPACITIES = (1024, 4096, 16384)
CONTEXTS = (100, 250, 500, 1000, 2000, 4000)  # as far as the bundle's own max_seq_len goes
REPEATS = 31


def step_ms(engine: OrtEngine, context: int, num_nodes: int) -> float:
    """Returns milliseconds of a step over a cache of zeros: its numbers do not change the time."""
    feeds = {specs.TOKENS: np.full((1, num_nodes), 5), specs.LENGTHS: np.array([context])}
    start = time.perf_counter()
    engine.run(feeds)
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    bundle = read_bundle(args.bundle)
    graph, longest = bundle.graphs["target"], bundle.recipe.engine.max_seq_len
    spec, path = specs.spec_from_json(graph["spec"]), args.bundle / graph["file"]
    engines = {
        rows: load_engine(path, spec, max_slots=1, max_rows=rows + args.nodes, settings={"threads": 1})
        for rows in CAPACITIES
    }
    table: dict[int, dict[int, float]] = {}
    for context in (c for c in CONTEXTS if c + args.nodes <= longest):
        fitting = {rows: engine for rows, engine in engines.items() if rows >= context + args.nodes}
        times: dict[int, list[float]] = {rows: [] for rows in fitting}
        for engine in fitting.values():
            step_ms(engine, context, args.nodes)  # grows the view and binds
        for _ in range(REPEATS):
            for rows, engine in fitting.items():
                times[rows].append(step_ms(engine, context, args.nodes))
        table[context] = {rows: round(statistics.median(values), 3) for rows, values in times.items()}
    print("context " + "".join(f"{f'max {rows}':>12}" for rows in CAPACITIES))
    for context, row in table.items():
        print(f"{context:7} " + "".join(f"{row.get(rows, float('nan')):12.3f}" for rows in CAPACITIES))
    if args.json:
        args.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
