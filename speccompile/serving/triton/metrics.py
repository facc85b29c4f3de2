# SPDX-License-Identifier: Apache-2.0
"""The scheduler's counts at Triton's /metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Stats = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One metric."""

    name: str
    description: str
    is_counter: bool
    read: Callable[[Stats], float]


def _key(name: str) -> Callable[[Stats], float]:
    return lambda stats: float(stats[name])


def _finished(reason: str) -> Callable[[Stats], float]:
    return lambda stats: float(stats["num_finished"].get(reason, 0))


def _acceptance_rate(stats: Stats) -> float:
    drafted = stats["num_draft_tokens"]
    return float(stats["num_accepted"] / drafted) if drafted else 0.0


FAMILIES = (
    Family("speccompile_tokens_total", "Tokens emitted", True, _key("num_tokens")),
    Family("speccompile_prompt_tokens_total", "Prompt tokens taken in", True, _key("num_prompt_tokens")),
    Family("speccompile_reused_tokens_total", "Prompt tokens found in a kept cache", True, _key("num_reused_tokens")),
    Family("speccompile_draft_tokens_total", "Draft tokens scored by the target", True, _key("num_draft_tokens")),
    Family("speccompile_accepted_tokens_total", "Draft tokens accepted", True, _key("num_accepted")),
    Family("speccompile_steps_total", "Steps of the target over a batch", True, _key("num_steps")),
    Family("speccompile_refused_total", "Requests refused because the queue was full", True, _key("num_busy")),
    Family("speccompile_cancelled_total", "Outputs ended by cancellation", True, _finished("cancelled")),
    Family("speccompile_timeouts_total", "Outputs ended by a time-out", True, _finished("timeout")),
    Family("speccompile_errors_total", "Outputs ended by an error", True, _finished("error")),
    Family("speccompile_acceptance_rate", "Accepted over drafted tokens since the start", False, _acceptance_rate),
    Family(
        "speccompile_mean_acceptance_length",
        "Tokens a sequence and step since the start",
        False,
        _key("mean_acceptance_length"),
    ),
    Family("speccompile_queued", "Requests that wait", False, _key("num_queued")),
    Family("speccompile_active", "Sequences that decode", False, _key("num_active")),
)


class Metrics:
    """Families in the server, for one model."""

    def __init__(self, pb: Any, labels: Mapping[str, str]) -> None:
        self._rows = []
        for family in FAMILIES:
            kind = pb.MetricFamily.COUNTER if family.is_counter else pb.MetricFamily.GAUGE
            opened = pb.MetricFamily(name=family.name, description=family.description, kind=kind)
            # The family is kept: its metrics go with it.
            self._rows.append((family, opened, opened.Metric(labels=dict(labels))))
        self._last: dict[str, float] = {}

    def update(self, stats: Stats) -> None:
        """Bring the server up to date with a snapshot; what did not change is not sent."""
        for family, _, metric in self._rows:
            value, before = family.read(stats), self._last.get(family.name, 0.0)
            if value == before:
                continue
            if family.is_counter:
                metric.increment(value - before)
            else:
                metric.set(value)
            self._last[family.name] = value
