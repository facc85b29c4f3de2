# SPDX-License-Identifier: Apache-2.0
"""Counts and histograms of a scheduler since it was made, JSON-ready."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Any

from speccompile.runtime.sequences import Step

TIME_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 60_000, 300_000)
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128)


class Histogram:
    """Counts values by upper bound.

    Args:
        bounds: upper bounds, ascending; values above the last have a count of their own.
    """

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


class Counters:
    """Counts of outputs, tokens and steps, and histograms of times."""

    def __init__(self) -> None:
        self.num_requests = self.num_busy = 0
        self.finished: Counter[str] = Counter()  # outputs by finish reason
        self.num_steps = self.num_slot_steps = 0  # of batches; of sequences
        self.num_tokens = self.num_draft_tokens = self.num_accepted = 0
        self.outcomes: Counter[tuple[int, int]] = Counter()  # (draft depth, accepted) -> steps of finished sequences
        self.num_prompt_tokens = self.num_prefill_tokens = self.num_reused_tokens = 0
        self.num_prefix_hits = self.num_prompts = 0
        self.num_engine_faults = 0
        self.batch = Histogram(BATCH_BOUNDS)
        self.times = {
            name: Histogram(TIME_BOUNDS_MS)
            for name in ("queue_ms", "time_to_first_token_ms", "time_per_token_ms", "request_ms", "step_ms")
        }

    def count_step(self, steps: Sequence[Step], step_s: float) -> None:
        """Counts a step of a batch."""
        self.num_steps += 1
        self.num_slot_steps += len(steps)
        self.batch.add(len(steps))
        self.times["step_ms"].add(step_s * 1e3)
        for step in steps:
            self.num_tokens += len(step.tokens)
            self.num_draft_tokens += step.num_draft_tokens
            self.num_accepted += step.num_accepted

    def count_end(
        self, reason: str, stats: dict[str, Any], request_ms: float, outcomes: Counter[tuple[int, int]]
    ) -> None:
        """Counts an output that has ended.

        Args:
            request_ms: milliseconds since its request was submitted.
        """
        self.finished[reason] += 1
        self.outcomes.update(outcomes)
        self.times["request_ms"].add(request_ms)
        for name in ("queue_ms", "time_to_first_token_ms", "time_per_token_ms"):
            if stats[name] is not None:
                self.times[name].add(stats[name])

    def json_from_counters(self) -> dict[str, Any]:
        """Returns a snapshot."""
        outcomes = self.outcomes
        depth = max((drafts for drafts, _ in outcomes), default=0)
        tried = [sum(c for (d, a), c in outcomes.items() if d > i and a >= i) for i in range(depth)]
        kept = [sum(c for (_, a), c in outcomes.items() if a > i) for i in range(depth)]
        return {
            "num_requests": self.num_requests,
            "num_busy": self.num_busy,
            "num_finished": dict(self.finished),
            "num_steps": self.num_steps,
            "num_slot_steps": self.num_slot_steps,
            "num_tokens": self.num_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted": self.num_accepted,
            "mean_acceptance_length": 1 + self.num_accepted / self.num_slot_steps if self.num_slot_steps else 1.0,
            "num_tried_by_position": tried,
            "num_accepted_by_position": kept,
            "num_prompts": self.num_prompts,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_prefill_tokens": self.num_prefill_tokens,
            "num_reused_tokens": self.num_reused_tokens,
            "num_prefix_hits": self.num_prefix_hits,
            "num_engine_faults": self.num_engine_faults,
            "histograms": {
                "batch": self.batch.json_from_histogram(),
                **{name: times.json_from_histogram() for name, times in self.times.items()},
            },
        }
