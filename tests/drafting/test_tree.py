# SPDX-License-Identifier: Apache-2.0
"""Draft trees in arrays and of a recipe: candidates, and what is scored."""

import json
from dataclasses import asdict, dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.core.tree_shape import TreeShape
from speccompile.drafting.tree import DraftLayout, DraftTrees, make_expansion
from speccompile.drafting.tree_config import ProductTree, TreeFields
from speccompile.errors import RecipeError


def grown(rng, slots, depth, width, branch, most, floor=0.0):
    """Returns trees of random candidates, and by slot every path that there should be with its probability."""
    trees, paths = DraftTrees([7] * slots, depth * most), [{(): 1.0} for _ in range(slots)]
    nodes = np.zeros((slots, 1), dtype=np.int64)
    for _ in range(depth):
        tokens = np.broadcast_to(rng.permutation(50)[:branch], (slots, nodes.shape[1], branch))
        probs = rng.dirichlet(np.ones(branch + 1), nodes.shape)[:, :, :branch]
        for slot, found in enumerate(paths):
            for column, node in enumerate(nodes[slot].tolist()):
                if node >= 0 and trees.paths[slot, node] > 0:
                    path = trees.path(slot, node)
                    for token, prob in zip(tokens[slot, column].tolist(), probs[slot, column].tolist(), strict=True):
                        found[*path, token] = trees.paths[slot, node] * prob
        start = trees.add(nodes, tokens, probs, most, floor)
        nodes = np.broadcast_to(np.arange(start, trees.num_nodes)[:width], (slots, min(width, trees.num_nodes - start)))
        nodes = np.where(rng.random(nodes.shape) < 0.2, -1, nodes)
    return trees, [{path: prob for path, prob in found.items() if prob >= floor} for found in paths]


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 999),
    depth=st.integers(1, 4),
    width=st.integers(1, 4),
    num=st.integers(0, 20),
    floor=st.sampled_from([0.0, 0.05]),
)
def test_the_scored_tree_has_the_likeliest_candidates(seed, depth, width, num, floor):
    rng, slots = np.random.default_rng(seed), 1 + seed % 3
    trees, paths = grown(rng, slots, depth, width, 3, 20, floor)
    tree, kept = trees.best(num)
    tree.validate()
    for slot, found in enumerate(paths):
        assert int(tree.num_nodes[slot]) == len(kept[slot]) == min(num, len(found) - 1) + 1
        scored = {tuple(trees.path(slot, node)): float(trees.paths[slot, node]) for node in kept[slot]}
        assert scored == {path: found[path] for path in scored}
        assert trees.count(slot) == len(found) - 1
        left = [prob for path, prob in found.items() if path not in scored]
        assert not left or max(left) <= min(scored.values())
        for node, candidate in enumerate(kept[slot]):
            assert tree.tokens[slot, node] == trees.tokens[slot, candidate]
            parent = tree.parents[slot, node]
            assert node == 0 or kept[slot][parent] == trees.parents[slot, candidate]
    falling = [sorted(found.values(), reverse=True)[1:] for found in paths]
    gains = [sum(row[at] for row in falling if at < len(row)) for at in range(max(map(len, falling)))]
    np.testing.assert_allclose(trees.gains(99)[: len(gains)], gains)


def test_fewer_candidates_of_a_depth_are_the_likeliest():
    probs = np.array([[[0.5, 0.1, 0.2]]])
    trees = DraftTrees([7], 2)
    assert trees.add(np.array([[0]]), np.array([[[1, 2, 3]]]), probs, 2) == 1
    assert trees.tokens[0, 1:3].tolist() == [1, 3] and trees.ranks[0, 1:3].tolist() == [0, 2]


def test_what_a_sequence_without_part_gives_is_nothing():
    trees = DraftTrees([7, 8], 6)
    tokens, probs = np.array([[[1, 2, 3]]] * 2), np.array([[[0.5, 0.3, 0.1]], [[np.nan] * 3]])
    trees.add(np.array([[0], [-1]]), tokens, probs, 3)
    tree, kept = trees.best(3)
    assert tree.num_nodes.tolist() == [4, 1] and kept[1] == [0] and trees.gains(3) == [0.5, 0.3, 0.1]


def test_the_likeliest_path_comes_first():
    trees = DraftTrees([9], 6)
    trees.put(0, [1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 2, 3], [0.5, 0.4, 0.5, 0.3, 0.9, 0.8])
    assert trees.best(6)[1] == [[0, 1, 3, 6, 2, 4, 5]]
    assert trees.best(2)[1] == [[0, 1, 2]]
    made, _ = trees.best(6)
    made.validate()
    assert made.parents[0].tolist() == [-1, 0, 1, 2, 0, 1, 4] and made.tokens[0].tolist() == [9, 1, 3, 6, 2, 4, 5]


def test_an_expansion_feeds_ancestors_that_are_not_in_place():
    """Nodes 3 and 4 are children of 1 and 2; then 5 of 3 alone, whose ancestors are the rows that the cache has."""
    tokens = np.array([[9, 11, 12, 13, 14, 15]])
    parents, layout = np.array([[-1, 0, 0, 1, 2, 3]]), DraftLayout(1, 8)
    level, scored = make_expansion(1, tokens, parents, [[1, 2]], layout, {})
    assert level.tokens.tolist() == [[11, 12]] and scored.tolist() == [[1, 2]]
    level, scored = make_expansion(2, tokens, parents, [[4, 3]], layout, {})
    assert level.tokens.tolist() == [[11, 12, 13, 14]] and scored.tolist() == [[4, 3]]
    assert level.scored_nodes.tolist() == [[3, 2]] and level.num_in_place == [0]
    assert level.tree_mask[0].astype(int).tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]
    level, scored = make_expansion(3, tokens, parents, [[5]], layout, {})
    assert level.tokens.tolist() == [[13, 15]] and level.num_in_place == [1]
    assert level.parents == [[1, 3]] and level.nodes == [[3, 5]]


@dataclass(frozen=True)
class Config(TreeFields):
    """A method with its own fields besides those of the tree."""

    model: str
    num: int = 3


def test_recipe_values_become_shapes():
    assert Config("m").tree == "chain" and not Config("m").has_tree and Config("m").shape is None
    grown = Config("m", tree="auto", num_candidates=5)
    assert grown.has_tree and grown.shape is None and grown.candidates_needed == 5 and grown.num_tree_drafts == 0
    product = Config("m", tree={"widths": [3, 2]})
    assert product.tree == ProductTree((3, 2)) and product.shape == TreeShape.product((3, 2))
    assert product.candidates_needed == 3 and product.num_tree_drafts == 9
    listed = Config("m", tree=[[1], [0], [0, 0]])
    assert listed.tree == ((0,), (1,), (0, 0)) and listed.candidates_needed == 2 and listed.num_tree_drafts == 3


@pytest.mark.parametrize("tree", ["chain", "auto", {"widths": [2, 1]}, [[0], [1], [1, 0]]])
def test_fields_survive_json(tree):
    config = Config("m", tree=tree, tree_width=2)
    assert Config(**json.loads(json.dumps(asdict(config)))) == config
    assert hash(config) == hash(Config("m", tree=tree, tree_width=2))


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ("beam", "got 'beam'; expected chain, auto, a list of rank paths"),
        ([], r"got \[\]; expected chain"),
        ([[0], [0.5]], "expected chain, auto"),
        ({"widths": [2], "depth": 1}, "expected chain, auto"),
        ({"widths": []}, "expected at least one width"),
        ({"widths": [2, 0]}, "expected at least one width, none below 1"),
        ([[0], [1, 0]], r"got \[1, 0\]; expected its parent \[1\] in the list as well"),
        ([[0], [0]], r"got \[0\]; expected every path once"),
        ([[0], [-1]], "expected at least one rank, none below 0"),
        ({"widths": [65]}, "got rank 64; expected ranks below 64"),
    ],
)
def test_values_that_are_no_tree_are_refused(tree, said):
    with pytest.raises(RecipeError, match=rf"speculator\.tree: .*{said}"):
        Config("m", tree=tree)


@pytest.mark.parametrize(("name", "value"), [("tree_width", 0), ("tree_depth", 65), ("num_candidates", 0)])
def test_bounds_are_checked(name, value):
    with pytest.raises(RecipeError, match=rf"speculator\.{name}: got {value}; expected 1 to 64"):
        Config("m", **{name: value})
