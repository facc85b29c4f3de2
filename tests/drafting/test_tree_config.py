# SPDX-License-Identifier: Apache-2.0

import json
from dataclasses import asdict, dataclass

import pytest

from speccompile.core.tree_shape import TreeShape
from speccompile.drafting.tree_config import ProductTree, TreeFields
from speccompile.errors import RecipeError


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
