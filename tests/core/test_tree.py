# SPDX-License-Identifier: Apache-2.0
"""Token trees and static shapes: masks, depths, ranks, paths, and what is no tree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.core.tree import TokenTree, chain_mask, chain_parents
from speccompile.core.tree_shape import TreeShape
from speccompile.errors import RecipeError, RuntimeFault


@st.composite
def parent_rows(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Ragged parents of 1 to 3 slots."""
    nodes = draw(st.integers(1, 8))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        used = draw(st.integers(1, nodes))
        rows.append([-1, *(draw(st.integers(0, i - 1)) if i < used else -1 for i in range(1, nodes))])
    return rows, nodes


def ancestors(parents: list[int], node: int) -> list[int]:
    found = [node]
    while node > 0 and (node := parents[node]) >= 0:
        found.append(node)
    return found


@settings(max_examples=60, deadline=None)
@given(parent_rows())
def test_mask_and_depths_agree_with_the_ancestors(made: tuple[list[list[int]], int]) -> None:
    rows, nodes = made
    tree = TokenTree.tree(np.zeros((len(rows), nodes), np.int64), rows)
    mask, depths = tree.mask(), tree.depths()
    for slot, parents in enumerate(rows):
        for node in range(nodes):
            above = ancestors(parents, node)
            assert np.flatnonzero(mask[slot, node]).tolist() == sorted(above)
            assert depths[slot, node] == len(above) - 1 == mask[slot, node].sum() - 1
            assert all(parents[child] == node for child in tree.children(slot, node))
    assert (tree.num_nodes - 1 == (np.array(rows) >= 0).sum(axis=1)).all()


def test_a_chain_equals_the_tree_of_the_same_parents() -> None:
    tokens = np.arange(8).reshape(2, 4)
    chain = TokenTree.chain(tokens)
    tree = TokenTree.tree(tokens, chain.parents)
    assert chain.is_chain and not tree.is_chain
    np.testing.assert_array_equal(chain.mask(), tree.mask())
    np.testing.assert_array_equal(chain.depths(), tree.depths())
    assert chain.num_draft_tokens.tolist() == [3, 3]


def test_a_ragged_chain_ends_where_it_says() -> None:
    chain = TokenTree.chain(np.zeros((3, 4), np.int64), np.array([4, 1, 2]))
    chain.validate()
    assert chain.parents.tolist() == [[-1, 0, 1, 2], [-1, -1, -1, -1], [-1, 0, -1, -1]]
    assert chain.mask().any(axis=-1).all()


def test_rows_of_different_sizes_are_padded() -> None:
    tokens, parents = [[5, 6, 7, 8], [9, 6]], [[-1, 0, 0, 1], [-1, 0]]
    tree = TokenTree.ragged(tokens, parents)
    assert tree.tokens.tolist() == [[5, 6, 7, 8], [9, 6, 0, 0]] and not tree.is_chain
    assert tree.parents.tolist() == [[-1, 0, 0, 1], [-1, 0, -1, -1]] and tree.num_nodes.tolist() == [4, 2]
    assert [tree.nodes_of(slot) for slot in (0, 1)] == list(zip(tokens, parents, strict=True))
    for rows in (None, [[-1, 0, 1, 2], [-1, 0]]):
        chain = TokenTree.ragged(tokens, rows)
        assert chain.is_chain and chain.nodes_of(1) == ([9, 6], [-1, 0])


def test_shapes_are_made_once_and_cannot_be_written() -> None:
    first, second = (TokenTree.chain(np.zeros((2, 5), np.int64)) for _ in range(2))
    assert first.parents is second.parents is chain_parents(2, 5)
    assert first.mask() is second.mask() is chain_mask(2, 5)
    with pytest.raises(ValueError, match="read-only"):
        first.parents[0, 0] = 1


def test_roots_have_no_drafts() -> None:
    tree = TokenTree.roots(np.array([5, 6]))
    assert tree.tokens.tolist() == [[5], [6]] and tree.num_draft_tokens.tolist() == [0, 0]
    assert tree.children(0, 0) == []


def test_tokens_on_a_path_stop_at_its_end() -> None:
    tree = TokenTree.tree([[7, 8, 9, 4]], [[-1, 0, 0, 2]])
    assert tree.tokens_on(0, [0, 2, 3, -1]) == [7, 9, 4]
    assert tree.tokens_on(0, [2, -1, 3]) == [9]


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([[1, 2]], [[-1, 1]], r"TokenTree.parents\[0, 1\]: got 1; expected 0 to 0"),
        ([[1, 2]], [[0, 0]], r"TokenTree.parents\[0, 0\]: got 0; expected -1 to -1"),
        ([[1, 2, 3]], [[-1, -1, 0]], r"TokenTree.parents\[0, 1\]: got -1; expected 0 to 0"),
        ([[1, 2]], [[-1, 0, 1]], r"TokenTree.parents: got int64\[1, 3\]; expected int64\[1, 2\]"),
        ([1, 2], [[-1, 0]], r"TokenTree.tokens: got int64\[2\]; expected int64\[1, 1\]"),
    ],
)
def test_what_is_no_tree_is_refused(tokens: list, parents: list, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(RuntimeFault, match=message):
        TokenTree.tree(tokens, parents)


def test_other_faults_are_refused() -> None:
    with pytest.raises(RuntimeFault, match=r"num_nodes: got \[3\]; expected 1 to 2"):
        TokenTree.tree([[1, 2]], [[-1, 0]], num_nodes=np.array([3]))
    with pytest.raises(RuntimeFault, match=r"draft_probs: got float32\[1, 3, 4\]; expected float32\[1, 2, vocab\]"):
        TokenTree.tree([[1, 2]], [[-1, 0]], draft_probs=np.zeros((1, 3, 4), np.float32))
    tree = TokenTree.tree([[1, 99, -5]], [[-1, 0, -1]])
    tree.validate(vocab_size=100)
    with pytest.raises(RuntimeFault, match=r"tokens\[0, 1\]: got 99; expected 0 to 98.*one vocabulary"):
        tree.validate(vocab_size=99)


def test_a_tree_is_shown_with_chains_on_one_line_and_its_path_marked(capsys):
    tree = TokenTree.tree([[5, 6, 7, 8, 9, 10, 11, 0]], [[-1, 0, 0, 1, 1, 4, 2, -1]])
    tree.show(path=[0, 1, 4])
    assert capsys.readouterr().out == "5*\n├─ 6*\n│  ├─ 8\n│  └─ 9* > 10\n└─ 7 > 11\n"
    TokenTree.chain(tree.tokens[:, :3]).show(texts=["a", " b", "c"])
    assert capsys.readouterr().out == "'a' > ' b' > 'c'\n"


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
