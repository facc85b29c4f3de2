# SPDX-License-Identifier: Apache-2.0
"""The contract of a pass, and the runner of a table of passes.

A pass names the properties, checkable conditions on a graph, that it requires and ensures; the runner checks both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import onnx_ir as ir

from speccompile.errors import PassError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Property:
    """A checkable condition on a graph."""

    name: str
    find_fault: Callable[[ir.Model], str | None]  # returns None where it holds, otherwise a description of the fault


@dataclass(frozen=True)
class Pass:
    """A named rewrite."""

    name: str
    rewrite: Callable[[ir.Model], int]  # changes the model in place and returns the number of rewrites
    requires: tuple[Property, ...] = ()
    ensures: tuple[Property, ...] = ()

    def __call__(self, model: ir.Model) -> int:
        """Checks, rewrites and checks; returns the number of rewrites."""
        self._check(model, self.requires, "before", "put the pass that ensures it earlier in the table")
        count = self.rewrite(model)
        self._check(model, self.ensures, "after", "this is a fault of the pass: report it with the model's config")
        return count

    def _check(self, model: ir.Model, properties: Sequence[Property], when: str, todo: str) -> None:
        for prop in properties:
            fault = prop.find_fault(model)
            if fault is not None:
                raise PassError(f"pass {self.name}", f"{when} it ran: {fault}", prop.name, todo)


def as_pass(
    *, requires: tuple[Property, ...] = (), ensures: tuple[Property, ...] = ()
) -> Callable[[Callable[[ir.Model], int]], Pass]:
    """Makes the decorated rewrite a pass of its name."""
    return lambda rewrite: Pass(rewrite.__name__, rewrite, requires, ensures)


def pass_of(rewrite: Callable[..., int], *arguments: Any) -> Pass:
    return Pass(rewrite.__name__, lambda model: rewrite(model, *arguments))


@dataclass(frozen=True)
class PassTrace:
    """Record of one pass: rewrites, node counts, milliseconds."""

    name: str
    num_rewrites: int
    num_nodes_before: int
    num_nodes_after: int
    time_ms: float

    def __str__(self) -> str:
        nodes = f"{self.num_nodes_before} -> {self.num_nodes_after} nodes"
        return f"{self.name}: {self.num_rewrites} rewrites, {nodes}, {self.time_ms:.1f} ms"

    def json_from_trace(self) -> dict[str, Any]:
        return asdict(self)


def count_nodes(model: ir.Model) -> int:
    return sum(1 for _ in model.graph.all_nodes())


def histogram_from_model(model: ir.Model) -> dict[str, int]:
    """Counts nodes by operator, `domain::Op` outside the standard domain, most frequent first."""
    counts: dict[str, int] = {}
    for node in model.graph.all_nodes():
        name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def run_pipeline(
    model: ir.Model, table: Sequence[Pass], progress: Callable[[str], None] | None = None
) -> list[PassTrace]:
    """Run the passes of `table` in order, in place."""
    traces = []
    _log.debug("%d passes", len(table), extra={"graph": (model, "start", len(table))})
    for entry in table:
        if progress is not None:
            progress(entry.name)
        before, start = count_nodes(model), time.perf_counter()
        num_rewrites = entry(model)
        elapsed_ms = (time.perf_counter() - start) * 1e3
        trace = PassTrace(entry.name, num_rewrites, before, count_nodes(model), elapsed_ms)
        _log.debug("%s", trace, extra={"graph": (model, entry.name, num_rewrites)})
        traces.append(trace)
    return traces
