# SPDX-License-Identifier: Apache-2.0
"""The controller on simulated steps, whose costs and acceptance are known, and on a scheduler over mock engines."""

import json
import random
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.runtime.acceptance_record import FIRST_RATE, AcceptanceRecord
from speccompile.runtime.arm_costs import PLAIN
from speccompile.runtime.controller import ALLOWANCE, LENGTHS, Controller, bucket_of
from speccompile.runtime.planner import StepTimes
from speccompile.runtime.slots import Step
from tests.runtime.test_scheduler import Bench

OWN_LENGTH = 2  # of the chains that the simulated method drafts under its own policy
# Milliseconds of a step by the number of nodes of all sequences: dear from 8 on, then slowly rising, as seen on a CPU.
POINTS = ((1, 1.72), (2, 2.0), (4, 2.41), (6, 2.8), (7, 2.9), (8, 7.2), (16, 8.5), (40, 16), (64, 26), (600, 250))


def step_ms(batch, length, draft_ms=0.15):
    """What a step costs that drafts `length` tokens in each sequence."""
    nodes = batch * (1 + length)
    (n0, ms0), (n1, ms1) = next(pair for pair in pairwise(POINTS) if nodes <= pair[1][0])
    return ms0 + (ms1 - ms0) * (max(nodes, n0) - n0) / (n1 - n0) + length * (draft_ms + 0.013 * batch)


def tokens_of(rate, length):
    """A sequence gains so many in a step."""
    return sum(rate**i for i in range(length + 1))


def kept_of(rng, rate, length):
    """Drafts that are kept of a chain."""
    kept = 0
    while kept < length and rng.random() < rate:
        kept += 1
    return kept


class Sim:
    """Steps of sequences whose drafts are each kept at `rate`, on a machine whose steps are noisy."""

    def __init__(self, batch, rate, seed=0, noise=0.1, cost=step_ms):
        self.rng, self.controller = random.Random(seed), Controller(16)
        self.rate, self.noise, self.cost, self.load = rate, noise, cost, 1.0
        self.slots = [self.fresh() for _ in range(batch)]
        self.ms = self.num_tokens = self.num_expected = 0

    def fresh(self):
        return SimpleNamespace(stats=SimpleNamespace(outcomes=Counter()), speculation="auto")

    def step(self):
        limit, steps = self.controller.plan(self.slots), []
        length = OWN_LENGTH if limit is None else limit
        for slot in self.slots:
            kept = kept_of(self.rng, self.rate, length)
            slot.stats.outcomes[length, kept] += 1
            steps.append(Step(0, [0] * (kept + 1), length, kept, False, "", None))
        ms = self.cost(len(self.slots), length) * self.load * self.rng.lognormvariate(0, self.noise)
        self.controller.observe(self.slots, steps, 1 + length, StepTimes(0.0, 0.0, ms / 1e3))
        self.ms += ms
        self.num_tokens += sum(len(step.tokens) for step in steps)
        self.num_expected += len(steps) * tokens_of(self.rate, length)
        return limit

    def run(self, num_steps):
        """Expected tokens a millisecond, as luck decides nothing; now and then a sequence ends and another comes."""
        self.ms = self.num_tokens = self.num_expected = 0
        arms = []
        for i in range(num_steps):
            arms.append(self.step())
            if i % 60 == 59:
                self.slots[self.rng.randrange(len(self.slots))] = self.fresh()
        return self.num_expected / self.ms, arms

    def best(self):
        batch = len(self.slots)
        return max(batch * tokens_of(self.rate, k) / self.cost(batch, k) for k in (0, *LENGTHS))


@pytest.mark.distribution
@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("rate", [0.3, 0.55, 0.75])
def test_what_is_used_is_near_to_the_best(batch, rate):
    sim = Sim(batch, rate, seed=batch, noise=0.05)
    sim.run(1000)
    speed, _ = sim.run(1000)
    assert speed > 0.96 * sim.best()


@pytest.mark.distribution
def test_trials_lose_no_more_than_they_may():
    for batch, rate in ((1, 0.5), (16, 0.75), (64, 0.4)):
        sim = Sim(batch, rate)
        sim.run(1000)
        [bucket] = sim.controller.buckets.values()
        # One trial may turn out dearer than its price said.
        assert bucket.num_lost <= ALLOWANCE * bucket.num_tokens + 1.5 * bucket.credit
        assert bucket.num_lost > 0
        first, steps = bucket.num_lost, bucket.num_tokens
        sim.run(3000)
        assert bucket.num_lost - first < 2 * ALLOWANCE * (bucket.num_tokens - steps) + bucket.credit


def test_arms_that_cannot_be_better_are_not_tried():
    sim = Sim(64, 0.3, noise=0.02)
    _, arms = sim.run(1000)
    assert set(arms) & {3, 4, 6, 8} == set()
    assert arms.count(PLAIN) > 950


def test_a_machine_that_is_slower_for_all_changes_no_decision():
    sim = Sim(8, 0.6, noise=0.03)
    sim.run(800)
    [bucket] = sim.controller.buckets.values()
    before, level = bucket.used, bucket.level_s
    sim.load = 3.0
    _, arms = sim.run(300)
    assert bucket.used == before
    assert arms.count(before) > 240
    assert 2.5 < bucket.level_s / level < 3.5


@pytest.mark.distribution
@pytest.mark.parametrize(("starts_dear", "num_steps"), [(True, 15000), (False, 4000)])
def test_costs_that_change_are_noticed(starts_dear, num_steps):
    def cost(batch, length):
        return step_ms(batch, length, draft_ms=0.15 if is_cheap else 2.5)

    is_cheap = not starts_dear
    sim = Sim(2, 0.6, noise=0.05, cost=cost)
    sim.run(600)
    [bucket] = sim.controller.buckets.values()
    assert (bucket.used == PLAIN) == starts_dear
    is_cheap = starts_dear
    sim.run(num_steps)
    assert (bucket.used == PLAIN) != starts_dear
    speed, _ = sim.run(1000)
    assert speed > 0.95 * sim.best()


def test_acceptance_that_changes_is_noticed_at_once():
    sim = Sim(4, 0.3, noise=0.03, cost=lambda batch, length: 10 + 2 * length)
    _, arms = sim.run(600)
    sim.rate = 0.9
    sim.run(300)
    _, later = sim.run(300)
    shown = [sum(arm or 0 for arm in row[-200:]) / 200 for row in (arms, later)]
    assert shown[0] < 1.5 and shown[1] > 3


def test_batch_sizes_learn_for_themselves_what_steps_cost():
    sim = Sim(2, 0.6, noise=0.03)
    sim.run(400)
    sim.slots = [sim.fresh() for _ in range(64)]
    sim.run(200)
    used = {size: bucket.used for (size, _), bucket in sim.controller.buckets.items()}
    assert used[2] != PLAIN and used[bucket_of(64)] == PLAIN
    assert sim.controller.expects_drafts(2) and not sim.controller.expects_drafts(64)
    assert sim.controller.expects_drafts(30)  # nothing is known of it


def test_who_leaves_no_decision_is_not_learnt_from():
    sim = Sim(3, 0.6)
    for slot in sim.slots:
        slot.speculation = "off"
    assert sim.run(20)[1] == [None] * 20
    assert sim.controller.buckets == {}
    sim.slots[0].speculation, sim.slots[1].speculation = "on", "auto"
    sim.run(20)
    assert list(sim.controller.decisions()) == ["3, some forced"]


def test_decisions_can_be_shown():
    sim = Sim(8, 0.6, noise=0.03)
    sim.run(800)
    shown = sim.controller.decisions()
    assert json.loads(json.dumps(shown)) == shown
    row = shown["8"]
    assert row["num_steps"] == 800 and row["arm"] in row["tokens_per_s_by_arm"]
    assert sum(row["share_of_steps_by_arm"].values()) == pytest.approx(1)
    best = max(row["tokens_per_s_by_arm"], key=row["tokens_per_s_by_arm"].__getitem__)
    assert row["tokens_per_s_by_arm"][row["arm"]] >= row["tokens_per_s_by_arm"][best] / 1.05
    assert row["tokens_per_s_by_arm"]["plain"] == pytest.approx(8 / step_ms(8, 0) * 1e3, rel=0.05)
    assert row["cost_by_arm"]["plain"] == 1 and 0 < row["share_lost_to_trials"] < 0.2


def test_batch_sizes_are_looked_at_together_the_more_the_larger():
    tops = [bucket_of(batch) for batch in range(1, 65)]
    assert tops[:8] == list(range(1, 9))
    assert tops == sorted(tops) and len(set(tops[8:])) == 8
    assert all(batch <= top < 1.4 * batch for batch, top in enumerate(tops, 1))


def test_acceptance_is_counted_as_far_as_drafts_were_tried():
    record = AcceptanceRecord(4)
    assert record.rates == [FIRST_RATE] * 4
    steps = [Step(0, [], drafts, kept, False, "", None) for drafts, kept in ((3, 3), (3, 0), (1, 1), (0, 0))] * 400
    record.learn(3, steps)
    assert record.rates[:3] == pytest.approx([2 / 3, 1.0, 1.0], abs=0.03)
    assert record.rates[3] == FIRST_RATE
    expected = record.expected(())
    assert expected[0] == 1.0 and expected[3] == pytest.approx(1 + 3 * 2 / 3, abs=0.1)


def test_a_request_moves_what_is_expected_of_it():
    record = AcceptanceRecord(3)
    good, bad = (SimpleNamespace(outcomes=Counter({(3, kept): 60})) for kept in (3, 0))
    assert record.expected([bad])[3] < record.expected(())[3] < record.expected([good])[3]
    mixed = record.expected([good, bad])[3]
    assert mixed == pytest.approx((record.expected([good])[3] + record.expected([bad])[3]) / 2)
    assert record.expected([SimpleNamespace(outcomes=Counter())])[3] == pytest.approx(record.expected(())[3])


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_what_is_expected_of_a_request_is_what_it_was_seen_to_bring(factor, length):
    """Its rates are others' times a factor: what follows for all lengths is known."""
    record, rng = AcceptanceRecord(4), random.Random(1)
    record.learn(4, [Step(0, [], 4, kept_of(rng, 0.6, 4), False, "", None) for _ in range(4000)])
    stats = SimpleNamespace(outcomes=Counter((length, kept_of(rng, 0.6 * factor, length)) for _ in range(2000)))
    for k, gain in record.expected([stats]).items():
        assert gain == pytest.approx(tokens_of(0.6 * factor, k), rel=0.06)
    assert record.expected([stats])[length] == pytest.approx(tokens_of(0.6 * factor, length), rel=0.04)


@pytest.mark.parametrize("max_depth", [0, 2])
def test_nothing_is_expected_of_drafts_where_none_can_be_kept(max_depth):
    record = AcceptanceRecord(max_depth)
    record._kept = [0.0] * max_depth
    stats = SimpleNamespace(outcomes=Counter({(max_depth, 0): 5}))
    assert record.expected([stats]) == {k: pytest.approx(1.0, abs=0.02) for k in range(max_depth + 1)}


class Restless(Controller):
    """Changes its mind at every step, as a clock could make it."""

    def __init__(self):
        super().__init__(8)
        self.rng = random.Random(5)

    def plan(self, slots):
        super().plan(slots)
        self._arm = self.rng.choice(self.arms)
        return self._arm


@pytest.mark.parametrize("kind", ["chain", "tree", "heads"])
def test_no_decision_changes_a_text(kind):
    texts = []
    for planner in (None, Controller(8), Restless()):
        bench = Bench(planner, kind=kind)
        tickets = [
            bench.submit([1 + i, 2, 3 + i], sampling=SamplingParams(max_new_tokens=14 + i, temperature=t, seed=i))
            for i, t in enumerate((0.0, 1.0, 0.7, 0.0, 1.3))
        ]
        bench.finish()
        texts.append([bench.tokens(ticket) for ticket in tickets])
    assert texts[0] == texts[1] == texts[2]
