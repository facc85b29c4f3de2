# SPDX-License-Identifier: Apache-2.0
"""Where drafts are off for long, a draft that cannot catch up has no further part in a sequence."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from speccompile.core.protocols import StepTimes
from speccompile.core.sampling import SamplingParams
from speccompile.runtime.comparison import LEAST_PAUSE
from speccompile.runtime.control import Controller, FixedLength, controller_of
from speccompile.runtime.requests import Speculation, StepOutput
from speccompile.runtime.sequences import TokenSequence
from tests.runtime.control_lab import sequences, tell
from tests.runtime.scheduler_lab import Bench, greedy, numbers


def run_until_rest(controller: Controller, active: list[TokenSequence], cost: float, most: int = 2000) -> int:
    """Runs steps with drafts that bring a token and take `cost` plain steps; returns how many until drafts are off."""
    for num in range(most):
        kept = int(controller.plan(active) != 0)
        if controller.num_rests:
            return num
        step = StepOutput(0, "", [7] * (1 + kept), kept, kept)
        step_s = cost if kept else 1.0
        tell(controller, active, [step], StepTimes(0.0, step_s, step_s))
    raise AssertionError("drafts are never off")


def with_left(num: int, speculation: Speculation = "auto") -> TokenSequence:
    sequence = TokenSequence(0, [1, 2], SamplingParams(max_new_tokens=num), frozenset(), None)
    sequence.speculation = speculation
    return sequence


@pytest.mark.parametrize(("num_left", "is_dropped"), [(LEAST_PAUSE // 2, True), (100 * LEAST_PAUSE, False)])
def test_a_sequence_that_ends_before_the_next_comparison_loses_its_draft(num_left: int, is_dropped: bool) -> None:
    dropped: list[TokenSequence] = []
    controller, sequence = Controller(None, dropped.append), with_left(num_left)
    run_until_rest(controller, [sequence], 2.1)
    assert dropped == ([sequence] if is_dropped else [])


def test_any_sequence_does_where_drafts_are_clearly_slower_and_forced_ones_never_do() -> None:
    dropped: list[TokenSequence] = []
    controller, long, forced = Controller(None, dropped.append), with_left(100_000), with_left(1, "on")
    for _ in range(2 * LEAST_PAUSE):  # until two comparisons have found it
        run_until_rest(controller, [long], 4.0)
        tell(controller, [long], [StepOutput(0, "", [7], 0, 0)], StepTimes(0.0, 1.0, 1.0))
    assert dropped and dropped[0] is long
    dropped.clear()
    short = with_left(50)
    run_until_rest(controller, [short, forced], 4.0)
    assert dropped == [short]


def test_drafts_that_are_on_or_compared_are_kept() -> None:
    dropped: list[TokenSequence] = []
    controller, sequence = Controller(None, dropped.append), with_left(10)
    with pytest.raises(AssertionError, match="never off"):
        run_until_rest(controller, [sequence], 1.1)
    assert dropped == []


def test_only_a_draft_that_cannot_catch_up_is_dropped() -> None:
    flushed: list[bool] = []
    for catches_up in (True, False):
        proposer: Any = SimpleNamespace(catches_up=catches_up, flush=lambda: flushed.append(True))
        controller, [sequence] = controller_of(proposer), sequences(1)
        run_until_rest(controller, [sequence], 4.0)
        assert sequence.has_draft is catches_up
    assert flushed == [True]  # the target is about to run


class Dropping(FixedLength):
    """Drops drafts now and then, as a clock could make it, and decodes plainly or with drafts at its whim.

    Args:
        seed: of its whims.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng, self.num_dropped = random.Random(seed), 0
        self.bench: Any = None  # that it plans for

    def plan(self, active: Sequence[TokenSequence]) -> int | None:
        drop = controller_of(self.bench.engine.proposer)._drop_draft
        self.num_rests = self.rng.randrange(2)
        for sequence in active if self.num_rests else ():
            if drop is not None and sequence.has_draft and self.rng.random() < 0.4:
                drop(sequence)
                self.num_dropped += 1
        return 0 if self.num_rests else None


@pytest.mark.parametrize("seed", range(6))
def test_states_of_the_others_and_texts_are_right(seed: int) -> None:
    """The heads check that they are given the state before the root; prompts share prefixes with dropped sequences."""
    planner = Dropping(seed)
    bench = planner.bench = Bench(planner, kind="heads", max_seq=120)
    prompts = [numbers(8 + 5 * i, seed=i % 2) for i in range(7)]
    for _ in range(2):
        handles = [bench.submit(p, sampling=SamplingParams(max_new_tokens=12 + i)) for i, p in enumerate(prompts)]
        bench.finish()
        assert [bench.tokens(h) for h in handles] == [greedy(p, 12 + i) for i, p in enumerate(prompts)]
    assert planner.num_dropped > 5
