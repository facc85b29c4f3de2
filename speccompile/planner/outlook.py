# SPDX-License-Identifier: Apache-2.0
"""Predicted speed and memory of methods by precision and batch, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from speccompile.errors import RecipeError
from speccompile.planner.acceptance import Acceptance
from speccompile.planner.candidates import PLAIN
from speccompile.planner.costs import LOOP_S, Graphs
from speccompile.planner.machine import Machine

MAX_DRAFTS = 8  # of a chain that is looked at
BREAK_EVEN_BATCHES = tuple(1 << i for i in range(10))  # to 512
TARGET = "target"


@dataclass(frozen=True)
class Row:
    """A method at a precision and a batch: ranges are over acceptance and over what the machine reaches."""

    method: str
    precision: str
    batch: int
    num_drafts: int
    tokens_per_s: tuple[float, float]  # of all sequences together
    of_plain: tuple[float, float]
    token_ms: float  # between two tokens of a sequence, the middle of the range
    prompt_ms: float  # of 512 tokens
    memory_bytes: float
    break_even_batch: int | None  # the smallest of `BREAK_EVEN_BATCHES` where plain decoding is as fast; None: none is

    @property
    def speed(self) -> float:
        return fmean(self.tokens_per_s)


def speeds(
    graphs: Graphs, machines: Sequence[Machine], acceptance: Acceptance, num_drafts: int, batch: int, context: int
) -> list[tuple[float, float]]:
    """Returns tokens/s and its quotient to plain decoding, at the low and the high end of acceptance.

    Args:
        machines: the slow and the fast end of what the machine reaches.
        num_drafts: K of a chain; 0: plain decoding.
    """
    found = []
    for machine, length in zip(machines, acceptance.lengths(num_drafts), strict=True):
        target = graphs[TARGET]
        plain_s = target.step_s(machine, 1, batch, context) + LOOP_S
        step_s = target.step_s(machine, num_drafts + 1, batch, context) + LOOP_S
        for name, graph in graphs.items():
            step_s += 0.0 if name == TARGET else graph.drafts_s(machine, num_drafts, batch, context)
        found.append((batch * length / step_s, length * plain_s / step_s))
    return found


def best_row(
    name: str,
    graphs: Graphs,
    machine: Machine,
    acceptance: Acceptance,
    batch: int,
    context: int,
) -> Row:
    """Returns a method with the K that is expected to be the fastest."""
    ends = machine.at(0), machine.at(1)

    def at(num: int, size: int) -> list[tuple[float, float]]:
        return speeds(graphs, ends, acceptance, num, size, context)

    counts = [0] if name == PLAIN else range(1, MAX_DRAFTS + 1)
    num = max(counts, key=lambda k: fmean(speed for speed, _ in at(k, batch)))
    (low, low_ratio), (high, high_ratio) = at(num, batch)
    even = None
    if num:
        lost = (size for size in BREAK_EVEN_BATCHES if max(fmean(r for _, r in at(k, size)) for k in counts) <= 1.0)
        even = next(lost, None)
    weights = sum(graph.weights_bytes for graph in graphs.values())
    kept = batch * sum(graph.slot_bytes for graph in graphs.values())
    prompt_s = fmean(graphs[TARGET].prompt_s(end, 512) for end in ends)
    return Row(
        method=name,
        precision=graphs[TARGET].precision,
        batch=batch,
        num_drafts=num,
        tokens_per_s=(low, high),
        of_plain=(low_ratio, high_ratio),
        token_ms=1e3 * batch / fmean((low, high)),
        prompt_ms=1e3 * prompt_s,
        memory_bytes=weights + kept,
        break_even_batch=even,
    )


def rows_of(
    graphs: Mapping[str, Graphs],
    machine: Machine,
    acceptance: Mapping[str, Acceptance],
    batches: Sequence[int],
    context: int,
) -> list[Row]:
    """Returns the rows of all methods that fit into the machine's memory, by batch and then by speed.

    Args:
        acceptance: by the method's name; "" is that of all others.
        context: number of cache rows in use of each sequence.
    """
    rows = []
    for batch in batches:
        found = [
            best_row(name, held, machine, acceptance.get(name, acceptance[""]), batch, context)
            for name, held in graphs.items()
        ]
        rows += sorted((row for row in found if row.memory_bytes <= machine.memory_bytes), key=lambda r: -r.speed)
    return rows


def choose(rows: Sequence[Row], latency_ms: float | None, wants_throughput: bool) -> Row:
    """Returns the row to build.

    Args:
        latency_ms: most milliseconds between two tokens of a sequence; the row with the most tokens/s among those.
        wants_throughput: most tokens/s of all; otherwise the fastest at the smallest batch.

    Raises:
        RecipeError: no row fits into the memory, or is fast enough.
    """
    if not rows:
        raise RecipeError("plan", "no method that fits into the memory", "one", "Quantise, or shorten the context.")
    if latency_ms is not None:
        fast = [row for row in rows if row.token_ms <= latency_ms]
        if not fast:
            least = min(row.token_ms for row in rows)
            todo = "Allow more, or name a faster machine."
            raise RecipeError("--latency", f"{latency_ms} ms", f"at least {least:.2f} ms, the fastest row", todo)
        return max(fast, key=lambda row: row.speed)
    least_batch = min(row.batch for row in rows)
    return max((row for row in rows if wants_throughput or row.batch == least_batch), key=lambda row: row.speed)
