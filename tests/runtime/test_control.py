# SPDX-License-Identifier: Apache-2.0
"""Budget and controller on simulated steps of known costs and acceptance, and on a scheduler of mock engines."""

import functools
import itertools
import json
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest

from speccompile.core.jobs import StepCosts
from speccompile.core.protocols import StepTimes
from speccompile.core.sampling import SamplingParams
from speccompile.drafting.acceptance import AcceptanceEstimate, SharedPrior
from speccompile.drafting.budget import Budget
from speccompile.runtime.control import LEAST_PAUSE, PLAIN, TURN, Controller, FixedLength, bucket_of
from speccompile.runtime.requests import StepOutput
from speccompile.runtime.sequences import TokenSequence
from tests.runtime.control_lab import sequences
from tests.runtime.test_scheduler import Bench

pytestmark = pytest.mark.distribution

MAX_DRAFTS = 8
# Milliseconds of a step by the number of nodes of all sequences: dear from 8 on, then slowly rising, as seen on a CPU.
POINTS = ((1, 1.72), (2, 2.0), (4, 2.41), (6, 2.8), (7, 2.9), (8, 7.2), (16, 8.5), (40, 16), (64, 26), (600, 250))
RECORD = StepCosts(tuple(point for point in POINTS if point[0] <= 16))  # as a build measures them: one sequence


def score_ms(batch: int, length: int) -> float:
    nodes = batch * (1 + length)
    (n0, ms0), (n1, ms1) = next(pair for pair in pairwise(POINTS) if nodes <= pair[1][0])
    return ms0 + (ms1 - ms0) * (max(nodes, n0) - n0) / (n1 - n0)


def draft_ms(batch: int) -> float:
    return 0.15 + 0.013 * batch


def tokens_of(rate: float, length: int) -> float:
    """Returns the expected tokens of a step of one sequence."""
    return sum(rate**i for i in range(length + 1))


@functools.cache
class Sim:
    """A method whose drafts are each kept at `rate` and know it, on a machine whose steps are noisy."""

    def __init__(self, batch: int, rate: float, seed: int = 0, noise: float = 0.1, slow_drafts: float = 1.0) -> None:
        self.rng, self.controller = random.Random(seed), Controller()
        self.budget = Budget(MAX_DRAFTS, MAX_DRAFTS, 1, RECORD, StepCosts(((1, 0.15), (16, 0.3))))
        self.batch, self.rate, self.noise, self.slow_drafts, self.load = batch, rate, noise, slow_drafts, 1.0
        self.num_runs, self.known = 0, AcceptanceEstimate(SharedPrior(MAX_DRAFTS))

    def cost_ms(self, length: int) -> float:
        return score_ms(self.batch, length) + length * self.slow_drafts * draft_ms(self.batch)

    def step(self) -> tuple[float, int]:
        """Returns its milliseconds and draft tokens."""
        active, batch = sequences(self.batch), self.batch
        length = self.num_runs = 0
        limit = self.controller.plan(active)
        self.budget.is_forced = bool(limit)
        if limit != PLAIN and self.budget.begins(self.known.accepted_length, batch):
            length = self.choose(limit or MAX_DRAFTS)
        kept = [0] * batch
        for i in range(batch):
            while kept[i] < length and self.rng.random() < self.rate:
                kept[i] += 1
        factor = self.load * self.rng.lognormvariate(0, self.noise)
        times_ms = (self.num_runs * self.slow_drafts * draft_ms(batch) * factor, score_ms(batch, length) * factor)
        times = StepTimes(times_ms[0] / 1e3, times_ms[1] / 1e3, sum(times_ms) / 1e3)
        for num in kept:
            self.known.learn_length(self.num_runs > 0, num)
        steps = [StepOutput(i, "", [0] * (k + 1), length, k) for i, k in enumerate(kept)]
        if self.controller.observe(active, steps, times):
            self.budget.observe(batch, 1 + length, times)
        return sum(times_ms), length

    def choose(self, most: int) -> int:
        """Drafts as long as that pays, then scores what pays."""
        gains: list[float] = []
        for depth in range(most):
            gains.append(self.batch * self.rate ** (depth + 1))
            self.num_runs += 1
            if not self.budget.goes_on(gains, self.batch, depth + 1, gains[-1]):
                break
        return self.budget.size(gains, self.batch)

    def run(self, num_steps: int) -> tuple[float, list[int]]:
        """Returns expected tokens a millisecond, as luck decides nothing, and the length of each step."""
        ms = tokens = 0.0
        lengths = []
        for _ in range(num_steps):
            took, length = self.step()
            ms += took
            tokens += self.batch * tokens_of(self.rate, length)
            lengths.append(length)
        return tokens / ms, lengths

    def best(self) -> float:
        return max(self.batch * tokens_of(self.rate, k) / self.cost_ms(k) for k in range(MAX_DRAFTS + 1)) / self.load


@pytest.mark.distribution
@pytest.mark.parametrize(("batch", "rate"), [*itertools.product((1, 2, 8), (0.3, 0.55, 0.75)), (16, 0.75), (64, 0.55)])
def test_what_is_used_is_near_to_the_best_fixed_length(batch, rate):
    sim = Sim(batch, rate, seed=batch, noise=0.05)
    sim.run(600)
    speed, _ = sim.run(1000)
    assert speed > 0.96 * sim.best()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("slow_drafts", [0.3, 1.0, 3.0, 5.0, 8.0])
def test_decoding_is_never_slower_than_plain_decoding(batch, slow_drafts):
    """The record is wrong: drafts take up to eight times as long as the build saw."""
    sim = Sim(batch, 0.5, seed=2, slow_drafts=slow_drafts)
    speed, _ = sim.run(3000)
    assert speed > 0.98 * batch / sim.cost_ms(0)
    assert speed > 0.96 * sim.best()


PLAIN_STEP = StepOutput(0, "", [7])
DRAFTED = [StepOutput(0, "", [7] * (num + 1), 3, num) for num in range(4)]  # by accepted drafts


class Ways:
    """Steps of set costs, in plain steps of 2 ms; each of three draft tokens is kept at a rate."""

    def __init__(self, batch: int = 1, seed: int = 0, noise: float = 0.1) -> None:
        self.controller, self.batch, self.noise = Controller(), batch, noise
        self.rng = np.random.default_rng(seed)

    def run(self, num_steps: int, cost: Callable[[int], float], rate: Callable[[int], float] = lambda _: 0.65):
        """Returns speed / that of plain decoding, as luck decides nothing, and by step whether it drafted."""
        active, total, tokens, drafted = sequences(self.batch), 0.0, 0.0, []
        for at in range(num_steps):
            is_plain = self.controller.plan(active) == PLAIN
            share, left, kept = rate(at), self.batch, []
            for depth in range(4):
                more = 0 if is_plain or depth == 3 or not left else int(self.rng.binomial(left, share))
                kept += [depth] * (left - more)
                left = more
            took = 1.0 if is_plain else cost(at)
            step_s = 0.002 * took * float(np.exp(self.noise * self.rng.normal()))
            steps = [PLAIN_STEP] * self.batch if is_plain else [DRAFTED[k] for k in kept]
            self.controller.observe(active, steps, StepTimes(0.0, step_s, step_s))
            total, tokens = total + took, tokens + (1 if is_plain else tokens_of(share, 3))
            drafted.append(not is_plain)
        return tokens / total, drafted


# (cost of a step with drafts, in plain steps; rate at which a draft token is kept)
WAYS = [(1.4, 0.8), (1.4, 0.4), (1.4, 0.3), (1.4, 0.1), (2.0, 0.0), (4.0, 0.0), (4.0, 0.9), (10.0, 0.1)]


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
@pytest.mark.parametrize(("cost", "rate"), WAYS)
def test_decoding_is_within_two_percent_of_the_better_way(cost, rate, batch):
    speed, _ = Ways(batch).run(4000, lambda _: cost, lambda _: rate)
    assert speed > 0.98 * max(tokens_of(rate, 3) / cost, 1.0)


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
@pytest.mark.parametrize("period", [200, 1000])
def test_drafts_that_change_with_the_text_are_never_slower_than_plain_decoding(period, batch):
    speed, _ = Ways(batch).run(8 * period, lambda _: 1.5, lambda at: 0.8 if at // period % 2 else 0.02)
    assert speed > 0.98


@pytest.mark.parametrize(("before", "after"), [(1.2, 4.0), (4.0, 1.2)])
def test_a_change_of_costs_is_found(before, after):
    ways = Ways()
    ways.run(4000, lambda _: before)
    _, drafted = ways.run(16_000, lambda _: after)
    share = np.mean(drafted[-4000:])
    assert share > 0.95 if after < 2 else share < 0.05


def take(controller: Controller, cost: float, kept: int = 1, drafts: int = 1) -> tuple[bool, bool]:
    """Takes a step of 1 s without drafts, else of `cost` s; returns whether it was plain, and was measured."""
    is_plain = controller.plan(sequences(1)) == PLAIN
    kept, drafts, step_s = (0, 0, 1.0) if is_plain else (kept, drafts, cost)
    step = StepOutput(0, "", [7] * (1 + kept), drafts, kept)
    return is_plain, controller.observe(sequences(1), [step], StepTimes(0.0, step_s, step_s))


def run_exactly(controller: Controller, costs: Sequence[float]) -> list[bool]:
    """Takes a step for each cost, of 2 tokens with drafts; returns by step whether it drafted."""
    return [not take(controller, cost)[0] for cost in costs]


def test_a_new_batch_size_begins_plainly_and_its_first_turn_decides():
    for cost, is_on in ((1.2, True), (1.9, True), (1.99, False)):
        drafted = run_exactly(Controller(), [cost] * (2 * TURN + 1))
        assert drafted == [False] * TURN + [True] * TURN + [is_on]
    drafted = run_exactly(Controller(), [3.0] * (2 * TURN + 1))  # each draft step loses a plain one's time
    assert drafted == [False] * TURN + [True] * (TURN // 3 + 3) + [False] * (2 * TURN // 3 - 2)
    assert run_exactly(Controller(), [2.1] * (4 * TURN))[TURN:] == [True] * 2 * TURN + [False] * TURN  # it is doubled


def test_a_turn_of_bad_luck_is_made_up_for():
    controller, drafted = Controller(), 0
    kept = [0, 3, 0, 0, 2, 0, 3, 0, 3, 0, 2, 0] + [2, 3] * 50  # of three drafts, in steps of 2.25 plain ones
    for _ in range(80):
        drafted += not take(controller, 2.25, kept[drafted], 3)[0]
    assert sum(1 + num for num in kept[1:TURN]) < 2.25 * (TURN - 1)  # the turn itself lost
    assert drafted == 80 - TURN


def test_one_disturbed_turn_changes_nothing_and_two_do():
    for num_fast, changes in ((1, False), (2, True)):
        controller = Controller()
        drafted = run_exactly(controller, [3.0] * (2 * TURN))
        turns, is_fast = 0, False
        for _ in range(400):
            [drafts] = run_exactly(controller, [0.75 if is_fast else 3.0])
            turns += drafts and not drafted[-1]
            drafted.append(drafts)
            is_fast = 0 < turns <= num_fast
            if turns > num_fast and not changes:
                break
        assert controller.decisions()["1"]["drafts"] is changes or turns > 2


def test_a_turn_that_has_lost_enough_ends_early():
    assert run_exactly(Controller(), [30.0] * (TURN + 10)).count(True) == 3
    for at in (1, 7):  # one step was held up
        assert run_exactly(Controller(), [1.2] * (TURN + at) + [30.0] + [1.2] * 3 * TURN)[-1]


def test_drafts_made_now_and_then_are_charged_with_the_steps_that_they_slow_down():
    """One step of ten drafts, brings a token more, and slows down those after it: 0.82 of plain decoding's speed."""
    controller, num_plain = Controller(), 0
    for at in range(4000):
        kept = int(at % 10 == 0)
        num_plain += take(controller, 4.0 if kept else 1.05, kept, kept)[0]
    assert num_plain > 3000


def test_a_step_that_was_held_up_does_not_count():
    controller = Controller()
    run_exactly(controller, [1.2] * (5 * TURN) + [500.0] + [1.2] * (8 * TURN))
    assert controller.decisions()["1"]["drafts"] is True
    assert controller.decisions()["1"]["gain"] == pytest.approx(2 / 1.2, rel=0.03)


def test_what_it_costs_to_begin_drafting_again_makes_turns_seldom():
    """A draft that reads what it missed: 200 s, of which no other step has any."""
    controller, was_plain, total_s = Controller(), True, 0.0
    for _ in range(20_000):
        cost = 204.0 if was_plain else 4.0
        was_plain = take(controller, cost)[0]
        total_s += 1.0 if was_plain else cost
    assert total_s < 1.05 * 20_000


def test_plain_steps_are_measured_at_the_end_of_a_pause_alone():
    controller = Controller()
    seen = [take(controller, 3.0, kept=0) for _ in range(4000)]
    pauses = [[measured for _, measured in run] for plain, run in itertools.groupby(seen, lambda one: one[0]) if plain]
    assert max(map(len, pauses)) > 4 * LEAST_PAUSE
    for pause in pauses[1:-1]:
        assert pause == [False] * (len(pause) - LEAST_PAUSE) + [True] * LEAST_PAUSE
    assert all(measured for is_plain, measured in seen if not is_plain)
    found = controller.decisions()["1"]
    assert found["num_steps"] == 4000 and found["share_of_plain_steps"] == sum(one for one, _ in seen) / 4000
    assert controller._num_decoded == 4000  # prompts cost drafts by the token


def test_prompts_that_are_read_for_drafts_count_against_them():
    for draft_s, drafts in ((0.0, True), (0.0003, True), (0.0006, False)):  # 60 tokens plainly: 0.12 s
        ways = Ways(noise=0.0)
        for _ in range(30):
            ways.controller.read(100, 100 * draft_s)
            ways.run(60, lambda _: 1.5)
        assert ways.controller.decisions()["1"]["drafts"] is drafts


def test_steps_with_forced_requests_alone_are_not_learnt_from():
    controller = Controller()
    steps = [StepOutput(i, "", [7], 0, 0) for i in range(3)]
    for _ in range(20):
        assert controller.plan(sequences(3, "off")) is None
        controller.observe(sequences(3, "off"), steps, StepTimes(0.0, 1.0, 1.0))
    assert controller.decisions() == {}
    some = [*sequences(1, "on"), *sequences(2)]
    controller.plan(some)
    controller.observe(some, steps, StepTimes(0.0, 1.0, 1.0))
    assert list(controller.decisions()) == ["3, some forced"]


def with_drafts(*have: bool) -> list[TokenSequence]:
    made = [TokenSequence(i, [1], SamplingParams(), frozenset(), None) for i in range(len(have))]
    for sequence, has_draft in zip(made, have, strict=True):
        sequence.has_draft = has_draft
    return made


def step_of(controller: Controller, active: list[TokenSequence], slow: float = 2.0) -> int | None:
    """Runs a step in which drafts bring a token where they are made, in `slow` times a plain step's time."""
    limit = controller.plan(active)
    kept = [int(limit != PLAIN and sequence.has_draft) for sequence in active]
    steps = [StepOutput(i, "", [7] * (1 + num), num, num) for i, num in enumerate(kept)]
    controller.observe(active, steps, StepTimes(0.0, 1.0, slow if any(kept) else 1.0))
    return limit


def test_a_turn_waits_until_every_sequence_has_a_draft():
    controller, unread, read = Controller(), with_drafts(False, False), with_drafts(True, True)
    while controller.expects_drafts(2):
        step_of(controller, read, slow=4.0)
    num_plain = 0
    while not controller.expects_drafts(2):  # drafts are off: new sequences do without
        assert step_of(controller, unread) == PLAIN
        num_plain += 1
    assert num_plain >= LEAST_PAUSE - TURN  # steps count whether there is a draft or not
    for _ in range(3 * TURN):
        assert step_of(controller, unread) == PLAIN
    before = controller.decisions()
    for _ in range(3 * TURN):
        assert step_of(controller, with_drafts(True, False), slow=1.0) == PLAIN
    assert controller.decisions() == before and controller.expects_drafts(2)
    assert step_of(controller, read, slow=2.5) is None


def test_prompts_read_for_a_turn_alone_make_turns_seldom():
    pauses = []
    for draft_s in (0.0, 50.0):
        controller, num_plain, num_turns = Controller(), 0, 0
        for _ in range(6000):
            is_due = controller.expects_drafts(1) and controller.decisions()
            if is_due and controller.plan(with_drafts(False)) == PLAIN:
                controller.read(100, draft_s)
            num_turns += step_of(controller, with_drafts(True), slow=3.0) is None
        pauses.append(num_turns)
        assert num_plain == 0
    assert pauses[1] < pauses[0]


def test_batch_sizes_are_compared_apart():
    ways = Ways(2)
    ways.run(300, lambda _: 4.0)
    ways.batch = 1
    ways.run(300, lambda _: 1.2)
    decided = ways.controller.decisions()
    assert [decided[size]["drafts"] for size in ("1", "2")] == [True, False]
    assert json.loads(json.dumps(decided)) == decided
    assert ways.controller.expects_drafts(1) and not ways.controller.expects_drafts(2)
    assert Controller().expects_drafts(30)  # nothing is known


@pytest.mark.parametrize(("cost", "begins_plain"), [(4.0, True), (1.2, False)])
def test_a_larger_batch_begins_as_the_smaller_one_is(cost, begins_plain):
    ways = Ways(2, seed=3)
    ways.run(300, lambda _: cost)
    assert ways.controller.expects_drafts(8) is not begins_plain
    ways.batch = 8
    _, drafted = ways.run(TURN, lambda _: cost)
    assert not any(drafted) if begins_plain else all(drafted)
    _, drafted = ways.run(8000, lambda _: 1.2)
    assert np.mean(drafted[-2000:]) > 0.95  # found out later, if it pays there


def test_batch_sizes_share_comparisons_the_more_the_larger():
    tops = [bucket_of(batch) for batch in range(1, 65)]
    assert tops[:8] == list(range(1, 9))
    assert tops == sorted(tops) and len(set(tops[8:])) == 8
    assert all(batch <= top < 1.4 * batch for batch, top in enumerate(tops, 1))


class Restless(FixedLength):
    """Changes its mind at every step, as a clock could make it."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(5)

    def plan(self, sequences: Sequence[TokenSequence]) -> int | None:
        return self.rng.choice((0, 1, 2, 3, 4, 6, 8, None))


@pytest.mark.parametrize("kind", ["chain", "tree", "heads"])
def test_no_decision_changes_a_text(kind):
    texts = []
    for planner in (None, Controller(), Restless()):
        bench = Bench(planner, kind=kind)
        handles = [
            bench.submit([1 + i, 2, 3 + i], sampling=SamplingParams(max_new_tokens=14 + i, temperature=t, seed=i))
            for i, t in enumerate((0.0, 1.0, 0.7, 0.0, 1.3))
        ]
        bench.finish()
        texts.append([bench.tokens(handle) for handle in handles])
    assert texts[0] == texts[1] == texts[2]
