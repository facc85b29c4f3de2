# SPDX-License-Identifier: Apache-2.0
"""Trees of one run of heads: the likeliest products, given parents, fixed shapes, grammars, engines that draft them."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from speccompile.core.tree_shape import TreeShape
from speccompile.drafting.acceptance import AcceptanceEstimate, SharedPrior
from speccompile.drafting.budget import Budget
from speccompile.drafting.grammars import NO_TOKEN, paths_after
from speccompile.drafting.heads import HeadsProposer, add_products, put_drafts, tree_from_shape
from speccompile.drafting.tree import DraftTrees
from speccompile.errors import RecipeError
from speccompile.graph_kinds.heads import DraftForm, candidate_heads_spec, grown_depth, grown_drafts, tree_heads_spec

CHOICES = TreeShape.from_choices([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


BATCH = SimpleNamespace(sequences=[SimpleNamespace(grammar=None)])


@pytest.mark.parametrize("num", [1, 4, 9, 14, 40])
@pytest.mark.parametrize("seed", range(4))
def test_products_are_the_likeliest_paths_of_all(num, seed):
    rng = np.random.default_rng(seed)
    depth, ranks = 3, 3
    probs = -np.sort(-rng.random((depth, ranks)), axis=1)
    probs /= probs.sum(axis=1, keepdims=True)
    candidates = np.array([[10 * d + r for r in range(ranks)] for d in range(depth)])
    trees = DraftTrees([7], depth * num)
    add_products(BATCH, trees, [9], candidates[None], probs[None], num)
    every = [p for n in range(1, depth + 1) for p in itertools.product(range(ranks), repeat=n)]
    products = sorted((np.prod([probs[d, r] for d, r in enumerate(p)]) for p in every), reverse=True)
    np.testing.assert_allclose(trees.ranked(num)[0], products[:num], rtol=1e-9)
    tree, [chosen] = trees.best(num)
    tree.validate()
    assert len(chosen) == tree.nodes == 1 + min(num, len(every))
    paths = {tuple(trees.path(0, node)) for node in chosen}
    assert len(paths) == len(chosen) and all(path[:-1] in paths for path in paths if path)
    assert all(token in candidates[at] for path in paths for at, token in enumerate(path))
    np.testing.assert_allclose(
        sorted((np.prod([probs[d, t % 10] for d, t in enumerate(path)]) for path in paths), reverse=True)[1:],
        products[:num],
    )


def test_one_candidate_a_depth_is_a_chain_within_its_limit():
    for limit in (3, 2):
        trees = DraftTrees([7], 24)
        add_products(BATCH, trees, [limit], np.array([[[4], [5], [6]]]), np.array([[[0.5], [0.9], [0.2]]]), 8)
        tree, _ = trees.best(8)
        assert tree.is_chain and tree.tokens.tolist() == [[7, 4, 5, 6][: 1 + limit]]


def test_drafts_with_given_parents_become_candidates():
    known, confidences, parents = (
        AcceptanceEstimate(SharedPrior(2)),
        [0.6, 0.3, 0.5, 0.25, 0.7, 0.1],
        [0, 0, 2, 2, 1, 1],
    )
    for limit, num in ((9, 6), (1, 2)):
        trees = DraftTrees([7], 6)
        put_drafts(trees, 0, [3, 4, 5, 6, 8, 9], confidences, parents, known, 0.0, limit)
        paths = [1, 0.6, 0.3, 0.15, 0.075, 0.42, 0.06]
        np.testing.assert_allclose(trees.paths[0, :7], [*paths[: 1 + num], *[0] * (6 - num)])
        assert trees.ranks[0, :7].tolist() == [0, 0, 1, 0, 1, 0, 1]
        tree, [chosen] = trees.best(6)
        assert chosen == ([0, 1, 5, 2, 3, 4, 6] if num == 6 else [0, 1, 2])
        assert tree.tokens.tolist() == [[7, 3, 8, 4, 5, 6, 9][: 1 + num] if num == 6 else [7, 3, 4]]


def test_a_chain_ends_where_its_path_is_below_the_floor():
    trees = DraftTrees([7], 3)
    put_drafts(trees, 0, [3, 4, 5], [0.6, 0.5, 0.9], range(3), AcceptanceEstimate(SharedPrior(3)), 0.5, 9)
    assert trees.best(3)[0].tokens.tolist() == [[7, 3]]


def test_a_fixed_shape_is_as_deep_as_each_sequence_may_go():
    drafts = np.arange(24).reshape(4, 6)
    tree = tree_from_shape(CHOICES, np.array([90, 91, 92, 93]), drafts, [3, 2, 1, 0])
    assert tree.num_nodes.tolist() == [7, 6, 3, 1] and tree.nodes == 7 and not tree.is_chain
    assert tree.tokens[1].tolist() == [91, 6, 7, 8, 9, 10, 11]
    assert tree.parents[0].tolist() == CHOICES.parents().tolist()
    assert tree.parents[1].tolist() == [-1, 0, 0, 1, 1, 2, -1] and tree.parents[3].tolist() == [-1] * 7
    tree.validate()
    chain = tree_from_shape(TreeShape.chain(3), np.array([1]), np.array([[2, 3, 4]]), [2])
    assert chain.is_chain and chain.tokens.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(("depth", "width", "num"), [(1, 4, 8), (3, 4, 8), (4, 2, 3), (3, 9, 2), (6, 1, 1)])
def test_depth_and_number_of_a_grown_tree_belong_together(depth, width, num):
    total = grown_drafts(depth, width, num)
    assert grown_depth(total, width, num) == depth
    level, expected = 1, 0
    for _ in range(depth):
        expected += (level := min(level, width) * num)
    assert total == expected == DraftForm(depth, width=width, num_candidates=num).num_drafts


class Built:
    """An engine that is never run."""

    max_slots = 1

    def __init__(self, spec):
        self.spec = spec


@pytest.mark.parametrize(
    ("spec", "shape", "fault"),
    [
        (tree_heads_spec("h", 4, 9, 6), CHOICES, None),
        (tree_heads_spec("h", 4, 9, 6), None, "expected the shape of 6 draft tokens"),
        (tree_heads_spec("h", 4, 9, 5), CHOICES, "got a shape of 6 draft tokens; expected the shape of 5"),
        (tree_heads_spec("h", 4, 9, 6, gives_parents=True), None, None),
        (tree_heads_spec("h", 4, 9, 6, gives_parents=True), CHOICES, "expected tree: auto"),
        (candidate_heads_spec("h", 4, 9, 3, 2), CHOICES, None),
        (candidate_heads_spec("h", 4, 9, 2, 2), CHOICES, "a depth of at most 2"),
        (candidate_heads_spec("h", 4, 9, 3, 1), CHOICES, "ranks below 1"),
    ],
)
def test_an_engine_refuses_a_tree_that_it_was_not_built_for(spec, shape, fault):
    budget = Budget(8, 3, 4)
    if fault is None:
        HeadsProposer(Built(spec), budget, shape, 0.0)
        return
    with pytest.raises(RecipeError, match=fault):
        HeadsProposer(Built(spec), budget, shape, 0.0)


def test_a_refused_candidate_has_no_path():
    trees = DraftTrees([7], 2)
    trees.add(np.array([[0]]), np.array([[[5, NO_TOKEN]]]), np.array([[[0.6, 0.0]]]), 2)
    batch = SimpleNamespace(sequences=[SimpleNamespace(grammar=object())])
    assert paths_after(batch, trees, np.array([[0, 1, 2, -1]])) == [[[], [5], None, None]]
