# SPDX-License-Identifier: Apache-2.0
"""Candidates of a tree, and which of them are scored."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.drafting.candidates import Candidates, tree_from_candidates


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
def test_the_scored_tree_has_the_likeliest_candidates(seed, depth, width, num, limit):
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


def test_the_likeliest_path_comes_first():
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
