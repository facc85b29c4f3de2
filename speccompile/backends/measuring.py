# SPDX-License-Identifier: Apache-2.0
"""What steps of one to sixteen nodes, or as many as there may be, cost on a loaded engine, whatever its backend is."""

from __future__ import annotations

import sys
import time

import numpy as np

from speccompile.core.probes import probe_inputs
from speccompile.core.protocols import Engine
from speccompile.core.specs import GraphSpec

MAX_OTHERS_BYTES = 256 << 20  # more than a cache that two graphs could share
NODE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
CONTEXT = 192  # rows in use while measuring: a typical short context, inside one cache bucket with 16 nodes
SECONDS_PER_SETTING = 1.5
MIN_REPEATS, MAX_REPEATS = 5, 40


def measured_sizes(spec: GraphSpec) -> tuple[int, int]:
    """(slots, cache rows) of the engine that `measure_steps` needs."""
    # Without caches a step of n nodes is one of n slots.
    max_slots = 1 if spec.caches else max(NODE_COUNTS)
    return max_slots, min(CONTEXT + max(NODE_COUNTS) + spec.rows_written_ahead, spec.max_rows or sys.maxsize)


def measure_steps(engine: Engine, others_bytes: int = 0, max_nodes: int = sys.maxsize) -> dict[str, float]:
    """Time steps of an engine of `measured_sizes`.

    Args:
        engine: of the graph.
        others_bytes: weights of the graphs that run between two of its steps. As many bytes are read before each
            measured step: heads of 25 MB whose weights stayed in a CPU's cache were seen 1.6 times faster than in the
            loop, where the target's weights had driven them out.
        max_nodes: most nodes of a step that the engine takes; heads read the states of no more.

    Returns:
        {nodes: milliseconds at batch 1}; for a graph without caches, slots take the place of nodes.
    """
    spec, max_rows = engine.spec, engine.max_rows - engine.spec.rows_written_ahead
    most = min(max_rows, max_nodes) if spec.caches else engine.max_slots
    node_counts = [n for n in NODE_COUNTS if n <= most]
    context = max_rows - node_counts[-1]
    feeds = {n: _feeds(spec, n, context, max_nodes) for n in node_counts}
    times: dict[int, list[float]] = {n: [] for n in node_counts}
    for n in node_counts:
        engine.run(feeds[n])
    others = np.ones(min(others_bytes, MAX_OTHERS_BYTES) // 8, dtype=np.int64)
    start = time.perf_counter()
    while len(times[1]) < MAX_REPEATS:
        if len(times[1]) >= MIN_REPEATS and time.perf_counter() - start > SECONDS_PER_SETTING:
            break
        for n in node_counts:  # interleaved: a slow moment of the machine falls on all sizes
            others.sum()
            begin = time.perf_counter()
            engine.run(feeds[n])
            times[n].append((time.perf_counter() - begin) * 1e3)
    # Noise of a shared machine only adds: a low quantile is nearer to the step itself than the median is.
    return {str(n): round(float(np.quantile(times[n], 0.2)), 4) for n in node_counts}


def _feeds(spec: GraphSpec, num: int, context: int, max_nodes: int) -> dict[str, np.ndarray]:
    """Inputs of a step of `num` nodes after `context` rows; of as many slots where there are no caches."""
    if spec.caches:
        return probe_inputs(spec, num_nodes=num, length=context)
    # The states are those of the target's step, of which a tree's drafts can be more than there are nodes.
    return probe_inputs(spec, num_slots=num, num_nodes=min(spec.num_drafts or 1, max_nodes))
