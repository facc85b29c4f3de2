# SPDX-License-Identifier: Apache-2.0
"""Clients that ask a server for some time, and what they saw."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import httpx

MOST_PIECES = 6  # a client that hangs up does so before this many


@dataclass(frozen=True)
class Task:
    """A prompt and the one right answer to it.

    Args:
        prompt: a text.
        max_tokens: to ask for.
        text: what the offline engine gives, greedy and without drafts.
    """

    prompt: str
    max_tokens: int
    text: str


@dataclass(frozen=True)
class Outcome:
    """What came of one request.

    Args:
        text: of the whole answer.
        first_s: until the first text; None of an answer that came whole.
        num_tokens: as the server counts them.
        error: what went wrong; None when nothing did.
    """

    text: str = ""
    first_s: float | None = None
    num_tokens: int = 0
    error: str | None = None


class Server(Protocol):
    """A server under load."""

    name: str

    def pids(self) -> list[int]:
        """Returns its processes."""
        ...

    async def ask(self, client: httpx.AsyncClient, task: Task, streams: bool, most_step_outputs: int | None) -> Outcome:
        """Sends a task; hangs up after `most_step_outputs`, where that is given."""
        ...

    async def ask_wrongly(self, client: httpx.AsyncClient, rng: random.Random) -> str | None:
        """Send a malformed request; None when it was refused as it must be, else what happened."""
        ...

    def counts(self) -> dict[str, float]:
        """Returns `active`, `queued`, and what else it counts."""
        ...

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        ...


@dataclass
class Report:
    """What the clients of one phase saw."""

    latencies_s: list[float] = field(default_factory=list)
    firsts_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    resident_mib: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def json_from_report(self) -> dict[str, Any]:
        """Returns percentiles in ms, rates, ends and faults."""
        quarter = max(1, len(self.resident_mib) // 4)
        return {
            "seconds": round(self.seconds, 1),
            "ends": dict(self.ends),
            "tokens_per_s": round(self.num_tokens / self.seconds, 1),
            "requests_per_s": round(sum(self.ends.values()) / self.seconds, 2),
            "latency_p50_ms": percentile_ms(self.latencies_s, 0.50),
            "latency_p99_ms": percentile_ms(self.latencies_s, 0.99),
            "first_p50_ms": percentile_ms(self.firsts_s, 0.50),
            "first_p99_ms": percentile_ms(self.firsts_s, 0.99),
            # Quarters of the phase: caches fill in the first one.
            "resident_mib": [
                round(max(self.resident_mib[at : at + quarter], default=0.0), 1)
                for at in range(0, quarter * 4, quarter)
            ],
            "faults": self.faults[:20],
        }


def percentile_ms(values_s: Sequence[float], share: float) -> float | None:
    """Returns the value that `share` of the values do not exceed, in ms; None without values."""
    ordered = sorted(values_s)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 1) if ordered else None


def resident_mib(pids: Sequence[int]) -> float:
    """Returns the memory of some processes, shared pages counted in each."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


@dataclass(frozen=True)
class Load:
    """How clients behave.

    Args:
        clients: at once.
        seconds: until no new request is sent.
        cancels, malformed: shares of requests that are abandoned, and that are wrong.
        seed: of what they choose.
    """

    clients: int = 64
    seconds: float = 180.0
    cancels: float = 0.0
    malformed: float = 0.0
    seed: int = 0


async def run_load(server: Server, tasks: Sequence[Task], load: Load) -> Report:
    """Let the clients ask until the time is over, and wait for the last answers."""
    report = Report()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.clients)
    async with httpx.AsyncClient(limits=limits, timeout=120, trust_env=False) as client:
        sampler = asyncio.ensure_future(_sample_memory(server, report))
        start_s = perf_counter()
        ends_s = start_s + load.seconds
        jobs = [_client(server, client, tasks, load, i, ends_s, report) for i in range(load.clients)]
        await asyncio.gather(*jobs)
        sampler.cancel()
        await asyncio.gather(sampler, return_exceptions=True)
    report.seconds = perf_counter() - start_s
    return report


async def _sample_memory(server: Server, report: Report) -> None:
    while True:
        report.resident_mib.append(resident_mib(server.pids()))
        await asyncio.sleep(1)


async def _client(
    server: Server,
    client: httpx.AsyncClient,
    tasks: Sequence[Task],
    load: Load,
    index: int,
    ends_s: float,
    report: Report,
) -> None:
    rng = random.Random(load.seed * 1000 + index)
    while perf_counter() < ends_s:
        draw = rng.random()
        if draw < load.malformed:
            fault = await server.ask_wrongly(client, rng)
            report.ends["refused" if fault is None else "fault"] += 1
            report.faults += [] if fault is None else [fault]
            continue
        cancels = draw < load.malformed + load.cancels
        await _ask(server, client, rng.choice(tasks), rng, cancels, report)


async def _ask(
    server: Server, client: httpx.AsyncClient, task: Task, rng: random.Random, cancels: bool, report: Report
) -> None:
    start_s = perf_counter()
    most = rng.randrange(MOST_PIECES) if cancels else None
    outcome = await server.ask(client, task, cancels or rng.random() < 0.7, most)
    if outcome.error is not None:
        report.ends["fault"] += 1
        report.faults.append(outcome.error)
    elif cancels:
        report.ends["cancelled"] += 1
        if not task.text.startswith(outcome.text):
            report.faults.append(f"mixed: {outcome.text!r} is no beginning of {task.text!r}")
    else:
        is_right = outcome.text == task.text
        report.ends["right" if is_right else "wrong"] += 1
        report.faults += [] if is_right else [f"{outcome.text!r} is not {task.text!r}"]
        report.latencies_s.append(perf_counter() - start_s)
        report.firsts_s += [] if outcome.first_s is None else [outcome.first_s]
    report.num_tokens += outcome.num_tokens
