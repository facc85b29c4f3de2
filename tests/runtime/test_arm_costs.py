# SPDX-License-Identifier: Apache-2.0
"""What trials make of the costs of arms: by whom, at what level, for how long, and how sure."""

import math
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from speccompile.runtime.arm_costs import (
    BLOCK,
    COLD_STEPS,
    DRIFT,
    LEAST_DOUBT,
    LEVEL_STEPS,
    PLAIN,
    STAY_STEPS,
    UNPAIRED_DOUBT,
    Bucket,
    Costs,
    Trial,
)
from speccompile.runtime.controller import DEBT_STEPS, OWN_SPREAD, PLAIN_EVERY, Controller, Reading
from speccompile.runtime.planner import StepTimes
from speccompile.runtime.slots import Step
from tests.runtime.test_controller import Sim

ARMS = (PLAIN, 1, 2, 4, None)


def test_plain_decoding_is_the_measure():
    costs = Costs(ARMS)
    costs.learn(2, PLAIN, 1.9, 0.02)
    costs.learn(4, PLAIN, 2.5, 0.02)
    assert costs.ratio(PLAIN) == 1 and costs.doubts(PLAIN)[PLAIN] == 0
    assert costs.ratios()[2] == pytest.approx(costs.ratio(2))
    assert costs.ratio(2) == pytest.approx(1.9, rel=0.03) and costs.ratio(4) == pytest.approx(2.5, rel=0.03)
    assert costs.tried == {PLAIN, 2, 4}


def test_a_trial_tells_of_its_neighbours_but_less_than_of_itself():
    costs, before = Costs(ARMS), Costs(ARMS)
    costs.learn(2, PLAIN, 4.0, 0.02)
    assert costs.ratio(1) > 1.2 * before.ratio(1) and costs.ratio(4) > 1.3 * before.ratio(4)
    assert costs.doubts(PLAIN)[2] < 0.03 < costs.doubts(PLAIN)[1] < before.doubts(PLAIN)[1]
    assert costs.doubts(2)[4] < before.doubts(2)[4]


def test_trials_are_weighed_by_how_sure_they_are():
    costs = Costs(ARMS)
    for ratio, doubt in ((2.0, 0.02), (2.8, 0.2)):
        costs.learn(2, PLAIN, ratio, doubt)
    assert costs.ratio(2) == pytest.approx(2.0, rel=0.03)
    costs.learn(2, PLAIN, 2.08, 0.02)
    assert costs.ratio(2) == pytest.approx(2.04, rel=0.005)
    assert costs.doubts(PLAIN)[2] == pytest.approx(0.02 / math.sqrt(2), rel=0.1)


@pytest.mark.parametrize("ratio", [1.2, 3.0])
def test_a_trial_that_nobody_would_have_believed_is_believed_if_found_again(ratio):
    costs = Costs(ARMS)
    for _ in range(5):
        costs.learn(2, PLAIN, 1.9, 0.02)
        costs.learn(4, PLAIN, 2.6, 0.02)
    before = costs.doubts(PLAIN)
    costs.learn(2, PLAIN, ratio, 0.05)
    moved = math.log(costs.ratio(2) / 1.9) / math.log(ratio / 1.9)
    assert 0.3 < moved < 0.7
    assert costs.doubts(PLAIN)[2] > 5 * before[2] and costs.doubts(PLAIN)[4] > 4 * before[4]
    for _ in range(2):
        costs.learn(2, PLAIN, ratio, 0.05)
    assert costs.ratio(2) == pytest.approx(ratio, rel=0.08)


def test_how_costs_follow_the_level_is_in_doubt_again_after_a_surprise():
    costs, shares = Costs(ARMS), []
    costs.reference_s = 1e-3
    for is_fixed in (False, True):
        for level in (1.0, 3.0) * 6:
            costs.at(level * 1e-3)
            costs.learn(2, PLAIN, 1 + 1 / level if is_fixed else 2.0, 0.02)
        costs.at(6e-3)
        shares.append(costs.ratio(2))
    assert shares[0] == pytest.approx(2.0, rel=0.05)
    assert shares[1] == pytest.approx(1 + 1 / 6, rel=0.05)


@pytest.mark.parametrize("is_fixed", [True, False])
def test_what_drafts_cost_besides_may_stay_when_the_machine_slows_down(is_fixed):
    """Plain steps of 1 and 3 ms; two drafts cost 1 ms in addition, or as much again as a plain step."""
    costs = Costs(ARMS)
    costs.reference_s = 1e-3
    for level in (1.0, 3.0) * 3:
        costs.at(level * 1e-3)
        costs.learn(2, PLAIN, 1 + 1 / level if is_fixed else 2.0, 0.02)
    for level in (1.0, 2.0, 3.0):
        costs.at(level * 1e-3)
        assert costs.ratio(2) == pytest.approx(1 + 1 / level if is_fixed else 2.0, rel=0.04)
        assert costs.ratio(PLAIN) == 1


def test_what_is_known_grows_old_up_to_what_was_believed_first():
    costs = Costs(ARMS)
    first = costs.doubts(PLAIN)[2], costs.doubts(2)[4]
    costs.learn(2, PLAIN, 1.9, 0.02)
    sure = costs.doubts(PLAIN)[2]
    costs.blur(0.1, share=1.0)
    assert costs.doubts(PLAIN)[2] == pytest.approx(math.hypot(sure, 0.1))
    together = costs.doubts(2)[4]
    costs.blur(0.1, share=0.5)
    assert costs.doubts(2)[4] == pytest.approx(math.hypot(together, 0.1))
    for _ in range(100):
        costs.blur(1.0, share=0.5)
    aged = costs.doubts(PLAIN)[2], costs.doubts(2)[4]
    costs.blur(1.0, share=0.5)
    assert aged == (costs.doubts(PLAIN)[2], costs.doubts(2)[4])
    assert first[0] <= aged[0] < 1.5 * first[0]


def bucket_after(num_steps, seconds=1e-3):
    bucket = Bucket(ARMS, 1)
    for _ in range(num_steps):
        bucket.num_steps += 1
        bucket.learn_level(PLAIN, seconds)
    return bucket


def test_drift_is_by_steps_however_often_one_looks():
    doubts = []
    for every in (10, 1000):
        bucket = bucket_after(20)
        bucket.age()
        bucket.costs.learn(2, PLAIN, 1.9, 0.02)
        for i in range(2000):
            bucket.num_steps += 1
            if i % every == every - 1:
                bucket.age()
        doubts.append(bucket.costs.doubts(PLAIN)[2])
    assert doubts[0] == pytest.approx(doubts[1])
    assert doubts[0] == pytest.approx(math.hypot(0.02, DRIFT * math.sqrt(2)), rel=0.05)


def flicker(bucket, num):
    for seconds in (1e-3, 3e-3) * num:
        for _ in range(2 * LEVEL_STEPS):
            bucket.learn_level(PLAIN, seconds)
        bucket.age()


def test_a_level_that_flickers_is_no_new_machine_but_one_that_stays_is():
    bucket = bucket_after(2 * STAY_STEPS)
    bucket.age()
    flicker(bucket, 10)
    bucket.age()
    bucket.is_moved = False
    known = bucket.costs.doubts(PLAIN)[2]
    flicker(bucket, 10)
    assert not bucket.is_moved and bucket.costs.doubts(PLAIN)[2] == pytest.approx(known)
    bucket.costs.learn(2, PLAIN, 1.9, 0.02)
    known = bucket.costs.doubts(PLAIN)[2]
    for _ in range(3 * STAY_STEPS):
        bucket.learn_level(PLAIN, 4e-3)
        bucket.age()
    assert bucket.is_moved and bucket.costs.doubts(PLAIN)[2] > 2 * known
    assert bucket.level_s == pytest.approx(4e-3)


def run_trial(trial, tried_s, used_s, rng=None):
    """All its steps; the arms in their order."""
    turns = []
    while trial.left:
        turns.append(trial.turn)
        noise = rng.lognormvariate(0, 0.05) if rng else 1.0
        trial.observe((tried_s if trial.turn == trial.arm else used_s) * noise)
    return turns


@pytest.mark.parametrize(("batch", "block"), [(1, 12), (2, 6), (8, 4), (64, 4)])
def test_turns_of_a_trial(batch, block):
    trial = Trial(2, PLAIN, batch, is_new=True)
    assert trial.num_turns == 2
    assert run_trial(trial, 2e-3, 1e-3) == [2] * COLD_STEPS + ([2] * block + [PLAIN] * block) * 2
    assert len(trial.step_s) == len(trial.used_s) == 2 * (block - 1)  # the first of a turn is not like the others
    assert trial.ratio()[0] == pytest.approx(2.0)
    trial = Trial(2, 1, batch, is_new=False)
    run_trial(trial, 2e-3, 1e-3)
    assert len(trial.step_s) == 2 * block


@pytest.mark.parametrize("num", [3, 48])
def test_a_trial_is_no_surer_than_other_processes_let_it_be(num):
    trial = Trial(2, 1, 1, is_new=False)
    trial.step_s, trial.used_s = [2.0] * num, [1.0] * num
    assert trial.ratio()[1] == UNPAIRED_DOUBT  # as the steps of one may be from other times than the other's
    trial.left = 0
    assert trial.ratio()[1] == LEAST_DOUBT < UNPAIRED_DOUBT
    trial.step_s = [1 + i / num for i in range(num)]  # steps that vary tell less, if they are few
    assert (trial.ratio()[1] > LEAST_DOUBT) == (num == 3)


def test_disturbed_steps_of_a_trial_count_little():
    rng, trial = random.Random(0), Trial(3, 2, 1, is_new=False)
    run_trial(trial, 1.5e-3, 1e-3, rng)
    for at in range(0, len(trial.step_s), 4):
        trial.step_s[at] *= 40
    assert trial.ratio()[0] == pytest.approx(1.5, rel=0.08)


class Script:
    """A controller of one sequence whose steps cost what a table says; drafts are always refused."""

    def __init__(self, ms_by_arm, catch_up_ms=0.0):
        self.sim = Sim(1, 0.0, noise=0.0, cost=self.cost)
        self.ms_by_arm, self.catch_up_ms, self.last = ms_by_arm, catch_up_ms, 0

    def cost(self, batch, length):
        ms = self.ms_by_arm(length)
        if length and not self.last:
            ms += self.catch_up_ms
        self.last = length
        return ms


def test_an_arm_beyond_all_bounds_is_left_before_its_trial_is_over():
    script = Script(lambda length: 1.0 if length == 0 else 12.0)
    arms = script.sim.run(400)[1]
    [bucket] = script.sim.controller.buckets.values()
    drafting = sum(arm != PLAIN for arm in arms)
    assert 0 < drafting <= 2 * (COLD_STEPS + BLOCK + 1) < COLD_STEPS + 2 * 12
    assert bucket.used == PLAIN


@pytest.mark.parametrize(("ms", "least"), [(1.0, 2 * 12), (12.0, BLOCK)])
def test_what_seems_good_is_to_stand_a_comparison(ms, least):
    """The latest plain steps were slow: an arm that costs as much as plain decoding seems good until both are seen."""
    controller = Controller(8)
    controller.plan([slot := SimpleNamespace(stats=SimpleNamespace(outcomes=Counter()), speculation="auto")])
    [bucket] = controller.buckets.values()
    bucket.learn_level(PLAIN, 1e-3)
    bucket.recent_s.extend([3e-3] * BLOCK)
    bucket.trial = trial = Trial(2, PLAIN, 1, is_new=False, recent_s=bucket.recent_s)
    num_steps = 0
    while bucket.trial is trial:
        arm = controller.plan([slot])
        step = Step(0, [0] * 3, 2, 2, False, "", None) if arm else Step(0, [0], 0, 0, False, "", None)
        controller.observe([slot], [step], 3, StepTimes(0.0, 0.0, ms / 1e3 if arm else 1e-3))
        num_steps += 1
    assert least <= num_steps < least + 2 * BLOCK
    assert not bucket.recent_s  # they do not tell twice


@pytest.mark.parametrize("catch_up_ms", [0.0, 60.0])
def test_what_drafts_missed_is_learnt_and_part_of_the_price(catch_up_ms):
    script = Script(lambda length: 1.0 + 0.3 * length, catch_up_ms)
    sim = script.sim
    sim.run(300)
    [bucket] = sim.controller.buckets.values()
    assert bucket.used == PLAIN and bucket.level_s == pytest.approx(1e-3, rel=0.05)
    rates = {arm: 1.0 / ratio for arm, ratio in bucket.costs.ratios().items()}
    price = sim.controller._trial(bucket, rates, 1).price
    if catch_up_ms:
        assert bucket.catch_up > 10 and price > bucket.catch_up
    else:
        assert bucket.catch_up < 2 and price < 15


def test_a_trial_of_plain_decoding_pays_for_what_drafts_miss_meanwhile():
    """Drafts are better, not clearly; each of the two turns of plain steps makes them read."""
    lost, gained = [], []  # gained: tokens of a step that drafts, mostly 1
    for catch_up_ms in (0.0, 3.0):
        script = Script(lambda length: 1.0 if length == 0 else 0.95, catch_up_ms)
        script.sim.run(2000)
        [bucket] = script.sim.controller.buckets.values()
        assert bucket.used != PLAIN
        gained.append(script.sim.controller._tokens_by_arm[bucket.used])
        bucket.trial = trial = Trial(PLAIN, bucket.used, 1, is_new=False)
        while bucket.trial is trial:
            script.sim.step()
        lost.append(trial.lost)
    assert 1 < gained[0] < 1.03
    assert lost[0] == pytest.approx(24 * (gained[0] / 0.95 - 1), rel=0.02)
    assert lost[1] - lost[0] == pytest.approx(2 * 3 / 0.95, rel=0.2)


@pytest.mark.parametrize(("num_plain", "told"), [(1, "comeback"), (12, "comeback"), (13, "catch_up")])
def test_coming_back_within_a_trial_is_not_taken_for_a_catch_up(num_plain, told):
    bucket = bucket_after(LEVEL_STEPS)
    untold = {"comeback": "catch_up", "catch_up": "comeback"}[told]
    before = getattr(bucket, untold)
    for _ in range(20):
        bucket.learn_catch_up(2, 1e-3 * (bucket.costs.ratio(2) + 9), num_plain)
    assert getattr(bucket, told) == pytest.approx(9, rel=0.01) and getattr(bucket, untold) == before


def test_a_change_waits_until_it_would_have_paid_for_what_drafts_miss():
    controller = Controller(8)
    bucket = Bucket(controller.arms, 1)
    bucket.catch_up, known = 6.0, {PLAIN: 1.0, 2: 1.03}
    waited = 0
    while controller._waits(bucket, known):
        waited += 10
        bucket.num_steps += 10
    assert waited == 200  # 3 % of so many are 6 steps
    bucket.forgone = 5.9
    bucket.num_steps += 10
    assert controller._waits(bucket, {PLAIN: 1.0, 2: 0.97})
    assert bucket.forgone == pytest.approx(5.6)
    bucket.used, bucket.forgone, waited = 2, 0.0, 0
    while controller._waits(bucket, {PLAIN: 1.05, 2: 1.0}):
        waited += 10
        bucket.num_steps += 10
    assert waited == 60  # 5 % of so many are 3 steps


def test_luck_is_no_reason_for_the_own_policy():
    controller = Controller(8)
    tokens = []
    for num in (30, 3000):
        bucket = Bucket(controller.arms, 4)
        bucket.num_own, bucket.own_tokens = num, 2.0 * num
        tokens.append(controller._tokens(bucket, ())[None])
    assert 1.7 < tokens[0] < 1.85 < 1.95 < tokens[1] < 2.0


def test_what_the_own_policy_brings_is_in_doubt_as_well_as_what_it_costs():
    controller = Controller(8)
    bucket = Bucket(controller.arms, 4)
    bucket.costs.learn(None, PLAIN, 1.9, 0.02)
    bucket.num_own, bucket.own_tokens = 36.0, 2.0 * 36
    controller._tokens_by_arm = controller._tokens(bucket, ())
    doubts = controller._doubts(bucket)
    own = OWN_SPREAD / 6 / controller._tokens_by_arm[None]
    assert doubts[None] == pytest.approx(math.hypot(bucket.costs.doubts(PLAIN)[None], own))
    assert doubts[2] == bucket.costs.doubts(PLAIN)[2]


@pytest.mark.parametrize("has_waited", [False, True])
def test_plain_decoding_is_tried_now_and_then_however_sure_one_is(has_waited):
    controller = Controller(8)
    bucket = Bucket(controller.arms, 1)
    for _ in range(50):
        bucket.costs.learn(1, PLAIN, 1.1, 0.02)
    bucket.learn_level(PLAIN, 1e-3)
    bucket.used, bucket.num_steps = 1, PLAIN_EVERY + has_waited
    bucket.allowance = bucket.credit - 1
    for arm in (2, 3, 4, 6, 8, None):
        bucket.costs.learn(arm, 1, 9.0, 0.02)
    controller._decide(bucket, ())
    assert (bucket.trial is not None and bucket.trial.arm == PLAIN) == has_waited
    if bucket.trial is not None:
        run_trial(bucket.trial, 1e-3, 1.1e-3)
        bucket.learn_trial(bucket.trial)
        controller._decide(bucket, ())
        assert bucket.trial is None


@pytest.mark.parametrize("has_waited", [False, True])
def test_a_debt_does_not_keep_plain_decoding_from_being_tried_for_long(has_waited):
    controller = Controller(8)
    bucket = Bucket(controller.arms, 1)
    bucket.costs.learn(2, PLAIN, 1.7, 0.02)
    bucket.learn_level(PLAIN, 1e-3)
    bucket.used, bucket.allowance = 2, -50.0
    bucket.costs.blur(0.3, share=1.0)
    bucket.num_steps = DEBT_STEPS + has_waited
    controller._decide(bucket, ())
    assert bucket.used == 2
    assert (bucket.trial is not None and bucket.trial.arm == PLAIN) == has_waited


def test_reading_for_drafts_is_borne_by_what_is_decoded():
    reading = Reading()
    assert reading.draft_s_per_token == 0.0
    for _ in range(50):
        reading.learn(40, 40 * 2e-5)
        for _ in range(100):
            reading.count(1)
    assert reading.draft_s_per_token == pytest.approx(0.4 * 2e-5, rel=0.2)
    for _ in range(50):  # nothing is read for drafts now: what it would cost is known all the same
        reading.learn(200, None)
        reading.count(100)
    assert reading.draft_s_per_token == pytest.approx(2 * 2e-5, rel=0.2)


def test_who_reads_much_for_drafts_needs_better_ones():
    def tokens(draft_s):
        controller = Controller(8)
        bucket = Bucket(controller.arms, 4)
        for _ in range(LEVEL_STEPS):
            bucket.learn_level(PLAIN, 2e-3)
        controller.read(50, draft_s)
        controller.reading.count(100)
        return controller._tokens(bucket, ())

    assert tokens(None)[PLAIN] == 1.0
    assert tokens(5e-3)[PLAIN] == pytest.approx(1 + 5e-3 / 100 * 4 / 2e-3, rel=0.2)
    assert tokens(5e-3)[2] == tokens(None)[2]
