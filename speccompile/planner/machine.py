# SPDX-License-Identifier: Apache-2.0
"""Machines as the cost model sees them: bytes a second, products a second by precision, the cost of a launch.

A published machine is a roofline: a product of `rows` rows with w weights takes max(w b / B, 2 w rows / R) seconds,
with b bytes a weight, B bytes/s of memory and R operations/s of that precision (Williams et al., Roofline, 2009).
Nothing reaches both; `EFFICIENCY` says which share is assumed, as a range. A measured machine has the seconds per
number that our kernels took, by kind, rows and bytes of all that a step reads (`planner.measuring`).
"""

from __future__ import annotations

import bisect
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from speccompile.core.dims import INT8_CACHE_GROUP
from speccompile.errors import RecipeError

MACHINES = Path(__file__).with_name("machines.toml")
THIS = "this"
CACHES, INT8_CACHES, STATES, OTHERS = "caches", "int8 caches", "states", "others"
# Bits of a weight with its scales: a scale of 16 bits for each 32 weights of int4, one for a column of int8.
BITS = {"float32": 32.0, "bf16": 16.0, "int8": 8.0, "int4": 4.5}
# Of what is no weight; on a published machine the rate of its products is that of the precision beside.
OTHER_BITS = {
    CACHES: (32.0, "float32"),
    INT8_CACHES: (8 + 32 / INT8_CACHE_GROUP, "int8"),
    STATES: (64.0, "float32"),
    OTHERS: (0.0, ""),
}
# Shares of published peaks, low and high: of bandwidth in decoding, of products in prompts and wide steps.
EFFICIENCY = {"bandwidth": (0.6, 0.9), "products": (0.4, 0.75)}


@dataclass(frozen=True)
class Machine:
    """What steps cost on a machine."""

    name: str
    kind: str  # cpu or gpu
    num_units: int  # cores or SMs
    memory_bytes: float
    bandwidth: float  # bytes/s of the largest level of memory
    launch_s: float  # of one operator or kernel inside a graph
    source: str
    rates: Mapping[str, float] = field(default_factory=dict)  # operations/s by precision
    # By kind: (bytes that a step reads, ((rows, seconds per number), ...)); empty: published.
    measured: Mapping[str, Sequence[tuple[float, Sequence[tuple[int, float]]]]] = field(default_factory=dict)
    efficiency: tuple[float, float] = (1.0, 1.0)  # of bandwidth and of products
    probe_s: float | None = None  # of the probe at the speed that was measured
    host: float = 2.0  # times what Python takes where `costs.LOOP_S` was measured; assumed of a published machine

    def precision(self, wanted: str) -> str:
        """Returns the precision in which weights of `wanted` are multiplied: the next wider one that is known."""
        known = self.measured or self.rates
        order = list(BITS)[::-1]
        wider = [p for p in order[order.index(wanted) :] if p in known]
        if not wider:
            raise RecipeError(f"machine {self.name}", f"no rate of {wanted}", f"one of {', '.join(known)}", "Add it.")
        return wider[0]

    def product_s(self, kind: str, num: float, rows: float, step_bytes: float) -> float:
        """Returns the seconds of `rows` rows with `num` weights, numbers of caches or states, or other operators.

        `step_bytes`, all that a step reads, decides from what level of memory they come.
        """
        if num <= 0 or rows <= 0:
            return 0.0
        if not self.measured:
            if kind == OTHERS:
                return num * self.launch_s
            bits, rate = OTHER_BITS.get(kind, (BITS.get(kind, 0.0), kind))
            if kind == CACHES and self.kind == "gpu":
                bits, rate = BITS["bf16"], "bf16"
            products_s = 2 * num * rows / (self.rates[self.precision(rate)] * self.efficiency[1])
            return max(self.bytes_s(num * bits / 8), products_s)
        sizes = self.measured[kind if kind in OTHER_BITS else self.precision(kind)]
        by_size = [(math.log(size), _between(points, rows)) for size, points in sizes]
        return num * _between(by_size, math.log(max(step_bytes, 1.0)), is_bounded=True)

    def bytes_s(self, num_bytes: float) -> float:
        """Returns the seconds in which so many bytes are read."""
        return num_bytes / (self.bandwidth * self.efficiency[0])

    def at(self, end: int) -> Machine:
        """Returns the slow (0) or the fast (1) end of a published machine (`EFFICIENCY`); a measured one as it is."""
        if self.measured:
            return self
        return replace(self, efficiency=(EFFICIENCY["bandwidth"][end], EFFICIENCY["products"][end]))


def _between(points: Sequence[tuple[float, float]], x: float, *, is_bounded: bool = False) -> float:
    """Returns the value at x: piecewise linear; outside, the nearest one, or in proportion to x above the last."""
    if x >= points[-1][0]:
        return points[-1][1] * (1.0 if is_bounded else x / points[-1][0])
    if x <= points[0][0]:
        return points[0][1]
    right = bisect.bisect_right([point[0] for point in points], x)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def published_machines(path: Path = MACHINES) -> dict[str, Machine]:
    """Returns the machines of the table, by name."""
    rows: dict[str, dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        name: Machine(
            name=name,
            kind=row["kind"],
            num_units=row["units"],
            memory_bytes=row["memory_gb"] * 1e9,
            bandwidth=row["bandwidth_gb_s"] * 1e9,
            launch_s=row["launch_us"] / 1e6,
            source=row["source"],
            rates={key: row[key] * 1e12 for key in BITS if key in row},
        )
        for name, row in rows.items()
    }


def find_machine(name: str) -> Machine:
    """Returns a published machine. Raises RecipeError: there is none of that name."""
    known = published_machines()
    if name not in known:
        expected = f"this, or one of {', '.join(known)}"
        raise RecipeError("--machine", repr(name), expected, "Correct it; `plan --measure` measures this machine.")
    return known[name]
