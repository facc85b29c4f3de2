# SPDX-License-Identifier: Apache-2.0
"""Measures this machine in about a minute: seconds by rows of the operators of our graphs (`planner.stacks`).

Stacks come from near and far caches and from memory. What another speed of the machine hit is measured again, then all
of it until the time is over; the fastest counts, as other work only adds.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
import timeit
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from speccompile.backends.machine import WaitClock, disturbance, num_usable_cores
from speccompile.backends.onnxruntime.tune import cpu_name
from speccompile.bundle.files import write_file
from speccompile.bundle.format import digest_from_json
from speccompile.common.cache_root import cache_root, make_cache_folder
from speccompile.errors import BuildError
from speccompile.planner import stacks
from speccompile.planner.machine import BITS, CACHES, INT8_CACHES, OTHERS, STATES, THIS, Machine
from speccompile.planner.stacks import PROBE, ROWS, Clock, Probe, Stack, Timed, times_by_rows
from speccompile.version import VERSION

_SIZES = (2 << 20, 16 << 20, 64 << 20, 256 << 20)  # bytes: servers have caches of 100 MiB and more
_SECONDS = 52.0  # in which all is measured, at least once
_KINDS: dict[str, Callable[[int], Stack]] = {
    "float32": lambda size: stacks.linears("F32", size),
    "bf16": lambda size: stacks.linears("Bf16", size),
    "int8": lambda size: stacks.linears("Int8", size),
    "int4": lambda size: stacks.linears("Int4", size),
    CACHES: lambda size: stacks.caches(CACHES, size),
    INT8_CACHES: lambda size: stacks.caches(INT8_CACHES, size),
    STATES: stacks.states,
    OTHERS: stacks.others,
}
_HOST_S, _HOST_RUNS = 68.5e-6, 300  # of `_work_of_host` where `costs.LOOP_S` was measured; the fastest run counts
FOLDER = "machines"  # of the cache


def kept_machine(threads: int) -> Machine | None:
    """Returns what was measured on this machine with so many threads; None: nothing was, or by another version."""
    path = cache_root() / FOLDER / _name(threads)
    return machine_from_json(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def _name(threads: int) -> str:
    what = {"version": VERSION, "rows": ROWS, "sizes": _SIZES, "kinds": list(_KINDS), "probe": PROBE, "host": _HOST_S}
    return digest_from_json({"cpu": cpu_name(), "threads": threads, **what})[:16] + ".json"


def measure_machine(
    threads: int,
    progress: Callable[[str], None] = lambda what: None,
    clock: Clock = time.perf_counter,
    seconds: float = _SECONDS,
) -> Machine:
    """Returns this machine with so many threads, and keeps it in the cache.

    Args:
        clock: seconds; the process's CPU time says more of a single thread beside other work.

    Raises:
        BuildError: there is no library of CPU kernels.
    """
    from speccompile.backends.onnxruntime.kernel_library import find_library

    if find_library() is None:
        got, todo = "no library of CPU kernels", "Install a C++ compiler: docs/explanation/kernels.md#the-library."
        raise BuildError("plan --measure", got, "our kernels, whose speed is asked for", todo)
    waits = WaitClock()
    every, end = list(itertools.product(_KINDS, _SIZES)), time.monotonic() + seconds
    found: dict[tuple[str, int], dict[int, Timed]] = {}
    with tempfile.TemporaryDirectory() as folder:
        probe = Probe(threads, clock, Path(folder) / "probe")

        def measure(stack: Stack) -> dict[int, Timed]:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                return times_by_rows(stack, threads, probe, Path(own))

        def unusual(one: tuple[str, int]) -> list[int]:
            return [rows for rows, (beside, _) in found.get(one, {}).items() if not probe.is_usual(beside)]

        for one in itertools.cycle(every):
            if len(found) == len(every) and time.monotonic() > end:
                break
            again = unusual(one)
            if one in found and not again and any(map(unusual, every)):
                continue
            kind, size = one
            progress(f"{kind}, {size >> 20} MiB")
            stack, known = _KINDS[kind](size), found.setdefault(one, {})
            for rows, (beside, took) in measure(replace(stack, rows=again or stack.rows)).items():
                timed = beside, took / stack.num
                known[rows] = min(known.get(rows, timed), timed, key=lambda t: (not probe.is_usual(t[0]), t[1]))
        launch_s = measure(stacks.launches())[1][1] / stacks.launches().num
    measured: dict[str, list[Any]] = {kind: [] for kind in _KINDS}
    for (kind, size), times in found.items():
        # More rows take no less time, nor do farther numbers: where they seem to, the others were held up.
        farther = [found[kind, other] for other in _SIZES if other >= size]
        least = [[rows, min(t for by in farther for more, (_, t) in by.items() if more >= rows)] for rows in times]
        measured[kind].append([size, least])
    where = f"measured on {cpu_name()}, {threads} threads of {num_usable_cores()}"
    record = {
        "name": THIS,
        "kind": "cpu",
        "num_units": threads,
        "memory_bytes": float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "bandwidth": BITS["float32"] / 8 / measured["float32"][-1][1][0][1],
        "launch_s": launch_s,
        "probe_s": probe.usual_s,
        "host": min(timeit.repeat(_work_of_host, timer=clock, repeat=_HOST_RUNS, number=1)) / _HOST_S,
        "source": "; ".join(filter(None, (where, disturbance(waits.share())))),
        "measured": measured,
    }
    path = make_cache_folder(FOLDER) / _name(threads)
    write_file(path, json.dumps(record, indent=1) + "\n")
    return machine_from_json(record)


def _work_of_host() -> int:
    # What the decode loop does between engines: Python objects and small arrays.
    rows = [{"tokens": list(range(index, index + 8))} for index in range(50)]
    return sum(int(np.asarray(row["tokens"], np.int64).sum()) for row in rows)


def machine_from_json(record: Mapping[str, Any]) -> Machine:
    measured = {
        key: tuple((size, tuple((int(n), s) for n, s in points)) for size, points in sizes)
        for key, sizes in record["measured"].items()
    }
    return Machine(**{**record, "measured": measured})
