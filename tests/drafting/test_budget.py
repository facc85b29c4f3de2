# SPDX-License-Identifier: Apache-2.0
"""The budget's rule: which drafts are worth their time, by recorded costs and by measured ones."""

import itertools

import numpy as np
import pytest

from speccompile.core.jobs import StepCosts
from speccompile.core.protocols import StepTimes
from speccompile.drafting.budget import Budget
from speccompile.drafting.tree import DraftTrees

COSTS = StepCosts(((1, 10.0), (4, 10.5), (16, 20.0)))
TREE = ([0, 1, 2, 3, 0, 1, 2], [0] * 4 + [1] * 3, [0.6, 0.2, 0.1, 0.01, 0.5, 0.3, 0.01])


def gains_of(tokens, parents, probs, most=16, floor=0.0):
    """Returns the gains of one sequence's tree."""
    trees = DraftTrees([0], len(tokens))
    trees.put(0, tokens, parents, probs, floor=floor)
    return trees.gains(most)


def spend(budget, ms):
    """Counts runs of the draft that take so long together."""
    budget._recorded_ms = ms


def test_size_maximises_expected_tokens_per_millisecond():
    budget, gains = Budget(16, 4, 2, COSTS, StepCosts(((1, 1.0),))), gains_of(*TREE)
    assert gains == pytest.approx([0.6, 0.3, 0.2, 0.18, 0.1, 0.01, 0.006])
    rates = [(1 + sum(gains[:num])) / (COSTS.ms(1 + num) + 2.0) for num in range(len(gains) + 1)]
    spend(budget, 2.0)
    assert 0 < budget.size(gains, 1) == rates.index(max(rates)) < len(gains)
    assert Budget(16, 4, 2, COSTS, StepCosts(((1, 1.0),)), is_fixed=True).size(gains, 1) == len(gains)
    assert Budget(3, 4, 2).size(gains_of(*TREE, most=3), 1) == 3


def test_growing_ends_where_another_expansion_is_not_worth_its_time():
    cheap, dear = (Budget(16, 4, 2, COSTS, StepCosts(((1, ms),))) for ms in (0.1, 30.0))
    gains = [0.6, 0.2]
    assert cheap.goes_on(gains, 1, 1, 0.8)
    assert not cheap.goes_on(gains, 1, 1, 0.001)
    assert not dear.goes_on(gains, 1, 1, 0.8)
    assert not cheap.goes_on(gains, 1, 4, 0.8)
    assert not Budget(16, 4, 2).goes_on(gains, 1, 1, 0.0)


def test_drafting_begins_where_a_typical_tree_is_worth_its_time():
    cheap, dear = (Budget(16, 4, 2, COSTS, StepCosts(((1, ms),))) for ms in (0.1, 30.0))
    assert cheap.begins(1.0, 1) and not dear.begins(1.0, 1) and not cheap.begins(0.0, 1)
    gains = [0.06] * 16
    for _ in range(200):
        spend(cheap, 40 * 0.1)  # trees that take 40 runs of the draft
        cheap.size(gains, 1)
    assert not cheap.begins(0.3, 1)
    cheap.is_forced = True
    assert cheap.begins(0.0, 1) and cheap.size(gains, 1) == 16 and cheap.goes_on(gains, 1, 1, 0.01)


def test_the_floor_leaves_out_nothing_that_would_be_scored():
    rng = np.random.default_rng(4)
    for costs in (COSTS, StepCosts()):
        budget = Budget(6, 3, 3, costs, StepCosts(((1, 0.1),)) if costs.ms_by_nodes else costs)
        for _ in range(50):
            probs = np.concatenate([np.sort(rng.dirichlet(np.full(5, 0.4))[:4])[::-1] for _ in range(5)])
            parents, floor = np.arange(20) // 4, budget.floor(1)
            spend(budget, 0.5)
            kept = gains_of([0] * 20, parents, probs, 6)[: budget.size(gains_of([0] * 20, parents, probs, 6), 1)]
            assert all(path >= floor for path in kept) and (floor > 0) == bool(costs.ms_by_nodes)
            assert gains_of([0] * 20, parents, probs, 6, floor)[: len(kept)] == kept


def test_the_least_is_drafted_whatever_it_costs_and_is_not_typical():
    dear = Budget(16, 4, 2, COSTS, StepCosts(((1, 30.0),)), min_path=0.5)
    assert dear.floor(1) == 0.5 and not dear.begins(0.1, 3)
    dear.least = 3
    assert dear.floor(1) == 0.0 and dear.begins(0.0, 3)
    gains = [0.3, 0.2, 0.1, 0.01]
    assert [dear.goes_on(gains, 1, depth, 1e-6) for depth in (1, 2, 3, 4)] == [True, True, False, False]
    spend(dear, 90.0)
    assert [dear.size(gains, 1) for _ in range(50)] == [3] * 50
    assert dear._drafts == 1.0


CHEAP = (StepCosts(((1, 10.0), (16, 11.0))), StepCosts(((1, 0.1),)))
DEAR = (StepCosts(((1, 1.0), (16, 16.0))), StepCosts(((1, 1.0),)))


def length(budget, *chains, spent_ms=0.0):
    trees = DraftTrees([0] * len(chains), max(map(len, chains)))
    for slot, probs in enumerate(chains):
        trees.put(slot, [0] * len(probs), range(len(probs)), probs)
    spend(budget, spent_ms)
    return budget.size(trees.gains(budget.max_nodes), len(chains))


def test_time_decides_the_length_of_a_chain():
    assert length(Budget(4, 4, 1, *CHEAP), [0.9] * 4, spent_ms=0.1) == 4
    # 1/2, 1.9/3, 2.71/4, 3.439/5, 4.095/6 tokens a millisecond: the fourth draft is not worth its time.
    assert length(Budget(4, 4, 1, *DEAR), [0.9] * 4, spent_ms=1.0) == 3
    assert length(Budget(4, 4, 1, *DEAR), [0.3] * 4, spent_ms=1.0) == 0
    assert length(Budget(4, 4, 1, *CHEAP), [0.9, 0.9, 0.01, 0.01], spent_ms=0.1) == 2
    assert length(Budget(4, 4, 1, *DEAR, is_fixed=True), [0.01] * 4) == 4
    assert length(Budget(4, 4, 1), [0.01] * 4) == 4


def test_one_good_chain_does_not_lengthen_a_batch_of_bad_ones():
    steep = Budget(4, 4, 1, StepCosts(((1, 10.0), (8, 11.0), (64, 200.0))), StepCosts(((1, 0.1),)))
    assert length(steep, [0.95] * 4) == 4
    assert length(steep, [0.95] * 4, *[[0.02] * 4] * 7) < 4


def test_the_least_probability_of_a_path_is_a_floor_unless_drafts_are_forced():
    budget = Budget(9, 9, 1, min_path=0.5)
    assert budget.floor(1) == 0.5
    budget.is_forced = True
    assert budget.floor(1) == 0.0


@pytest.mark.parametrize("num_slots", [1, 8])
def test_gains_and_trees_give_the_same_size(num_slots):
    rng, budget = np.random.default_rng(3), Budget(6, 6, 1, *CHEAP)
    for _ in range(20):
        probs = rng.uniform(0.05, 0.95, num_slots)
        gains = [float((probs**n).sum()) for n in range(1, 7)]
        assert budget.best(gains, num_slots)[0] == length(budget, *[[p] * 6 for p in probs.tolist()])


def step(budget, num_slots, num_nodes, score_ms, draft_nodes=0, propose_ms=0.0, rest_ms=0.0):
    if draft_nodes:
        budget.spend(num_slots, draft_nodes)
    times = [ms / 1e3 for ms in (propose_ms, score_ms, propose_ms + score_ms + rest_ms)]
    budget.observe(num_slots, num_nodes, StepTimes(*times))


def test_costs_follow_measured_times():
    budget = Budget(4, 4, 1, *CHEAP)
    for _ in range(300):
        step(budget, 2, 1, 20.0, rest_ms=1.0)
        step(budget, 2, 3, 45.0, draft_nodes=1, propose_ms=6.0, rest_ms=2.0)
        step(budget, 2, 3, 45.0, draft_nodes=1, propose_ms=3.0, rest_ms=2.0)
    scores = budget.costs.scores(2)
    assert scores[0] == pytest.approx(21.0, rel=0.02) and scores[2] == pytest.approx(47.0, rel=0.02)
    assert scores[0] < scores[1] < scores[2]  # interpolated between measured shapes
    # The first drafts after a plain step read the tokens they missed: not a cost of a draft.
    assert budget.costs.draft_ms(2) == pytest.approx(3.0, rel=0.05)
    assert budget.recorded().costs.scores(2)[0] == pytest.approx(CHEAP[0].ms(2))


def test_a_slower_machine_makes_all_costs_larger():
    budget = Budget(4, 4, 1, *CHEAP)
    for _ in range(100):
        step(budget, 1, 1, 10.0)
        step(budget, 1, 3, 12.0)
    before = budget.costs.scores(1)
    for _ in range(200):
        step(budget, 1, 3, 36.0)  # three times as long; no plain steps any more
    assert budget.costs.scores(1)[0] == pytest.approx(3 * before[0], rel=0.25)
    assert budget.costs.scores(1)[2] == pytest.approx(36.0, rel=0.02)


def test_a_step_that_was_held_up_changes_little():
    budget = Budget(4, 4, 1, *CHEAP)
    for _ in range(100):
        step(budget, 1, 2, 10.0, draft_nodes=1, propose_ms=1.0)
    step(budget, 1, 2, 1000.0, draft_nodes=1, propose_ms=100.0)
    budget.costs.of(1).num_left = 0  # the table is made anew
    assert 10.0 < budget.costs.scores(1)[1] < 10.5 and 1.0 < budget.costs.draft_ms(1) < 1.05


def test_what_other_processes_cost_is_soon_forgotten_for_shapes_out_of_use_too():
    budget = Budget(4, 4, 1, *CHEAP)
    for nodes in (2, 3, 4, 5) * 8:
        step(budget, 1, nodes, 3 * CHEAP[0].ms(nodes), draft_nodes=1, propose_ms=3 * CHEAP[1].ms(1))
    assert budget.costs.scores(1)[4] > 2.5 * CHEAP[0].ms(5)
    for _ in range(20):
        step(budget, 1, 2, CHEAP[0].ms(2), draft_nodes=1, propose_ms=CHEAP[1].ms(1))
    assert budget.costs.scores(1)[1:5] == pytest.approx([CHEAP[0].ms(nodes) for nodes in (2, 3, 4, 5)], rel=0.4)
    assert budget.costs.draft_ms(1) == pytest.approx(CHEAP[1].ms(1), rel=0.05)


def test_the_first_step_of_a_shape_is_no_measurement():
    """Memory is laid out for it, and code runs for the first time: seen at four times a step."""
    budget = Budget(4, 4, 1, *CHEAP)
    for nodes in (3, 1, 4, 2):
        step(budget, 1, nodes, 4 * CHEAP[0].ms(nodes), draft_nodes=nodes - 1, propose_ms=90.0, rest_ms=50.0)
    scores = budget.costs.scores(1)
    assert scores[:4] == tuple(map(CHEAP[0].ms, range(1, 5)))
    assert budget.costs.draft_ms(1) == CHEAP[1].ms(1)
    for nodes in (3, 1, 4, 2) * 9:
        step(budget, 1, nodes, CHEAP[0].ms(nodes), draft_nodes=nodes - 1, propose_ms=0.1 * (nodes - 1), rest_ms=0.1)
    assert budget.costs.scores(1)[:4] == pytest.approx([CHEAP[0].ms(n) + 0.1 for n in range(1, 5)])


def test_slow_steps_that_ended_the_use_of_a_shape_are_forgotten():
    budget = Budget(4, 4, 1, *CHEAP)
    for _ in range(3):
        step(budget, 1, 1, 10.0)
    for _ in range(6):
        step(budget, 1, 4, 80.0)
    for at in range(200):
        step(budget, 1, 1, 10.0)
        step(budget, 1, 2, CHEAP[0].ms(2))
        if at == 100:
            assert budget.costs.scores(1)[3] > 1.2 * CHEAP[0].ms(4)
    assert budget.costs.scores(1)[3] == pytest.approx(CHEAP[0].ms(4), rel=0.1)


def test_steps_of_another_batch_size_forget_nothing():
    budget = Budget(4, 4, 1, *CHEAP)
    for _ in range(20):
        step(budget, 1, 1, 10.0)
        step(budget, 8, 1, 4 * CHEAP[0].ms(8))
    before = budget.costs.scores(8)[0]
    assert before > 2 * CHEAP[0].ms(8)
    for _ in range(600):
        step(budget, 1, 1, 10.0)
        step(budget, 1, 2, CHEAP[0].ms(2))
    for nodes in range(2, 11):  # first steps of a shape: they teach nothing, but no table is kept for longer
        step(budget, 8, nodes, 1.0)
    assert budget.costs.scores(8)[0] > 2 * CHEAP[0].ms(8)


def test_a_low_share_of_expansions_is_tried_again():
    """Second tokens brought nothing for a while: steps of one token cannot show that they would now."""
    budget = Budget(4, 4, 1, CHEAP[0], StepCosts(((1, 2.0),)))

    def goes_on(depth=1, reach=0.5):
        spend(budget, 0.0)
        return budget.goes_on([0.5], 1, depth, reach)

    for _ in range(60):
        goes_on()
        goes_on(2, 1e-9)
    assert not goes_on()
    tried = [goes_on() for _ in range(500)]
    assert any(tried) and tried.index(True) > 10


def test_draft_runs_of_steps_that_went_unobserved_do_not_count():
    """Where drafts may be drawn nothing is observed: the next observed step has its own runs alone."""
    budget = Budget(4, 4, 1, *CHEAP)
    step(budget, 1, 2, 500.0, draft_nodes=1, propose_ms=90.0)  # the first of a shape
    for _ in range(100):
        budget.begins(1.0, 1)
        budget.spend(1)
    budget.begins(1.0, 1)
    step(budget, 1, 2, 10.0, draft_nodes=1, propose_ms=0.2)
    assert budget.costs.draft_ms(1) == pytest.approx(0.2)


@pytest.mark.parametrize("costs", [(StepCosts(((1, 0.0), (4, 1.0))), CHEAP[1]), (CHEAP[0], StepCosts(((1, 0.0),)))])
def test_a_recorded_cost_of_nothing_is_no_measurement(costs):
    budget = Budget(4, 4, 1, *costs)
    assert not budget.weighs_time
    step(budget, 1, 2, 10.0, draft_nodes=1, propose_ms=0.2)
    assert budget.begins(0.0, 1)


def test_a_recorded_budget_never_learns():
    budget = Budget(4, 4, 1, *DEAR).recorded()
    for _ in range(50):
        step(budget, 1, 5, 0.5, draft_nodes=4, propose_ms=0.01)
    assert length(budget, [0.9] * 4, spent_ms=1.0) == 3


def test_the_best_length_is_the_one_found_by_enumeration():
    cheap, dear = StepCosts(((1, 10.0), (16, 11.5))), StepCosts(((1, 1.0), (16, 23.5)))

    def best(rates, num_slots, costs):
        gains = [sum(rate**n for rate in rates) for n in range(1, 16)]
        return Budget(15, 15, 1, costs).best(gains, num_slots)[0]

    assert best([0.9], 1, cheap) > best([0.5], 1, cheap) > best([0.1], 1, cheap) == 1
    assert best([0.9], 1, dear) == best([0.1], 1, dear) == 0
    assert best([0.9, 0.9], 4, dear) == 0
    assert best([0.99, 0.2], 2, cheap) > best([0.2], 2, cheap)
    by_hand = max(range(16), key=lambda n: (3 + sum(0.7**i + 0.4**i for i in range(1, n + 1))) / cheap.ms(3 * (n + 1)))
    assert best([0.7, 0.4], 3, cheap) == by_hand


@pytest.mark.parametrize("points", [((1, 1.0), (2, 1.0), (4, 1.1), (5, 2.0), (20, 5.0)), ((1, 1.0), (20, 20.0))])
def test_no_choice_of_positions_of_all_requests_brings_more_in_a_padded_step(points):
    """A step pads every sequence to the widest, so the best choice takes one number of positions in each."""
    rng, costs = np.random.default_rng(7), StepCosts(points)
    for num_slots in (1, 2, 3):
        budget = Budget(4, 4, 1, costs)
        for _ in range(30):
            falling = np.cumprod(rng.uniform(0.2, 1.0, (num_slots, 4)), axis=1)
            speeds = [
                (num_slots + sum(falling[slot, :num].sum() for slot, num in enumerate(nums)))
                / costs.ms(num_slots * (1 + max(nums)))
                for nums in itertools.product(range(5), repeat=num_slots)
            ]
            _, expected, ms = budget.best(falling.sum(axis=0).tolist(), num_slots)
            assert expected / ms == pytest.approx(max(speeds))
