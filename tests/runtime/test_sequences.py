# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest

from speccompile.core.sampling import (
    CHAIN_ACCEPT_LANE,
    CHAIN_DRAFT_LANE,
    SIBLING_LANE,
    SamplingParams,
    race_draws,
    uniforms,
)
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
