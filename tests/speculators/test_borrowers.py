# SPDX-License-Identifier: Apache-2.0
"""Methods that draft on the target's own caches: whatever they draft, the text is the target's."""

import pytest

from tests.speculators.borrower_lab import check_dist, check_greedy, check_seeds, lab_of

CHAIN, PAIRS, GROWN = (
    {"num_draft_tokens": 3},
    {"tree": {"widths": [2, 2]}},
    {"tree": "auto", "num_candidates": 3, "tree_width": 2},
)
LIKELIEST, PATHS = {"drafts": "greedy"}, {"tree": [[0], [1], [0, 0], [0, 0, 0]]}
CASES = [
    *(("early_exit", config) for config in (CHAIN, LIKELIEST, PAIRS, GROWN)),
    *(("glide", config) for config in (CHAIN, LIKELIEST, PAIRS, PATHS, GROWN)),
    *(("self_draft", config) for config in (CHAIN, GROWN)),
]
DRAWN = [("early_exit", CHAIN), ("early_exit", PAIRS), ("self_draft", CHAIN)]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("name", "config"), CASES)
def test_greedy_text_is_the_targets_own(name, config, batch):
    assert check_greedy(lab_of(name, **config), batch) > 40


@pytest.mark.parametrize(("name", "config"), CASES)
def test_same_seed_gives_same_text_in_any_batch(name, config):
    check_seeds(lambda: lab_of(name, **config))


@pytest.mark.distribution
@pytest.mark.parametrize(("name", "config"), [*DRAWN, *(("glide", config) for config in (CHAIN, PAIRS, GROWN))])
def test_sampled_text_follows_the_targets_distribution(name, config):
    check_dist(lab_of(name, **config))
