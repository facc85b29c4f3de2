# SPDX-License-Identifier: Apache-2.0
"""Growing trees by confidence, and siblings without replacement."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from speccompile.core.growth import (
    Calibration,
    Candidates,
    GrowthPolicy,
    Reach,
    draw_siblings,
    expected_hits,
    masks_from_fed,
    tree_from_candidates,
)
from speccompile.core.jobs import StepCosts


def grown(rng, depth, width, branch):
    tree = Candidates.from_root(7)
    tree.add(0, range(branch), np.sort(rng.dirichlet(np.ones(branch + 1))[:branch])[::-1].tolist())
    for level in range(1, depth):
        for candidate in tree.level(level, width):
            tree.fed.append(candidate)
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


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), depth=st.integers(2, 4), width=st.integers(1, 3))
def test_the_mask_of_what_was_fed_is_that_of_its_tree(seed, depth, width):
    tree = grown(np.random.default_rng(seed), depth, width, 3)
    tokens, mask = masks_from_fed([tree])
    for node, candidate in enumerate(tree.fed):
        ancestors = set()
        while candidate > 0:
            ancestors.add(tree.fed.index(candidate))
            candidate = tree.parents[candidate]
        assert set(np.flatnonzero(mask[0, node]).tolist()) == ancestors
        assert tokens[0, node] == tree.tokens[tree.fed[node]]


def test_a_shorter_feed_is_padded_with_nodes_that_see_themselves():
    rng = np.random.default_rng(0)
    long, short = grown(rng, 3, 2, 2), Candidates.from_root(3)
    tokens, mask = masks_from_fed([long, short])
    assert tokens[1].tolist() == [0] * len(long.fed)
    assert (mask[1] == np.eye(len(long.fed), dtype=bool)).all()


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
    assert cheap.goes_on([tree], 1, 0.1)
    assert not dear.goes_on([tree], 1, 30.0)
    assert not cheap.goes_on([tree], 4, 0.1)
    assert cheap.begins(1.0, 1)
    assert not dear.begins(1.0, 1)
    assert not cheap.begins(0.0, 1)


def test_reach_follows_verdicts_and_recovers():
    reach = Reach(1.5)
    for _ in range(200):
        reach.learn(4, 0)
    assert reach.rate < 0.01
    for _ in range(200):
        reach.learn(0, 0)
    assert reach.rate > 1.4


def test_calibration_learns_the_rate_of_hits():
    rng, calibration = np.random.default_rng(3), Calibration()
    tail = []
    for step in range(4000):
        probs = calibration.probs([0.3, 0.1])
        calibration.learn([sum(probs)], int(rng.random() < 0.8))
        if step > 500:
            tail.append(sum(probs))
    assert abs(np.mean(tail) - 0.8) < 0.05
    assert sum(Calibration(4.0).probs([0.5, 0.4])) <= 1 + 1e-12


def test_expected_hits_follow_the_path():
    tree = Candidates.from_root(0)
    tree.add(0, [1, 2], [0.5, 0.25])
    tree.add(1, [3, 4], [0.5, 0.2])
    assert expected_hits(tree, [0, 1, 2, 3], [0, 1]) == [0.75, 0.5]
    assert expected_hits(tree, [0, 1, 2, 3], [0, 2]) == [0.75]
    assert expected_hits(tree, [0], [0]) == []


def test_siblings_follow_the_law_without_replacement():
    law = np.array([0.5, 0.0, 0.3, 0.15, 0.05], np.float32)
    rng = np.random.default_rng(11)
    num = 20_000
    counts = dict.fromkeys(itertools.permutations((0, 2, 3, 4), 2), 0)
    for draws in rng.random((num, 2), dtype=np.float32):
        tokens, laws = draw_siblings(law, draws)
        counts[tuple(tokens)] += 1
        assert laws[1, tokens[0]] == 0
    np.testing.assert_allclose(laws.sum(axis=1), 1, rtol=1e-6)
    exact = law.astype(np.float64) / law.astype(np.float64).sum()
    expected = np.array([exact[a] * exact[b] / (1 - exact[a]) for a, b in counts])
    assert stats.chisquare(list(counts.values()), num * expected / expected.sum()).pvalue > 1e-3


@pytest.mark.parametrize("draws", [[0.0, 0.0, 0.0], [1 - 2**-24] * 3])
def test_siblings_end_where_no_mass_is_left(draws):
    tokens, laws = draw_siblings(np.array([0, 0.25, 0, 0.75], np.float32), np.array(draws, np.float32))
    assert sorted(tokens) == [1, 3]
    assert laws.shape == (2, 4)
