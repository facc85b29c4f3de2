# SPDX-License-Identifier: Apache-2.0
"""Siblings drawn without replacement."""

import itertools

import numpy as np
import pytest

from speccompile.drafting.siblings import draw_siblings


@pytest.mark.distribution
@pytest.mark.parametrize("num", [2, 3])
def test_siblings_follow_the_distribution_without_replacement(num):
    from scipy import stats

    probs = np.array([0.5, 0.0, 0.3, 0.15, 0.05], np.float32)
    rng = np.random.default_rng(11)
    counts = dict.fromkeys(itertools.permutations((0, 2, 3, 4), num), 0)
    sibling_probs = np.zeros((num, 5), np.float32)
    for draws in rng.random((20_000, num), dtype=np.float32).tolist():
        tokens = draw_siblings(probs, draws, sibling_probs)
        counts[tuple(tokens)] += 1
        for i in range(num):
            assert not sibling_probs[i, tokens[:i]].any()
    np.testing.assert_allclose(sibling_probs.sum(axis=1), 1, rtol=1e-6)
    exact = probs.astype(np.float64) / probs.astype(np.float64).sum()
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
    for probs in ([0, 0.25, 0, 0.75], [0.25, 0, 0.75, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0], [1e-30, 0, 1, 0]):
        probs = np.array(probs, np.float32)
        tokens = draw_siblings(probs, [u] * 3, np.zeros((3, 4), np.float32))
        assert sorted(tokens) == np.flatnonzero(probs).tolist()


def test_a_draw_at_the_edge_of_a_taken_sibling_takes_the_token_after_it():
    probs, sibling_probs = np.array([0, 0.5, 0.25, 0.25], np.float32), np.zeros((3, 4), np.float32)
    assert draw_siblings(probs, [0.0, 0.0, 0.0], sibling_probs) == [1, 2, 3]
    probs = np.array([0.25, 0.25, 0.25, 0.25], np.float32)
    assert draw_siblings(probs, [0.25, 1 / 3 + 1e-9, 0.0], sibling_probs) == [1, 2, 0]


def test_little_remaining_mass_is_normalised_over_the_remaining_tokens():
    probs, sibling_probs = np.array([1 - 2**-12, 0, 2**-13, 2**-13], np.float32), np.zeros((3, 4), np.float32)
    assert draw_siblings(probs, [0.5, 0.75, 0.5], sibling_probs) == [0, 3, 2]
    np.testing.assert_array_equal(sibling_probs, [probs, [0, 0, 0.5, 0.5], [0, 0, 1, 0]])
