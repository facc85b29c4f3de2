# SPDX-License-Identifier: Apache-2.0
"""Measures the time of steps of one to sixteen nodes, or up to the engine's limit, on an engine of any backend.

Records that were made on this machine are kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from speccompile.common.cache_root import cache_root, find_cache_folder
from speccompile.common.code_cache import write_file
from speccompile.core.protocols import Engine
from speccompile.core.specs import GraphSpec, probe_inputs

MAX_OTHERS_BYTES = 256 << 20  # more than a cache that two graphs could share
NODE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
CONTEXT = 192  # rows in use while measuring: a typical short context, inside one cache bucket with 16 nodes
SECONDS_PER_SETTING = 1.5
SECONDS_OF_CHECK, MIN_STEPS_OF_CHECK = 0.05, 6
MIN_REPEATS, MAX_REPEATS = 5, 40


def measured_sizes(spec: GraphSpec) -> tuple[int, int]:
    # Without caches a step of n nodes is one of n slots.
    is_batched = any("batch" in tensor.dims for tensor in spec.inputs)
    max_slots = max(NODE_COUNTS) if is_batched and not spec.caches else 1
    return max_slots, min(CONTEXT + max(NODE_COUNTS) + spec.rows_written_ahead, spec.max_rows or sys.maxsize)


def measure_steps(
    engine: Engine, others_bytes: int = 0, max_nodes: int = sys.maxsize, node_counts: Collection[int] = NODE_COUNTS
) -> dict[str, float]:
    """Returns {nodes: milliseconds at batch 1} of an engine of `measured_sizes`; without caches, slots are counted.

    Args:
        others_bytes: weights of the graphs that run between two of its steps, read before each measured step: heads of
            25 MB whose weights stayed in a CPU's cache were 1.6 times faster than in the loop.
        max_nodes: most nodes of a step that the engine takes; heads read the states of no more.
        node_counts: those of `NODE_COUNTS` to measure; 1 is one of them.
    """
    feeds = {n: step for n, step in _feeds_by_nodes(engine, max_nodes).items() if n in node_counts}
    times: dict[int, list[float]] = {n: [] for n in feeds}
    for step in feeds.values():
        engine.run(step)
    others = _others(others_bytes)
    start = time.perf_counter()
    while len(times[1]) < MAX_REPEATS:
        if len(times[1]) >= MIN_REPEATS and time.perf_counter() - start > SECONDS_PER_SETTING:
            break
        for n in feeds:  # interleaved: a slow moment of the machine affects all sizes
            others.sum()
            begin = time.perf_counter()
            engine.run(feeds[n])
            times[n].append((time.perf_counter() - begin) * 1e3)
    # Noise of a shared machine only adds: a low quantile is closer to the true time than the median.
    return {str(n): round(float(np.quantile(times[n], 0.2)), 4) for n in feeds}


def typical_step_ms(engine: Engine, others_bytes: int = 0, clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the median milliseconds of one-node steps over 50 ms, at least 6, without the first, which allocates."""
    feeds = _feeds_by_nodes(engine, sys.maxsize)[1]
    engine.run(feeds)
    others, seconds = _others(others_bytes), list[float]()
    while len(seconds) < MIN_STEPS_OF_CHECK or (sum(seconds) < SECONDS_OF_CHECK and len(seconds) < MAX_REPEATS):
        others.sum()
        begin = clock()
        engine.run(feeds)
        seconds.append(clock() - begin)
    return float(np.median(seconds)) * 1e3


def _others(num_bytes: int) -> np.ndarray:
    return np.ones(min(num_bytes, MAX_OTHERS_BYTES) // 8, dtype=np.int64)


def _feeds_by_nodes(engine: Engine, max_nodes: int) -> dict[int, dict[str, np.ndarray]]:
    spec, max_rows = engine.spec, engine.max_rows - engine.spec.rows_written_ahead
    most = min(max_rows, max_nodes) if spec.caches else engine.max_slots
    node_counts = [n for n in NODE_COUNTS if n <= most]
    context = max_rows - node_counts[-1]
    return {n: _feeds(spec, n, context, max_nodes) for n in node_counts}


def _feeds(spec: GraphSpec, num: int, context: int, max_nodes: int) -> dict[str, np.ndarray]:
    if spec.caches:
        return probe_inputs(spec, num_nodes=num, length=context)
    # The states are those of the target's step, of which a tree's drafts can be more than there are nodes.
    return probe_inputs(spec, num_slots=num, num_nodes=min(spec.num_drafts or 1, max_nodes))


_log = logging.getLogger(__name__)
_KIND = "tuning"  # the folder in the cache


def record_file(*depends_on: object) -> Path:
    """Returns the file of the record of a graph on this machine; other arguments have another file."""
    digest = hashlib.sha256(repr(depends_on).encode()).hexdigest()[:32]
    return cache_root() / _KIND / f"{digest}.json"


def read_kept(file: Path) -> dict[str, Any] | None:
    """Returns the kept record; None where there is none that can be read."""
    try:
        record = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):  # none, or damaged: the next measurement replaces it
        return None
    return record if isinstance(record, dict) and record else None


def keep(file: Path, record: Mapping[str, Any]) -> None:
    """Keeps a record; another process that reads meanwhile sees the old one or the new one."""
    if find_cache_folder(_KIND) is None:
        return
    try:
        write_file(file, json.dumps(record).encode())
    except OSError as fault:
        _log.warning("a measurement of this machine is not kept: %s", fault)


def measured_once(measure: Callable[[], dict[str, Any]], *depends_on: object) -> dict[str, Any]:
    """Returns the kept record of what it depends on; where there is none, one that is measured now and kept."""
    file = record_file(*depends_on)
    record = read_kept(file)
    if record is None:
        record = measure()
        keep(file, record)
    return record


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a compiled graph, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
