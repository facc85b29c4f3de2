# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import numpy as np
import pytest

from speccompile.core.sampling import (
    CHAIN_ACCEPT_LANE,
    CHAIN_DRAFT_LANE,
    NODE_BY_NODE,
    SIBLING_LANE,
    SamplingParams,
    race_draws,
    tree_uniforms,
    uniforms,
)
from speccompile.core.tree import TokenTree
from speccompile.runtime.sequences import BLOCK, RACE_ROWS, SequenceBatch, TokenSequence, UniformTable

PARAMS = [SamplingParams(temperature=1.0, seed=2**63 + 5), SamplingParams(), SamplingParams(temperature=0.5, seed=7)]
LENGTHS = [9, 4, 700]


@pytest.fixture
def batch():
    made = SequenceBatch([], 3)
    made.sequences = [
        TokenSequence(i, list(range(n)), p, frozenset(), None)
        for i, (n, p) in enumerate(zip(LENGTHS, PARAMS, strict=True))
    ]
    made.changed()
    return made


@pytest.mark.parametrize(
    "reads",
    [
        [(40, 43), (44, 40 + BLOCK + 3), (40 + 2 * BLOCK, 41 + 2 * BLOCK)],
        [(end - 5, end) for end in range(45, 1000, 5)],
    ],
    ids=["leaps", "steps"],
)
def test_tables_hold_the_draws_of_every_position_across_blocks(reads):
    table, seeds = UniformTable(2**40 + 11, 40), np.array([2**40 + 11], dtype=np.uint64)
    for start, end in reads:
        rows, positions = table.rows(start, end), np.arange(start, end)[None]
        for lane in range(3):
            np.testing.assert_array_equal(rows[lane], uniforms(seeds, positions, lane)[0])
        np.testing.assert_array_equal(rows[RACE_ROWS].T, race_draws(seeds, positions)[0])
        for lane in (CHAIN_DRAFT_LANE + 3, CHAIN_DRAFT_LANE + 12, CHAIN_ACCEPT_LANE + 3, SIBLING_LANE + 1):
            np.testing.assert_array_equal(table.lane(lane, start, end), uniforms(seeds, positions, lane)[0])


def test_chain_draws_are_those_of_the_tree(batch):
    tree = TokenTree.chain(np.zeros((3, 5), dtype=np.int64), np.array([5, 2, 3]))
    seeds = np.array([p.seed for p in PARAMS], dtype=np.uint64)
    wanted = tree_uniforms(seeds, np.array(LENGTHS) - 1, tree)
    got = batch.tree_uniforms(tree)
    np.testing.assert_array_equal(got[[0, 2]], wanted[[0, 2]])
    assert not got[1].any()  # a greedy slot draws nothing
    branching = TokenTree.tree(np.zeros((3, 4)), [[-1, 0, 0, 1]] * 3)
    for tree in (
        branching,
        TokenTree.tree(np.zeros((3, 6)), [[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 3, 0], [-1, 0, 0, 0, 2, 3]]),
    ):
        wanted, got = tree_uniforms(seeds, np.array(LENGTHS) - 1, tree), batch.tree_uniforms(tree)
        np.testing.assert_array_equal(got[[0, 2]], wanted[[0, 2]])
        assert not got[1].any()


@pytest.mark.parametrize("num_nodes", [[6, 6, 6], [1, 3, 6]], ids=["full", "roots alone"])
@pytest.mark.parametrize("is_invariant", [False, True])
@pytest.mark.parametrize("parents", [[-1, 0, 0, 1, 1, 2], [-1, 0, 0, 0, 2, 4], [-1, 0, 1, 2, 3, 4]], ids=str)
def test_draws_of_drawn_drafts_are_those_of_the_tree(batch, parents, num_nodes, is_invariant):
    """Trees are marked as verified node by node; where no text may depend on drafts, drawn ones race too."""
    batch.is_invariant = is_invariant
    probs, nums = np.full((3, 6, 4), 0.25, np.float32), np.array(num_nodes)
    tokens = np.zeros((3, 6), np.int64)
    is_chain = parents == [-1, 0, 1, 2, 3, 4]
    above = np.where(np.arange(6) < nums[:, None], parents, -1)
    tree = TokenTree.chain(tokens, nums, probs) if is_chain else TokenTree.tree(tokens, above, nums, probs)
    seeds = np.array([p.seed for p in PARAMS], dtype=np.uint64)
    counted = replace(tree, draft_probs=None) if is_invariant else tree
    wanted, got = tree_uniforms(seeds, np.array(LENGTHS) - 1, counted), batch.tree_uniforms(tree)
    for slot in (0, 2):
        used = slice(int(nums[slot]))
        first = int(is_chain and not is_invariant and nums[slot] > 1)  # a chain reads no accept draw at its root
        np.testing.assert_array_equal(got[slot, used, 1], wanted[slot, used, 1])
        np.testing.assert_array_equal(got[slot, used, 0][first:], wanted[slot, used, 0][first:])
    assert not got[1].any()
    marked = got[[0, 2], 0, 0] == NODE_BY_NODE
    assert marked.tolist() == [not is_chain and not is_invariant and num > 1 for num in (num_nodes[0], num_nodes[2])]


def test_a_draft_token_is_drawn_at_the_position_it_will_stand_at(batch):
    seeds = np.array([p.seed for p in PARAMS], dtype=np.uint64)
    for depth in (1, 4):
        wanted = uniforms(seeds, np.array(LENGTHS)[:, None] - 1 + depth, CHAIN_DRAFT_LANE + depth)[:, 0]
        got = batch.draft_uniforms(depth)
        np.testing.assert_array_equal(got[[0, 2]], wanted[[0, 2]])
        assert got[1] == 0


def test_siblings_have_draws_of_their_own(batch):
    got = batch.sibling_uniforms(2, 4)
    np.testing.assert_array_equal(got[:, 0], batch.draft_uniforms(2))
    assert len(set(got[0].tolist() + batch.sibling_uniforms(3, 4)[0].tolist())) == 8
    np.testing.assert_array_equal(batch.sibling_uniforms(2, 2), got[:, :2])


def test_only_sampling_parameters_that_change_something_are_fed(batch):
    assert batch.warp_feeds().keys() == {"temperature"}
    assert not batch.is_greedy
    batch.sequences = [batch.sequences[1]]
    batch.changed()
    assert batch.is_greedy and batch.warp_feeds() == {}
    batch.sequences = [TokenSequence(0, [1], SamplingParams(temperature=0.5, top_k=3, top_p=0.9), frozenset(), None)]
    batch.changed()
    assert {name: value.tolist() for name, value in batch.warp_feeds().items()} == {
        "temperature": [0.5],
        "top_k": [3],
        "top_p": [pytest.approx(0.9)],
    }
