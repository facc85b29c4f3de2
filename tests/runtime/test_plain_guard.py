# SPDX-License-Identifier: Apache-2.0
"""Offline decoding stops drafting where plain decoding is faster, finds out when that changes, and wastes little."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.runtime.plain_guard import LEAST_PAUSE, MAX_PAUSE, PLAIN, TURN, PlainGuard
from speccompile.runtime.planner import StepTimes
from speccompile.runtime.slots import Slot, Step


def slots(num: int) -> list[Slot]:
    return [Slot(i, [1], SamplingParams(), frozenset(), None) for i in range(num)]


def decode(
    guard: PlainGuard, num_steps: int, cost: Callable[[int], float], batch: int = 1, seed: int = 0
) -> tuple[float, list[bool]]:
    """Runs steps of a made-up engine: a plain step takes 1 s, one with drafts `cost(step)`, with noise of 10 %.

    Returns:
        Tokens per second of a sequence, and by step whether it drafted. A step with drafts brings 2 tokens on average.
    """
    rng, total_s, tokens, drafted = np.random.default_rng(seed), 0.0, 0, []
    for at in range(num_steps):
        is_plain = guard.plan(slots(batch)) == PLAIN
        kept = [0 if is_plain else int(rng.integers(0, 3)) for _ in range(batch)]
        step_s = (1.0 if is_plain else cost(at)) * float(np.exp(0.1 * rng.normal()))
        steps = [Step(i, [7] * (k + 1), 2, k, False, "", None) for i, k in enumerate(kept)]
        guard.observe(slots(batch), steps, 3, StepTimes(0.0, step_s, step_s))
        total_s, tokens = total_s + step_s, tokens + sum(k + 1 for k in kept)
        drafted.append(not is_plain)
    return tokens / total_s / batch, drafted


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    ("cost", "best"), [(1.2, 2 / 1.2), (1.6, 1.25), (1.9, 1.05), (2.1, 1.0), (2.3, 1.0), (4.0, 1.0)]
)
def test_decoding_is_within_two_percent_of_the_better_way(cost: float, best: float, batch: int) -> None:
    rates = [decode(PlainGuard(), 4000, lambda _: cost, batch, seed)[0] for seed in range(4)]
    assert np.mean(rates) > 0.98 * best


def test_drafts_that_do_not_pay_stop_at_once_and_those_that_do_are_hardly_interrupted() -> None:
    _, drafted = decode(PlainGuard(), 2 * TURN + LEAST_PAUSE, lambda _: 4.0)
    assert drafted == [True] * TURN + [False] * (TURN + LEAST_PAUSE)
    _, drafted = decode(PlainGuard(), 2 * TURN + LEAST_PAUSE, lambda _: 1.0)
    assert drafted.count(False) == TURN


@pytest.mark.parametrize(("before", "after"), [(1.2, 3.0), (3.0, 1.2)])
def test_a_change_of_costs_is_found(before: float, after: float) -> None:
    guard = PlainGuard()
    decode(guard, 4000, lambda at: before)
    _, drafted = decode(guard, 2 * MAX_PAUSE, lambda at: after)
    share = np.mean(drafted[-MAX_PAUSE // 2 :])
    assert share > 0.95 if after < 2 else share < 0.05


def test_batch_sizes_are_compared_apart() -> None:
    guard = PlainGuard()
    decode(guard, 300, lambda _: 4.0, batch=1)
    decode(guard, 300, lambda _: 1.2, batch=2)
    decided: dict[str, Any] = guard.decisions()
    assert [decided[size]["drafts"] for size in ("1", "2")] == [False, True]
    assert decided["1"]["gain"] == pytest.approx(0.5, rel=0.25)
