# SPDX-License-Identifier: Apache-2.0
"""Statistics of decoding a sequence: counts, acceptance, times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.protocols import Engine
from speccompile.core.specs import CANDIDATE_PROBS, CONFIDENCES, GraphSpec


class TimedEngine:
    """An engine that sums the time spent in it. See `speccompile.core.protocols.Engine`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.spec: GraphSpec = engine.spec
        self.max_slots, self.max_rows = engine.max_slots, engine.max_rows
        self.compacts_in_step, self.states = engine.compacts_in_step, engine.states
        self.max_scored = engine.max_scored
        self.seconds = 0.0
        self.num_runs = 0

    def run(self, feeds: Mapping[str, NDArray[Any]], first_slot: int = 0) -> Mapping[str, NDArray[Any]]:
        """Runs one step, timed."""
        start = perf_counter()
        outputs = self.engine.run(feeds, first_slot)
        self.seconds += perf_counter() - start
        self.num_runs += 1
        return outputs

    def reset(self, rows: int = 1) -> None:
        self.engine.reset(rows)

    @property
    def view_rows(self) -> int:
        return self.engine.view_rows

    @property
    def graph_fault(self) -> str | None:
        return self.engine.graph_fault

    def shrink(self, rows: int) -> None:
        start = perf_counter()
        self.engine.shrink(rows)
        self.seconds += perf_counter() - start

    def move_slot(self, source: int, dest: int, rows: int | None = None) -> None:
        start = perf_counter()
        self.engine.move_slot(source, dest, rows)
        self.seconds += perf_counter() - start

    def swap_slots(self, first: int, second: int, rows: int) -> None:
        start = perf_counter()
        self.engine.swap_slots(first, second, rows)
        self.seconds += perf_counter() - start

    def slide_slot(self, slot: int, first: int, num: int) -> None:
        start = perf_counter()
        self.engine.slide_slot(slot, first, num)
        self.seconds += perf_counter() - start

    def clear_slot(self, slot: int) -> None:
        self.engine.clear_slot(slot)

    def read_caches(self, slot: int, rows: int) -> Mapping[str, NDArray[Any]] | None:
        return self.engine.read_caches(slot, rows)

    def compact(self, lengths: NDArray[Any], path: NDArray[Any]) -> None:
        start = perf_counter()
        self.engine.compact(lengths, path)
        self.seconds += perf_counter() - start


class DraftEngine(TimedEngine):
    """A draft's engine whose confidences are always finite.

    Where a draft gives NaN for a sequence, its confidences are 0 instead, so that estimates stay finite, and its cache
    rows of that slot are zeroed: they would spoil the drafts of later sequences in the slot. Texts do not depend on it.
    """

    def run(self, feeds: Mapping[str, NDArray[Any]], first_slot: int = 0) -> Mapping[str, NDArray[Any]]:
        outputs = super().run(feeds, first_slot)
        for name in (CANDIDATE_PROBS, CONFIDENCES):
            sure = outputs.get(name)
            if sure is None or np.isfinite((sure := np.asarray(sure)).sum()):
                continue
            is_finite = np.isfinite(sure)
            for row in np.flatnonzero(~is_finite.reshape(len(sure), -1).all(axis=1)):
                self.clear_slot(first_slot + int(row))
            outputs = {**outputs, name: np.where(is_finite, sure, np.zeros_like(sure))}
        return outputs


class SequenceStats:
    """Counts and times of one sequence.

    Times are wall clock; in a batch they include the work for other sequences.
    """

    __slots__ = (
        "end_s",
        "engine_s",
        "num_draft_tokens",
        "num_first_tokens",
        "num_tokens",
        "outcomes",
        "prefill_s",
        "start_s",
        "step_s",
    )

    def __init__(self, now_s: float) -> None:
        self.start_s = self.end_s = now_s
        self.prefill_s = 0.0
        self.step_s = 0.0  # in decoding steps, prefill not counted
        self.engine_s = 0.0  # the part of it that engines took
        self.num_tokens = 0
        self.num_first_tokens = 0  # those that reading the prompt gave, outside the steps
        self.num_draft_tokens = 0
        self.outcomes: Counter[tuple[int, int]] = Counter()  # (draft depth, accepted) -> steps

    def add_times(self, now_s: float, step_s: float, engine_s: float) -> None:
        self.end_s = now_s
        self.step_s += step_s
        self.engine_s += engine_s

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
        total_s = self.end_s - self.start_s
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
