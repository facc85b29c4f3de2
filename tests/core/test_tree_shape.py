# SPDX-License-Identifier: Apache-2.0
"""Static tree shapes."""

import pytest

from speccompile.core.tree_shape import TreeShape
from speccompile.errors import RecipeError


def test_choices_become_parents_depths_and_ranks():
    shape = TreeShape.from_choices([(1,), (0, 2), (0,), (0, 0), (1, 0), (0, 2, 0)])
    assert shape.choices == ((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 2, 0))
    assert shape.parents().tolist() == [-1, 0, 0, 1, 1, 2, 4]
    assert shape.depths().tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert shape.ranks().tolist() == [0, 0, 1, 0, 2, 0, 0]
    assert (shape.num_drafts, shape.max_depth, shape.max_rank, shape.is_chain) == (6, 3, 2, False)
    assert [shape.level(d) for d in range(4)] == [[0], [1, 2], [3, 4, 5], [6]]


def test_a_product_has_every_combination():
    shape = TreeShape.product((3, 2, 1))
    assert shape.num_drafts == 3 + 6 + 6
    assert shape == TreeShape.from_choices(shape.choices[::-1])


def test_a_chain_is_a_product_of_ones():
    shape = TreeShape.chain(4)
    assert shape.is_chain
    assert shape.parents().tolist() == [-1, 0, 1, 2, 3]


def test_a_cut_shape_keeps_whole_depths_first():
    shape = TreeShape.product((2, 2)).cut(3)
    assert shape.choices == ((0,), (1,), (0, 0))


@pytest.mark.parametrize(
    ("choices", "got", "expected"),
    [
        ([()], "[]", "at least one rank"),
        ([(0,), (0, -1)], "[0, -1]", "none below 0"),
        ([(0,), (1, 0)], "[1, 0]", "its parent [1]"),
        ([(0,), (0,)], "[0]", "every path once"),
    ],
)
def test_choices_that_are_no_tree_are_refused(choices, got, expected):
    with pytest.raises(RecipeError) as caught:
        TreeShape.from_choices(choices)
    assert got in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize("widths", [(), (2, 0)])
def test_widths_that_are_no_tree_are_refused(widths):
    with pytest.raises(RecipeError, match="none below 1"):
        TreeShape.product(widths)
