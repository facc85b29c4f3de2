# SPDX-License-Identifier: Apache-2.0
"""Counts and times of a sequence and of a scheduler."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Any

from speccompile.runtime.requests import StepOutput

TIME_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 60_000, 300_000)
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128)


class SequenceStats:
    """Counts and times of one sequence. Times are wall clock; in a batch they include the work for other sequences."""

    __slots__ = (
        "end_s",
        "engine_s",
        "first_s",
        "last_s",
        "num_draft_tokens",
        "num_first_tokens",
        "num_in_first",
        "num_reused",
        "num_tokens",
        "outcomes",
        "prefill_s",
        "start_s",
        "step_s",
    )

    def __init__(self) -> None:
        self.start_s: float | None = None  # of its prefill; None: it waits
        self.end_s = 0.0
        self.prefill_s = 0.0
        self.step_s = 0.0  # in decoding steps, prefill not counted
        self.engine_s = 0.0  # the part of it that engines took
        self.first_s: float | None = None  # of its first step output; None: none yet
        self.last_s = 0.0  # of its latest step output
        self.num_in_first = 0  # tokens of its first step output
        self.num_reused = 0  # prompt tokens that a cache already had
        self.num_tokens = 0
        self.num_first_tokens = 0  # those that reading the prompt gave, outside the steps
        self.num_draft_tokens = 0
        self.outcomes: Counter[tuple[int, int]] = Counter()  # (draft depth, accepted) -> steps

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
        tried = [sum(c for (d, a), c in self.outcomes.items() if d > i and a >= i) for i in range(depth)]
        kept = [sum(c for (_, a), c in self.outcomes.items() if a > i) for i in range(depth)]
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

    def count_end(
        self, reason: str, stats: dict[str, Any], request_ms: float, outcomes: Counter[tuple[int, int]]
    ) -> None:
        """Counts an output that has ended. `request_ms`: milliseconds since its request was submitted."""
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
