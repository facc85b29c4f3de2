# SPDX-License-Identifier: Apache-2.0
"""Whether drafts are on and why: the numbers are those that decided, on simulated steps of known costs."""

import pytest

from speccompile.core.jobs import StepCosts
from speccompile.core.protocols import StepTimes
from speccompile.drafting.budget import Budget, Outlook
from speccompile.runtime.control import LEAST_PAUSE, PLAIN, TURN, Controller, FixedLength
from speccompile.runtime.draft_report import report_from_planner
from speccompile.runtime.requests import StepOutput
from tests.runtime.control_lab import sequences

NUM_DRAFTS = 2


def run(controller: Controller, num_steps: int, cost: float, share: float, *, is_shy: bool = False) -> None:
    """Runs steps whose draft tokens cost so many plain steps each, of which a share is accepted.

    Args:
        controller: plans.
        num_steps: how many.
        cost: of a draft token.
        share: accepted, spread evenly.
        is_shy: the budget drafts nothing unless it is told to.
    """
    drafted = kept = 0
    for _ in range(num_steps):
        limit = controller.plan(sequences(1))
        num = 0 if limit == PLAIN or (limit is None and is_shy) else min(limit or NUM_DRAFTS, NUM_DRAFTS)
        drafted += num
        new = int(drafted * share) - kept
        kept += new
        step = StepOutput(0, "", [7] * (1 + new), num, new)
        controller.observe(sequences(1), [step], StepTimes(0.0, 1 + cost * num, 1 + cost * num))


@pytest.mark.parametrize(
    ("cost", "share", "sentence"),
    [
        (0.35, 0.3, "drafts off: a draft token costs 0.35 of a step here, 30 % are accepted"),
        (0.2, 0.5, "drafts on: a draft token costs 0.2 of a step here, 50 % are accepted"),
        (0.0, 0.5, "drafts on: a draft token costs less than 0.01 of a step here, 50 % are accepted"),
    ],
)
def test_the_numbers_are_those_of_the_steps_and_give_the_gain(cost, share, sentence):
    controller = Controller()
    run(controller, 3 * LEAST_PAUSE, cost, share)
    latest = controller.latest()
    assert latest["draft_token_cost"] == pytest.approx(cost, abs=0.02) and not latest["is_expected"]
    assert latest["accepted_share"] == pytest.approx(share, abs=0.02)
    told_cost, told_share = latest["draft_token_cost"], latest["accepted_share"]
    gain = (1 + told_share * NUM_DRAFTS) / (1 + told_cost * NUM_DRAFTS)
    assert latest["gain"] == pytest.approx(gain, rel=0.01) and latest["drafts"] == (gain > 1)
    report = report_from_planner(controller, 100, 90)  # counts since the start are not what decided
    assert report.sentence.split(", ")[0] == sentence.split(", ")[0] and report.reason == "measured"
    assert abs(float(report.sentence.split(", ")[1].split()[0]) - 100 * share) <= 2


def test_a_budget_that_drafts_nothing_gives_its_own_numbers_until_a_turn_measures_it():
    class Shy:
        outlook = Outlook(0.5, 0.125)

    controller = Controller(weighs=Shy())
    run(controller, 5 * TURN, 0.6, 0.25, is_shy=True)
    expected = "drafts off: a draft token is expected to cost 0.5 of a step here, 12 % are accepted"
    first = report_from_planner(controller, 0, 0)
    assert (first.sentence, first.reason) == (expected, "expected")
    run(controller, 3 * LEAST_PAUSE, 0.6, 0.25, is_shy=True)
    report = report_from_planner(controller, 0, 0)
    assert not report.is_on and report.reason == "measured" and report.cost == pytest.approx(0.6)
    assert report.accepted == pytest.approx(0.25, abs=0.1)  # of the draft tokens of a turn


def test_without_any_number_no_number_is_told():
    controller = Controller()
    run(controller, 5 * TURN, 0.6, 0.25, is_shy=True)
    sentence = "drafts off: no draft is expected to be worth its time"
    assert report_from_planner(controller, 0, 0).sentence == sentence


def test_a_budget_tells_by_which_numbers_it_decided():
    budget = Budget(4, 4, 1, StepCosts(((1, 2.0), (2, 3.0), (5, 6.0))), StepCosts(((1, 0.5),)))
    assert budget.outlook is None
    assert not budget.begins(0.5, 1)
    assert budget.outlook == pytest.approx((0.75, 0.5))  # (3 - 2 + 0.5) / 2 plain steps, and what the estimate says
    assert budget.begins(0.9, 1) and budget.outlook == pytest.approx((0.75, 0.9))


@pytest.mark.parametrize(
    ("planner", "counts", "asked", "sentence"),
    [
        (Controller(), (0, 0), "auto", "drafts on: not yet compared with plain decoding"),
        (Controller(), (10, 4), "off", "drafts off: speculation is off"),
        (Controller(), (10, 4), "on", "drafts on: speculation is on, 40 % are accepted"),
        (FixedLength(3), (10, 4), "auto", "drafts on: their number is fixed, 40 % are accepted"),
        (None, (10, 4), "auto", "drafts on: their number is fixed, 40 % are accepted"),
        (None, (0, 0), "auto", "drafts off: the method drafted nothing"),
    ],
)
def test_what_nobody_measured_has_another_reason(planner, counts, asked, sentence):
    report = report_from_planner(planner, *counts, asked)
    assert report.sentence == report.json_from_report()["sentence"] == sentence
    assert report.is_on == sentence.startswith("drafts on") and report.cost is None
