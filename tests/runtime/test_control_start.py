# SPDX-License-Identifier: Apache-2.0
"""A combination of drafters is in use soon: its first steps are slow, and its drafts bring one token or many."""

import numpy as np
import pytest

from speccompile.core.protocols import StepTimes
from speccompile.runtime import comparison
from speccompile.runtime.comparison import PLAIN
from speccompile.runtime.control import Controller
from speccompile.runtime.sequences import Step
from tests.runtime.test_control import sequences

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
        steps = [Step(0, [7] * (1 + kept), 0 if is_plain else 5, kept, False, "", None)]
        controller.observe(sequences(1), steps, StepTimes(0.0, step_s, step_s))
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
