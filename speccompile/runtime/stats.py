# SPDX-License-Identifier: Apache-2.0
"""Counts and times of a sequence and of a scheduler."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from speccompile.runtime.requests import StepOutput

TIME_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 60_000, 300_000)
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128)
TIMES_OF_REQUESTS = ("queue_ms", "time_to_first_token_ms", "time_per_token_ms")
Outcomes: TypeAlias = Counter[tuple[int, int]]  # (draft depth, accepted) -> steps


@dataclass(slots=True)
class SequenceStats:
    """Counts and times of one sequence. Times are wall clock; in a batch they include the work for other sequences."""

    start_s: float | None = None  # of its prefill; None: it waits
    end_s: float = 0.0
    prefill_s: float = 0.0
    step_s: float = 0.0  # in decoding steps, prefill not counted
    engine_s: float = 0.0  # the part of it that engines took
    first_s: float | None = None  # of its first step output; None: none yet
    last_s: float = 0.0  # of its latest step output
    num_in_first: int = 0  # tokens of its first step output
    num_reused: int = 0  # prompt tokens that a cache already had
    num_tokens: int = 0
    num_first_tokens: int = 0  # those that reading the prompt gave, outside the steps
    num_draft_tokens: int = 0
    outcomes: Outcomes = field(default_factory=Counter)

    def json_from_stats(self) -> dict[str, Any]:
        """Returns a JSON-ready dict.

        Times are wall clock: `time_ms` from the start of the prefill to the last token, `step_ms` in the
        sequence's steps, `engine_ms` the part of these in engines. `num_first_tokens`, 1 or 0, are those that reading
        the prompt gave, outside the steps. `tokens_per_s` is the others over `step_ms`.
        `acceptance_by_position` is accepted / tried at each depth, where a depth is tried when its parent was
        accepted. `mean_acceptance_length` is 1 + accepted / steps. `acceptance_histogram` counts the steps that drafted
        by the number of drafts that were accepted, from 0 to the deepest draft's depth.
        """
        steps = sum(self.outcomes.values())
        accepted = sum(num * count for (_, num), count in self.outcomes.items())
        depth = max((drafts for drafts, _ in self.outcomes), default=0)
        tried, kept = _by_position(self.outcomes, depth)
        total_s = 0.0 if self.start_s is None else self.end_s - self.start_s
        return {
            "num_steps": steps,
            "num_tokens": self.num_tokens,
            "num_first_tokens": self.num_first_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted": accepted,
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
            "acceptance_histogram": [
                sum(count for (drafts, num), count in self.outcomes.items() if drafts and num == i)
                for i in range(depth + 1)
            ],
            "acceptance_by_position": [k / t for k, t in zip(kept, tried, strict=True) if t],
            "time_ms": total_s * 1e3,
            "prefill_ms": self.prefill_s * 1e3,
            "step_ms": self.step_s * 1e3,
            "engine_ms": self.engine_s * 1e3,
            "outside_engine_ms": (self.step_s - self.engine_s) * 1e3,
            "tokens_per_s": (self.num_tokens - self.num_first_tokens) / self.step_s if self.step_s > 0 else 0.0,
        }

    def json_of_request(self, num_prompt: int, submitted_s: float, now_s: float) -> dict[str, Any]:
        """Returns `json_from_stats` and what its request adds; times that do not exist are None."""
        first_s, start_s = self.first_s, now_s if self.start_s is None else self.start_s
        num_later = 0 if first_s is None else self.num_tokens - self.num_in_first
        return {
            **self.json_from_stats(),
            "num_prompt_tokens": num_prompt,
            "num_reused_tokens": self.num_reused,
            "queue_ms": (start_s - submitted_s) * 1e3,
            "time_to_first_token_ms": None if first_s is None else (first_s - submitted_s) * 1e3,
            "time_per_token_ms": (self.last_s - (first_s or 0.0)) * 1e3 / num_later if num_later else None,
        }


class Histogram:
    """Counts values by ascending upper bounds; values above the last have a count of their own."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def json_from_histogram(self) -> dict[str, Any]:
        """Returns a dict: `counts[i]` values were in (`bounds[i - 1]`, `bounds[i]`]; the last count has no bound."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum, "count": sum(self.counts)}


@dataclass
class Counters:
    """Counts of outputs, tokens and steps, and histograms of times."""

    num_requests: int = 0
    num_busy: int = 0
    num_steps: int = 0  # of batches
    num_slot_steps: int = 0  # of sequences
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    num_prefill_tokens: int = 0
    num_reused_tokens: int = 0
    num_prefix_hits: int = 0
    num_engine_faults: int = 0

    def __post_init__(self) -> None:
        self.finished: Counter[str] = Counter()  # outputs by finish reason
        self.outcomes: Outcomes = Counter()  # of finished sequences
        self.batch = Histogram(BATCH_BOUNDS)
        self.times = {name: Histogram(TIME_BOUNDS_MS) for name in (*TIMES_OF_REQUESTS, "request_ms", "step_ms")}

    def count_step(self, steps: Sequence[StepOutput], step_s: float) -> None:
        """Counts a step of a batch."""
        self.num_steps += 1
        self.num_slot_steps += len(steps)
        self.batch.add(len(steps))
        self.times["step_ms"].add(step_s * 1e3)
        for step in steps:
            self.num_tokens += len(step.tokens)
            self.num_draft_tokens += step.num_draft_tokens
            self.num_accepted += step.num_accepted

    def count_end(self, reason: str, stats: dict[str, Any], request_ms: float, outcomes: Outcomes) -> None:
        """Counts an output that has ended. `request_ms`: milliseconds since its request was submitted."""
        self.finished[reason] += 1
        self.outcomes.update(outcomes)
        self.times["request_ms"].add(request_ms)
        for name in TIMES_OF_REQUESTS:
            if stats[name] is not None:
                self.times[name].add(stats[name])

    def json_from_counters(self) -> dict[str, Any]:
        """Returns a snapshot."""
        depth = max((drafts for drafts, _ in self.outcomes), default=0)
        tried, kept = _by_position(self.outcomes, depth)
        return {
            **asdict(self),
            "num_finished": dict(self.finished),
            "mean_acceptance_length": 1 + self.num_accepted / self.num_slot_steps if self.num_slot_steps else 1.0,
            "num_tried_by_position": tried,
            "num_accepted_by_position": kept,
            "histograms": {
                "batch": self.batch.json_from_histogram(),
                **{name: times.json_from_histogram() for name, times in self.times.items()},
            },
        }


def _by_position(outcomes: Outcomes, depth: int) -> tuple[list[int], list[int]]:
    """Returns how many steps tried a draft at each depth, and how many accepted it."""
    tried = [sum(c for (d, a), c in outcomes.items() if d > i and a >= i) for i in range(depth)]
    return tried, [sum(c for (_, a), c in outcomes.items() if a > i) for i in range(depth)]
