# SPDX-License-Identifier: Apache-2.0
"""A combination of drafters is in use soon: its first steps are slow, and its drafts bring one token or many."""

import numpy as np
import pytest

from speccompile.core.protocols import StepTimes
from speccompile.runtime import comparison
from speccompile.runtime.comparison import FIRST_LOSS, FIRST_STEPS, LEAST_PAUSE, PLAIN, TURN
from speccompile.runtime.control import Controller
from speccompile.runtime.requests import StepOutput
from tests.runtime.control_lab import sequences, tell
from tests.runtime.test_control import Ways

NUM_COLD = 6  # steps with drafts that take longer: drafters are tried, shapes are new


def share_of_drafts(seed: int, *, most: int, cold_s: float, prompt_s: float = 0.0) -> float:
    """Decodes texts of 96 tokens after prompts of 100; a plain step takes 1 s, one with drafts 1.5 s.

    Args:
        seed: of what is accepted.
        most: a step with drafts brings so many tokens, or, twice as often, one.
        cold_s: seconds of the first steps with drafts.
        prompt_s: in which the draft reads a prompt.

    Returns:
        The share of steps with drafts among steps 300 to 1500.
    """
    controller, rng = Controller(), np.random.default_rng(seed)
    num_left, num_drafted, drafted = 0, 0, []
    for _ in range(1500):
        if num_left <= 0:
            controller.read(100, prompt_s or None)
            num_left = 96
        is_plain = controller.plan(sequences(1)) == PLAIN
        kept = 0 if is_plain or rng.random() < 2 / 3 else most - 1
        step_s = 1.0 if is_plain else cold_s if num_drafted < NUM_COLD else 1.5
        step_s *= float(np.exp(0.05 * rng.normal()))
        steps = [StepOutput(0, "", [7] * (1 + kept), 0 if is_plain else 5, kept)]
        tell(controller, sequences(1), steps, StepTimes(0.0, step_s, step_s))
        num_left -= 1 + kept
        num_drafted += not is_plain
        drafted.append(not is_plain)
    return float(np.mean(drafted[300:]))


def mean_share(**planted: float) -> float:
    return float(np.mean([share_of_drafts(seed, **planted) for seed in range(12)]))  # type: ignore[arg-type]


def test_first_steps_that_were_slow_do_not_end_drafting_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.67 tokens in 1.5 s, but 4 s in the first steps, and a prompt of 30 s."""
    planted = {"most": 6, "cold_s": 4.0, "prompt_s": 30.0}
    assert mean_share(**planted) > 0.8
    monkeypatch.setattr(comparison, "FIRST_STEPS", 0)  # six steps decide
    assert mean_share(**planted) < 0.4


def test_drafts_that_do_not_pay_end_all_the_same() -> None:
    """1.33 tokens in 1.5 s."""
    assert mean_share(most=2, cold_s=1.5) < 0.1


def test_a_prompt_is_read_for_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 s of a prompt for 96 tokens, which take 54 s with drafts and 96 s without."""
    planted = {"most": 6, "cold_s": 1.5, "prompt_s": 30.0}
    assert mean_share(**planted) > 0.9
    monkeypatch.setattr(comparison, "FIRST_STEPS", 0)
    assert mean_share(**planted) > 0.9
    monkeypatch.setattr(comparison, "FIRST_TEXT", 1)
    assert mean_share(**planted) < 0.2


def test_a_new_batch_size_looks_at_as_many_tokens_before_it_decides() -> None:
    for batch in (1, 4, 8):
        _, drafted = Ways(batch).run(200, lambda _: 1.9)
        ends = [at for at in range(1, 200) if drafted[at] and not drafted[at - 1]]
        assert ends[:2] == [2 * TURN, 4 * TURN + FIRST_STEPS // batch]


def test_drafts_that_do_not_pay_stop_soon_and_those_that_do_are_hardly_interrupted() -> None:
    """Drafts lose 2 s a step on average: 8 steps until `FIRST_LOSS`, and those of the comparison that decides."""
    _, drafted = Ways().run(2 * TURN + LEAST_PAUSE, lambda _: 4.0)
    assert drafted[: 2 * TURN] == [True] * TURN + [False] * TURN
    assert 0 < drafted[2 * TURN :].count(True) <= 2 * FIRST_LOSS // 2 + TURN
    assert not any(drafted[2 * TURN + FIRST_STEPS :])
    _, drafted = Ways().run(2 * TURN + LEAST_PAUSE, lambda _: 1.0)
    assert drafted.count(False) == 2 * TURN


def test_prompts_that_are_read_for_drafts_count_against_them() -> None:
    for draft_s, drafts in ((0.0, True), (0.2, True), (0.4, False)):  # 90, 110, 130 s with drafts; 120 s plain
        ways = Ways()
        for _ in range(20):
            ways.controller.read(100, 100 * draft_s)
            ways.run(60, lambda _: 1.5)
        assert ways.controller.decisions()["1"]["drafts"] is drafts


def test_tokens_and_times_are_of_the_same_steps_where_a_budget_stops_drafting() -> None:
    """The first 36 steps draft, then one in ten: 2 tokens in 2.2 s; the others bring 1 in 1.1 s. It never pays."""
    controller, num_allowed, allowed = Controller(), 0, []
    for _ in range(4000):
        is_plain = controller.plan(sequences(1)) == PLAIN
        kept = int(not is_plain and (num_allowed < 36 or num_allowed % 10 == 0))
        step_s = 1.0 if is_plain else 2.2 if kept else 1.1
        steps = [StepOutput(0, "", [7] * (1 + kept), kept, kept)]
        tell(controller, sequences(1), steps, StepTimes(0.0, step_s, step_s))
        num_allowed += not is_plain
        allowed.append(not is_plain)
    assert np.mean(allowed[100:]) < 0.05


@pytest.mark.parametrize(("lost_s", "most"), [(1.2, TURN), (3.0, 4), (6.0, 3), (20.0, 3)])
def test_a_comparison_that_has_lost_enough_ends_early(lost_s: float, most: int) -> None:
    """A step with drafts takes so much longer than its tokens, 2 on average, take without."""
    _, drafted = Ways().run(40_000, lambda _: 2.0 + lost_s)
    text = "".join("d" if has_drafts else "." for has_drafts in drafted[400:])
    counts = [len(turn) for turn in text.split(".") if turn]
    assert len(counts) > 1 and max(counts) <= TURN
    assert most - 1 <= np.median(counts) <= most


@pytest.mark.parametrize("held_up", [0, 76, 352, 700])
def test_plain_steps_that_were_held_up_keep_no_drafts_that_bring_nothing(held_up: int) -> None:
    """Steps that may draft, but never do, take 1.15 s, plain ones 1 s; some turns of these take half as long again."""
    controller, drafted, active = Controller(), [], sequences(1)
    while len(drafted) < 6000:
        is_plain = controller.plan(active) == PLAIN
        step_s = 1.15 if not is_plain else 1.5 if held_up <= len(drafted) < held_up + 60 else 1.0
        tell(controller, active, [StepOutput(0, "", [7], 0, 0)], StepTimes(0.0, step_s, step_s))
        drafted.append(not is_plain)
    assert np.mean(drafted[600:]) < 0.1
