# SPDX-License-Identifier: Apache-2.0
"""Measures this machine in about a minute: seconds by rows of the operators of our graphs (`planner.stacks`).

Stacks come from near and far caches and from memory. Of two passes the faster one counts, as other work only adds.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from speccompile.backends.machine import num_usable_cores
from speccompile.backends.onnxruntime.tune import cpu_name
from speccompile.bundle.files import write_file
from speccompile.bundle.format import digest_from_json
from speccompile.common.cache_root import cache_root, make_cache_folder
from speccompile.errors import BuildError
from speccompile.planner.machine import BITS, CACHES, INT8_CACHES, OTHERS, STATES, THIS, Machine
from speccompile.planner.stacks import ROWS, Clock, Stack, caches, launches, linears, others, seconds_by_rows, states
from speccompile.version import VERSION

_SIZES = (2 << 20, 16 << 20, 32 << 20, 64 << 20)  # bytes
_PASSES = 2
_KINDS: dict[str, Callable[[int], Stack]] = {
    "float32": lambda size: linears("F32", size),
    "bf16": lambda size: linears("Bf16", size),
    "int8": lambda size: linears("Int8", size),
    "int4": lambda size: linears("Int4", size),
    CACHES: lambda size: caches(CACHES, size),
    INT8_CACHES: lambda size: caches(INT8_CACHES, size),
    STATES: states,
    OTHERS: others,
}
FOLDER = "machines"  # of the cache


def kept_machine(threads: int) -> Machine | None:
    """Returns what was measured on this machine with so many threads; None: nothing was, or by another version."""
    path = cache_root() / FOLDER / _name(threads)
    return machine_from_json(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def _name(threads: int) -> str:
    what = {"version": VERSION, "rows": ROWS, "sizes": _SIZES, "kinds": list(_KINDS)}
    return digest_from_json({"cpu": cpu_name(), "threads": threads, **what})[:16] + ".json"


def measure_machine(
    threads: int,
    progress: Callable[[str], None] = lambda what: None,
    clock: Clock = time.perf_counter,
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
    measured: dict[str, list[list[Any]]] = {}
    launch_s = 1.0

    def points(stack: Stack) -> list[list[float]]:
        with tempfile.TemporaryDirectory() as folder:
            times = seconds_by_rows(stack, threads, clock, Path(folder))
        return [[rows, seconds / stack.num] for rows, seconds in times.items()]

    for number in range(_PASSES):
        for kind, make in _KINDS.items():
            progress(f"{kind}, pass {number + 1} of {_PASSES}")
            found = [[size, points(make(size))] for size in _SIZES]
            measured[kind] = faster(measured.get(kind, found), found)
        launch_s = min(launch_s, points(launches())[0][1])
    record = {
        "name": THIS,
        "kind": "cpu",
        "num_units": threads,
        "memory_bytes": float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "bandwidth": BITS["float32"] / 8 / measured["float32"][-1][1][0][1],
        "launch_s": launch_s,
        "source": f"measured on {cpu_name()}, {threads} threads of {num_usable_cores()}",
        "measured": measured,
    }
    path = make_cache_folder(FOLDER) / _name(threads)
    write_file(path, json.dumps(record, indent=1) + "\n")
    return machine_from_json(record)


def faster(first: list[list[Any]], second: list[list[Any]]) -> list[list[Any]]:
    # Returns the lesser seconds of two measurements at each size and number of rows.
    return [
        [size, [[rows, min(s, other)] for (rows, s), (_, other) in zip(mine, theirs, strict=True)]]
        for (size, mine), (_, theirs) in zip(first, second, strict=True)
    ]


def machine_from_json(record: Mapping[str, Any]) -> Machine:
    measured = {
        key: tuple((size, tuple((int(n), s) for n, s in points)) for size, points in sizes)
        for key, sizes in record["measured"].items()
    }
    return Machine(**{**record, "measured": measured})
