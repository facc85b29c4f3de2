# SPDX-License-Identifier: Apache-2.0
"""While drafts are off, the loop tells its planner of many steps at once, and none is lost."""

from time import sleep
from typing import Any

import pytest

from speccompile.core.protocols import StepTimes
from speccompile.core.sampling import SamplingParams
from speccompile.runtime.control import MOST_RESTS, Controller, FixedLength
from speccompile.runtime.loop import decode
from speccompile.runtime.sequences import SequenceBatch, Step, TokenSequence
from tests.runtime.control_lab import sequences
from tests.runtime.test_loop import decode_with, make_proposer, make_verifier, some_prompts


class Resting(FixedLength):
    """Rests for a number of steps, then lets one step draft; notes what it is told.

    Args:
        most: steps of a rest.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.num_rests, self.num_plans = most, 0, 0
        self.told: list[tuple[str, int, tuple[int, ...]]] = []

    def plan(self, active: Any) -> int | None:
        self.num_plans += 1
        self.num_rests = self.most if self.num_plans % 2 else 0
        return 0 if self.num_rests else None

    def rested(self, active: Any, num_steps: int, seconds: float) -> None:
        assert 0 < num_steps <= self.most and seconds > 0
        self.told.append(("rest", num_steps, tuple(len(sequence.tokens) for sequence in active)))

    def observe(self, active: Any, steps: Any, times: StepTimes) -> None:
        self.told.append(("step", 1, tuple(len(sequence.tokens) for sequence in active)))


@pytest.mark.parametrize("most", [1, 4, 1000])
def test_every_step_is_told_once_before_its_sequences_change(most: int) -> None:
    planner, proposer = Resting(most), make_proposer("draft", num_draft_tokens=3)
    told: list[tuple[int, int]] = []  # slots and nodes that the proposer was told of
    proposer.observe = lambda slots, nodes, times: told.append((slots, nodes))
    params = [SamplingParams(max_new_tokens=num) for num in (9, 20, 31, 12)]
    waiting = [TokenSequence(i, p, params[i], frozenset(), None) for i, p in enumerate(some_prompts(4))]
    num_steps, begun = 0, set()
    for steps in decode(make_verifier(), proposer, SequenceBatch(waiting, 2), planner=planner):
        num_steps += steps[0].prompt_index in begun  # first tokens come with the prompts
        begun |= {step.prompt_index for step in steps}
    rests = [item for item in planner.told if item[0] == "rest"]
    drafted = [item for item in planner.told if item[0] == "step"]
    assert len(told) == len(drafted) and all(nodes > 1 for _, nodes in told[:3])
    assert planner.num_plans == len(planner.told)
    assert sum(num for _, num, _ in planner.told) == num_steps
    if most == 4:
        assert {num for _, num, _ in rests} >= {4} and min(num for _, num, _ in rests) < 4  # cut by an end
    assert [sequence.tokens for sequence in waiting] == plain_texts(params)


def plain_texts(params: list[SamplingParams]) -> list[list[int]]:
    waiting = [TokenSequence(i, p, params[i], frozenset(), None) for i, p in enumerate(some_prompts(4))]
    list(decode(make_verifier(), make_proposer("none"), SequenceBatch(waiting, 1)))
    return [sequence.tokens for sequence in waiting]


class Alternating(FixedLength):
    """Lets every other step draft; notes the time of each, and takes long to do so."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = 0
        self.seconds: dict[bool, list[float]] = {True: [], False: []}  # by whether it was plain

    def plan(self, active: Any) -> int | None:
        self.limit = None if self.limit == 0 else 0
        return self.limit

    def observe(self, active: Any, steps: Any, times: StepTimes) -> None:
        self.seconds[self.limit == 0].append(times.step_s)
        sleep(0.02)


def test_what_it_takes_to_learn_from_steps_with_drafts_is_a_part_of_their_time() -> None:
    """Plain steps in rests take none of it, so plain steps that are compared with drafts do not count it either."""
    planner, proposer = Alternating(), make_proposer("draft", num_draft_tokens=3)
    proposer.observe = lambda slots, nodes, times: sleep(0.01)
    waiting = [TokenSequence(0, some_prompts(1)[0], SamplingParams(max_new_tokens=24), frozenset(), None)]
    list(decode(make_verifier(), proposer, SequenceBatch(waiting, 1), planner=planner))
    drafted, plain = planner.seconds[False], planner.seconds[True]
    assert len(drafted) > 3 and len(plain) > 3
    assert drafted[0] > 0.01 and min(drafted[1:]) > 0.03  # the proposer's time, and the planner's for the last step
    assert min(plain) < 0.03


def test_sampled_text_whose_drafts_are_drawn_asks_nobody() -> None:
    planner = Resting(5)
    assert decode_with(planner, 0.8) == decode_with(None, 0.8)
    assert planner.told == [] and planner.num_plans == 0


def test_a_controller_counts_rests_as_steps_one_by_one() -> None:
    """The same steps of 1 s, told one by one and together, lead to the same decisions."""
    counts = []
    for at_once in (False, True):
        controller, limits = Controller(), []
        active, at = sequences(1), 0
        while at < 6000:
            limit = controller.plan(active)
            if controller.num_rests:
                assert limit == 0 and controller.num_rests <= MOST_RESTS
                num = controller.num_rests if at_once else 1
                controller.rested(active, num, float(num))
            else:
                kept, num = int(limit != 0), 1
                step = Step(0, [7] * (1 + kept), kept, kept, False, "", None)
                step_s = 3.0 if kept else 1.0
                controller.observe(active, [step], StepTimes(0.0, step_s, step_s))
            limits += [limit] * num
            at += num
        counts.append((limits[:6000], controller.decisions()["1"]["gain"]))
    assert counts[0][0] == counts[1][0] and counts[0][0].count(0) > 5500
    assert counts[0][1] == pytest.approx(counts[1][1])
