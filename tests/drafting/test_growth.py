# SPDX-License-Identifier: Apache-2.0
"""Growing trees by confidence, and siblings without replacement."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from speccompile.core.jobs import StepCosts
from speccompile.drafting.growth import (
    Calibration,
    Candidates,
    GrowthPolicy,
    Reach,
    Usual,
    draw_siblings,
    tree_from_candidates,
)
from speccompile.drafting.home_rate import HomeRate


def grown(rng, depth, width, branch):
    tree = Candidates.from_root(7)
    tree.add(0, range(branch), np.sort(rng.dirichlet(np.ones(branch + 1))[:branch])[::-1].tolist())
    start = 1
    for _ in range(1, depth):
        frontier, start = tree.likeliest(start, width), len(tree.tokens)
        for candidate in frontier:
            tree.add(candidate, range(branch), np.sort(rng.dirichlet(np.ones(branch + 1))[:branch])[::-1].tolist())
    return tree


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    depth=st.integers(1, 4),
    width=st.integers(1, 4),
    num=st.integers(0, 20),
    limit=st.integers(0, 4),
)
def test_what_is_scored_is_a_tree_of_the_likeliest(seed, depth, width, num, limit):
    rng = np.random.default_rng(seed)
    trees = [grown(rng, depth, width, 3) for _ in range(2)]
    tree, kept = tree_from_candidates(trees, num, [limit, 9])
    tree.validate()
    assert tree.depths()[0, : tree.num_nodes[0]].max() <= limit
    chosen = kept[1]
    assert len(chosen) == min(num, len(trees[1].tokens) - 1) + 1
    left_out = [p for c, p in enumerate(trees[1].paths) if c not in chosen]
    assert not left_out or max(left_out) <= min(trees[1].paths[c] for c in chosen)
    for node, candidate in enumerate(chosen):
        assert tree.tokens[1, node] == trees[1].tokens[candidate]


COSTS = StepCosts(((1, 10.0), (4, 10.5), (16, 20.0)))


def test_size_is_what_promises_most_per_millisecond():
    tree = Candidates.from_root(0)
    tree.add(0, range(4), [0.6, 0.2, 0.1, 0.01])
    tree.add(1, range(3), [0.5, 0.3, 0.01])
    policy = GrowthPolicy(16, 4, 2, COSTS, StepCosts(((1, 1.0),)))
    rates = {}
    falling = sorted(tree.paths[1:], reverse=True)
    for num in range(len(falling) + 1):
        rates[num] = (1 + sum(falling[:num])) / (COSTS.ms(1 + num) + 2.0)
    assert policy.size([tree], 2.0) == max(rates, key=rates.__getitem__)
    assert 0 < policy.size([tree], 2.0) < len(falling)
    assert GrowthPolicy(16, 4, 2, COSTS, StepCosts(((1, 1.0),)), is_fixed=True).size([tree], 2.0) == len(falling)
    assert GrowthPolicy(3, 4, 2).size([tree], 2.0) == 3


def test_growing_ends_where_another_expansion_does_not_pay():
    cheap, dear = (GrowthPolicy(16, 4, 2, COSTS, StepCosts(((1, ms),))) for ms in (0.1, 30.0))
    tree = Candidates.from_root(0)
    tree.add(0, range(2), [0.6, 0.2])
    assert cheap.goes_on([tree], 1, 0.8, 0.1)
    assert not cheap.goes_on([tree], 1, 0.001, 0.1)
    assert not dear.goes_on([tree], 1, 0.8, 30.0)
    assert not cheap.goes_on([tree], 4, 0.8, 0.1)
    usual = Usual(4, 4)
    assert cheap.begins(1.0, 1, usual)
    assert not dear.begins(1.0, 1, usual)
    assert not cheap.begins(0.0, 1, usual)
    for _ in range(200):
        usual.learn(16, 40)
    assert not cheap.begins(1.0, 1, usual)
    assert cheap.begins(1.0, 1, Usual(4, 1)) and not cheap.begins(1.0, 1, Usual(4, 10_000))


def test_the_floor_leaves_out_nothing_that_would_be_scored():
    rng = np.random.default_rng(4)
    for costs in (COSTS, StepCosts()):
        policy = GrowthPolicy(6, 3, 3, costs, StepCosts(((1, 0.1),)) if costs.ms_by_nodes else costs)
        for _ in range(50):
            whole, cut = Candidates.from_root(0), Candidates.from_root(0)
            for parent in range(5):
                probs = np.sort(rng.dirichlet(np.full(5, 0.4))[:4])[::-1].tolist()
                if parent < len(cut.tokens):
                    cut.add(parent, range(4), probs, policy.floor([cut]))
                whole.add(parent, range(4), probs)
            num = policy.size([whole], 0.5)
            kept = sorted(whole.paths[1:], reverse=True)[:num]
            floor = policy.floor([whole])
            assert all(path >= floor for path in kept)
            assert floor > 0 or len(whole.paths) <= 7


def test_the_likeliest_path_stands_first():
    tree = Candidates.from_root(9)
    tree.add(0, [1, 2], [0.5, 0.4])
    tree.add(1, [3, 4], [0.5, 0.3])
    tree.add(2, [5], [0.9])
    tree.add(3, [6], [0.8])
    assert tree.best(6) == [0, 1, 3, 6, 2, 4, 5]
    assert tree.best(2) == [0, 1, 2]
    made, _ = tree_from_candidates([tree], 6, [9])
    made.validate()
    assert made.parents[0].tolist() == [-1, 0, 1, 2, 0, 1, 4] and made.tokens[0].tolist() == [9, 1, 3, 6, 2, 4, 5]


def test_reach_follows_verdicts_and_recovers():
    reach = Reach(HomeRate(1.5))
    for _ in range(200):
        reach.learn(True, 0)
    assert reach.rate < 0.01
    for _ in range(6000):
        reach.learn(False, 0)
    assert reach.rate > 1.4


def test_slots_begin_with_what_drafts_were_worth_to_others_and_try_again_but_seldom():
    home = HomeRate(1.5)
    first = Reach(home)
    for _ in range(300):
        first.learn(True, 0)
    fresh = Reach(home)
    assert fresh.rate == home.value < 0.01
    for _ in range(200):
        fresh.learn(False, 0)
    assert 0.1 < fresh.rate < 0.2


def test_calibration_learns_the_rate_of_hits_by_rank():
    rng, calibration, tail = np.random.default_rng(3), Calibration(), []
    for step in range(6000):
        tree = Candidates.from_root(0)
        tree.add(0, [5, 6], calibration.probs([0.3, 0.2]))
        hit = int(rng.choice(3, p=[0.3, 0.6, 0.1]))  # none, the first guess, the second
        calibration.learn(tree, [0, 1, 2], [0, hit] if hit else [0])
        if step > 500:
            tail.append(tree.probs[1:])
    np.testing.assert_allclose(np.mean(tail, axis=0), [0.6, 0.1], atol=0.02)
    assert sum(Calibration(4.0).probs([0.5, 0.4, 0.05, 0.02, 0.01])) <= 1 + 1e-12
    assert len(Calibration().probs([0.5])) == 1 and len(Calibration().probs([0.1] * 9)) == 9


def test_calibration_learns_from_what_was_scored_behind_the_path_alone():
    tree = Candidates.from_root(0)
    tree.add(0, [1, 2], [0.5, 0.25])
    tree.add(1, [3, 4], [0.5, 0.2])
    tree.add(2, [5], [0.5])
    calibration = Calibration()
    calibration.learn(tree, [0, 1, 2, 5], [0, 1])  # 1 is kept; 2 is not; what stands behind 2 was never tried
    np.testing.assert_allclose(calibration.log_odds, [0.05, -0.025, 0, 0])


@pytest.mark.distribution
@pytest.mark.parametrize("num", [2, 3])
def test_siblings_follow_the_law_without_replacement(num):
    law = np.array([0.5, 0.0, 0.3, 0.15, 0.05], np.float32)
    rng = np.random.default_rng(11)
    counts = dict.fromkeys(itertools.permutations((0, 2, 3, 4), num), 0)
    laws = np.zeros((num, 5), np.float32)
    for draws in rng.random((20_000, num), dtype=np.float32).tolist():
        tokens = draw_siblings(law, draws, laws)
        counts[tuple(tokens)] += 1
        for i in range(num):
            assert not laws[i, tokens[:i]].any()
    np.testing.assert_allclose(laws.sum(axis=1), 1, rtol=1e-6)
    exact = law.astype(np.float64) / law.astype(np.float64).sum()
    expected = []
    for order in counts:
        left, mass = 1.0, 1.0
        for token in order:
            mass *= exact[token] / left
            left -= exact[token]
        expected.append(mass)
    expected = np.array(expected)
    assert stats.chisquare(list(counts.values()), 20_000 * expected / expected.sum()).pvalue > 1e-3


@pytest.mark.parametrize("u", [0.0, 0.25, 0.5, 1 - 2**-24])
def test_siblings_end_where_no_mass_is_left(u):
    for law in ([0, 0.25, 0, 0.75], [0.25, 0, 0.75, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0], [1e-30, 0, 1, 0]):
        law = np.array(law, np.float32)
        tokens = draw_siblings(law, [u] * 3, np.zeros((3, 4), np.float32))
        assert sorted(tokens) == np.flatnonzero(law).tolist()


def test_a_siblings_draw_at_the_edge_of_one_that_is_taken_goes_on_after_it():
    law, laws = np.array([0, 0.5, 0.25, 0.25], np.float32), np.zeros((3, 4), np.float32)
    assert draw_siblings(law, [0.0, 0.0, 0.0], laws) == [1, 2, 3]
    law = np.array([0.25, 0.25, 0.25, 0.25], np.float32)
    assert draw_siblings(law, [0.25, 1 / 3 + 1e-9, 0.0], laws) == [1, 2, 0]


def test_little_mass_is_shared_out_among_the_siblings_that_are_left():
    law, laws = np.array([1 - 2**-12, 0, 2**-13, 2**-13], np.float32), np.zeros((3, 4), np.float32)
    assert draw_siblings(law, [0.5, 0.75, 0.5], laws) == [0, 3, 2]
    np.testing.assert_array_equal(laws, [law, [0, 0, 0.5, 0.5], [0, 0, 1, 0]])
