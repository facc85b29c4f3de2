# SPDX-License-Identifier: Apache-2.0
"""Predicted speed and memory of methods by precision and batch, what is uncertain in it, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from speccompile.errors import RecipeError
from speccompile.planner.acceptance import Acceptance
from speccompile.planner.candidates import PLAIN
from speccompile.planner.costs import LOOP_S, RUN_S, GraphCosts, Graphs, distinct_experts
from speccompile.planner.machine import BITS, Machine
from speccompile.planner.traffic import MAX_DRAFTS

BREAK_EVEN_BATCHES = tuple(1 << i for i in range(10))  # to 512
TARGET = "target"
TITLES = ("method", "K", "form", "batch", "tokens/s", "of plain", "ms a\ntoken", "GB", "pays\nbelow", "uncertain\nby ±")
Ends = tuple[float, float]  # low and high
Grid = tuple[tuple[Ends, Ends], tuple[Ends, Ends]]  # by the ends of the machine and of acceptance


@dataclass(frozen=True)
class Row:
    """A method at a precision and a batch: ranges are over acceptance and over what the machine reaches."""

    method: str
    precision: str
    batch: int
    num_drafts: int
    tokens_per_s: Ends  # of all sequences together
    of_plain: Ends
    token_ms: float  # between two tokens of a sequence, the middle of the range
    prompt_ms: float  # of 512 tokens
    memory_bytes: float
    # At both ends of acceptance, the smallest of `BREAK_EVEN_BATCHES` where plain decoding is as fast; None: none is.
    break_even: tuple[int | None, int | None]
    uncertain: Mapping[str, float]  # half the range of the speed, of its middle, over acceptance and machine alone
    acceptance: str  # its source; empty for plain decoding
    step: tuple[float, float, float]  # of the target: operations of its products, bytes that it reads, seconds

    @property
    def speed(self) -> float:
        return fmean(self.tokens_per_s)

    @property
    def sentence(self) -> str:
        drafts = f", up to {self.num_drafts} drafts" if self.num_drafts else ""
        low, high = self.tokens_per_s
        return f"{self.method}{drafts}, {self.precision}, batch {self.batch}: {low:.0f} to {high:.0f} tokens/s"

    @property
    def cells(self) -> tuple[str, ...]:
        """What tables show, in the order of `TITLES`."""
        what, share = max(self.uncertain.items(), key=lambda found: found[1])
        low, high = (0 if end == 1 else end for end in self.break_even)
        pays = f"{low}" if low == high else f"{low}-{high}" if high is not None else f"{low}+"
        return (
            self.method,
            f"{self.num_drafts or ''}",
            self.precision,
            f"{self.batch}",
            "-".join(dict.fromkeys(map(_short, self.tokens_per_s))),
            f"{self.of_plain[0]:.2f}-{self.of_plain[1]:.2f}" if self.num_drafts else "",
            f"{self.token_ms:.2f}",
            f"{self.memory_bytes / 1e9:.{2 if self.memory_bytes < 1e10 else 0}f}",
            {"0": "never", "None": ">512"}.get(pays, pays) if self.num_drafts else "",
            f"{what} {share:.0%}" if share >= 0.005 else "",
        )


def speeds(
    graphs: Graphs, machines: Sequence[Machine], acceptance: Acceptance, num_drafts: int, batch: int, context: int
) -> Grid:
    """Returns tokens/s and their quotient to plain decoding at each end of the machine and of acceptance.

    Args:
        machines: the slow and the fast end of what the machine reaches.
        num_drafts: K of a chain; 0: plain decoding.
    """
    lengths = acceptance.lengths(num_drafts)

    def on(machine: Machine) -> tuple[Ends, Ends]:
        target = graphs[TARGET]
        plain_s = target.step_s(machine, 1, batch, context) + LOOP_S * machine.host
        step_s = target.step_s(machine, num_drafts + 1, batch, context)
        step_s += machine.host * (LOOP_S + target.host_s * (num_drafts > 0))
        step_s = acceptance.drafted * step_s + (1 - acceptance.drafted) * plain_s
        for graph in (found for name, found in graphs.items() if name != TARGET):
            step_s += graph.drafts_s(machine, num_drafts, batch, context)
            step_s += machine.host * RUN_S * graph.num_runs(num_drafts)
        low, high = ((batch * length / step_s, length * plain_s / step_s) for length in lengths)
        return low, high

    slow, fast = machines
    return on(slow), on(fast)


def _short(number: float) -> str:
    return f"{number:.0f}" if number < 1e4 else f"{number / 1e3:.3g}k" if number < 1e6 else f"{number / 1e6:.3g}M"


def step_work(graph: GraphCosts, nodes: int, batch: int) -> tuple[float, float]:
    """Returns the operations of a step's products with weights, and the bytes of the weights that it reads."""
    rows, read, used = nodes * batch, float(graph.counts.num_linear), float(graph.counts.num_linear)
    if graph.num_experts:
        read -= graph.counts.num_experts * (
            1 - distinct_experts(graph.num_experts, graph.num_chosen, rows) / graph.num_experts
        )
        used -= graph.counts.num_experts * (1 - graph.num_chosen / graph.num_experts)
    return 2 * used * rows, read * BITS[graph.precision] / 8


def _speed_of(grid: Grid) -> float:
    return fmean((grid[0][0][0], grid[1][1][0]))


def _half_range(pairs: Sequence[Ends]) -> float:
    return fmean((high - low) / (high + low) for low, high in pairs)


def best_row(name: str, graphs: Graphs, machine: Machine, acceptance: Acceptance, batch: int, context: int) -> Row:
    """Returns a method with the K that is expected to be the fastest."""
    ends = machine.at(0), machine.at(1)
    counts = [0] if name == PLAIN else range(1, MAX_DRAFTS + 1)

    def grids(size: int) -> dict[int, Grid]:
        return {k: speeds(graphs, ends, acceptance, k, size, context) for k in counts}

    num, grid = max(grids(batch).items(), key=lambda found: _speed_of(found[1]))
    even: list[int | None] = [None, None]
    for size in reversed(BREAK_EVEN_BATCHES if num else ()):
        for end, held in enumerate(even):
            best = max(fmean(row[end][1] for row in found) for found in grids(size).values())
            even[end] = size if best <= 1.0 else held
    ratios = [ratio for row in grid for _, ratio in row]
    weights = sum(graph.weights_bytes for graph in graphs.values())
    kept = batch * sum(graph.slot_bytes for graph in graphs.values())
    target = graphs[TARGET]
    prompt_s = fmean(target.prompt_s(end, 512) for end in ends)
    step_s = fmean(target.step_s(end, num + 1, batch, context) for end in ends)
    return Row(
        method=name,
        precision=target.precision,
        batch=batch,
        num_drafts=num,
        tokens_per_s=(grid[0][0][0], grid[1][1][0]),
        of_plain=(min(ratios), max(ratios)),
        token_ms=1e3 * batch / _speed_of(grid),
        prompt_ms=1e3 * prompt_s,
        memory_bytes=weights + kept,
        break_even=(even[0], even[1]),
        uncertain={
            "drafts": _half_range([(row[0][0], row[1][0]) for row in grid]),
            "machine": _half_range([(slow[0], fast[0]) for slow, fast in zip(*grid, strict=True)]),
        },
        acceptance=acceptance.source,
        step=(*step_work(target, num + 1, batch), step_s),
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
        context: number of cache rows in use of each sequence.
    """
    rows = []
    for batch in batches:
        found = [best_row(name, held, machine, acceptance[name], batch, context) for name, held in graphs.items()]
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
