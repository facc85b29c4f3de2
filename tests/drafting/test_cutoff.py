# SPDX-License-Identifier: Apache-2.0
import pytest

from speccompile.core.jobs import StepCosts
from speccompile.drafting.cutoff import Cutoff, SlotRecord
from speccompile.drafting.home_rate import HomeRate

CHEAP = (StepCosts(((1, 10.0), (16, 11.0))), StepCosts(((1, 0.1),)))
DEAR = (StepCosts(((1, 1.0), (16, 16.0))), StepCosts(((1, 1.0),)))
NONE = (StepCosts(), StepCosts())


def cutoff(costs=NONE, num=4, is_fixed=False, floor=0.0):
    return Cutoff(num, is_fixed, floor, *costs)


def test_without_costs_all_is_scored():
    assert cutoff().length([[0.01] * 4], 1) == 4
    assert cutoff().pays([0.01], 1)


def test_a_fixed_length_does_not_look_at_time():
    assert cutoff(DEAR, is_fixed=True).length([[0.01] * 4], 1) == 4
    assert cutoff(DEAR, is_fixed=True).pays([0.01], 1)


def test_the_floor_ends_a_chain_when_no_slot_is_above_it():
    rule = cutoff(floor=0.5)
    assert rule.length([[0.9, 0.8, 0.6, 0.9]], 1) == 2  # 0.9 * 0.8 * 0.6 < 0.5
    assert rule.length([[0.9, 0.8, 0.6, 0.9], [0.99] * 4], 2) == 4


def test_time_decides_the_length():
    assert cutoff(CHEAP).length([[0.9] * 4], 1) == 4
    # 1/2, 1.9/3, 2.71/4, 3.439/5, 4.095/6 tokens a millisecond: the fourth draft is not worth its time.
    assert cutoff(DEAR).length([[0.9] * 4], 1) == 3
    assert cutoff(DEAR).length([[0.3, 0.3, 0.3, 0.3]], 1) == 0
    assert cutoff(CHEAP).length([[0.9, 0.9, 0.01, 0.01]], 1) == 2


def test_one_good_chain_does_not_pay_for_a_batch_of_bad_ones():
    steep = (StepCosts(((1, 10.0), (8, 11.0), (64, 200.0))), StepCosts(((1, 0.1),)))
    assert cutoff(steep).length([[0.95] * 4], 1) == 4
    assert cutoff(steep).length([[0.95] * 4, *[[0.02] * 4] * 7], 8) < 4


def test_drafting_pays_where_rates_are_high_and_steps_wide():
    assert cutoff(CHEAP).pays([0.3], 1) and not cutoff(CHEAP).pays([0.01], 1)
    assert not cutoff(DEAR).pays([0.4], 1)


def test_verdicts_move_rate_and_odds_and_steps_without_drafts_bring_the_rate_back():
    record = SlotRecord(0.0)
    for _ in range(60):
        record.draft([0.5] * 3)
        record.learn(3, 3)
    assert record.rate > 0.9 and record.draft([0.5])[0] > 0.8
    for _ in range(200):
        record.draft([0.5])
        record.learn(1, 0)
    assert record.rate < 0.1 and record.draft([0.5])[0] < 0.2
    for _ in range(300):
        record.learn(0, 0)
    assert record.rate == pytest.approx(0.7, abs=0.02)


def test_greedy_slots_share_where_they_begin():
    home = HomeRate(0.7)
    record = SlotRecord(0.0, home)
    for _ in range(200):
        record.draft([0.9] * 3)
        record.learn(3, 0)
    assert SlotRecord(0.0, home).rate == home.value < 0.05 and SlotRecord(0.0).rate == 0.7
    record.learn(0, 0, was_drafted=True)
    assert record.rate < 0.05
    for _ in range(200):
        record.learn(0, 0)
    assert 0.03 < record.rate < 0.1
    for _ in range(200):
        record.draft([0.9] * 3)
        record.learn(3, 3)
    assert home.value > 0.9


def test_certain_confidence_stays_certain():
    assert SlotRecord(-1.0).draft([1.0, 0.0]) == [1.0, 0.0]
