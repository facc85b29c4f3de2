# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.errors import RecipeError
from speccompile.speculators.ngram.config import Config
from speccompile.speculators.ngram.method import NgramMethod
from speccompile.speculators.ngram.proposer import DraftLengths, MatchRates, NgramIndex


def longest_match(tokens, low, high):
    """The definition, by scanning."""
    for size in range(high, low - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                return end, size
    return 0, 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 3), st.integers(0, 3), st.integers(1, 7))
@settings(max_examples=300, deadline=None)
def test_the_index_finds_what_a_scan_finds(tokens, low, more, step):
    index = NgramIndex(low, low + more)
    for end in range(1, len(tokens) + 1, step):
        assert index.find(tokens[:end]) == longest_match(tokens[:end], low, low + more)


def propose(sequences, max_drafts=99, costs=None, **config):
    context = MethodContext(len(sequences), 512, 16, {"target": costs or StepCosts()})
    proposer = NgramMethod().make_proposer(Config(**config), {}, context)
    slots = [SimpleNamespace(tokens=tokens, max_drafts=max_drafts) for tokens in sequences]
    for place, slot in enumerate(slots):
        proposer.start(place, slot)
    return proposer.propose(SimpleNamespace(slots=slots))


def test_the_latest_occurrence_wins_and_length_grows_with_the_match():
    tokens = [1, 2, 7, 8, 9, 4, 1, 2, 5, 6, 0, 3, 1, 2]
    assert propose([tokens], min_match=2, max_match=4, tokens_per_match=2).tokens.tolist() == [[2, 5, 6, 0, 3]]
    longer = [9, 1, 2, 7, 8, 9, 4, 6, 1, 2, 5, 5, 5, 9, 1, 2]
    assert propose([longer], min_match=2, max_match=4, tokens_per_match=2).tokens.tolist() == [[2, 7, 8, 9, 4, 6, 1]]


def test_a_match_that_overlaps_its_draft_repeats_the_loop():
    tree = propose([[5, 1, 2, 3, 1, 2, 3]], min_match=2, max_match=2, num_draft_tokens=8, tokens_per_match=8)
    assert tree.tokens.tolist() == [[3, 1, 2, 3, 1, 2, 3, 1, 2]]


def test_ragged_batches_are_padded_and_limits_hold():
    tree = propose([[1, 2, 3, 1, 2], [7, 8, 9]], min_match=1, max_match=2, max_drafts=2)
    assert tree.num_nodes.tolist() == [3, 1]
    assert tree.tokens[0].tolist() == [2, 3, 1]
    assert tree.parents.tolist() == [[-1, 0, 1], [-1, -1, -1]]
    tree.validate()
    assert propose([[1, 2, 3, 1, 2]], max_drafts=0).tokens.tolist() == [[2]]


def test_auto_length_follows_rates_costs_and_the_batch():
    cheap, dear = StepCosts(((1, 10.0), (16, 11.5))), StepCosts(((1, 1.0), (16, 23.5)))

    def best(rates, num_slots, costs):
        return DraftLengths(costs, 15).best(rates, num_slots)

    assert best([0.9], 1, cheap) > best([0.5], 1, cheap) > best([0.1], 1, cheap) == 1
    assert best([0.9], 1, dear) == best([0.1], 1, dear) == 0
    assert best([0.9, 0.9], 4, dear) == 0
    assert best([0.99, 0.2], 2, cheap) > best([0.2], 2, cheap)
    by_hand = max(range(16), key=lambda n: (3 + sum(0.7**i + 0.4**i for i in range(1, n + 1))) / cheap.ms(3 * (n + 1)))
    assert best([0.7, 0.4], 3, cheap) == by_hand


def test_rates_are_learned_by_match_length():
    rates = MatchRates()
    first = rates.rate(3)
    rates.learn(3, 2, 0)
    assert rates.rate(3) < first
    for _ in range(30):
        rates.learn(3, 2, 2)
    assert rates.rate(3) > 0.95
    assert rates.rate(2) == MatchRates().rate(2)
    for _ in range(200):
        rates.learn(3, 0, 0)  # nothing drafted: back to the first guess
    assert rates.rate(3) == pytest.approx(first, abs=0.02)


def test_measured_costs_bound_the_length_of_every_slot():
    sequences = [[1, 2, 3, 1, 2], [7, 8, 9], [4, 4, 4, 4, 4, 4]]
    trees = [propose(sequences, costs=StepCosts(c)) for c in (((1, 10.0), (64, 11.0)), ((1, 1.0), (64, 90.0)))]
    assert trees[0].num_nodes.tolist() == [16, 1, 16]
    assert trees[1].num_nodes.tolist() == [1, 1, 1]


@pytest.mark.parametrize("bad", [{"num_draft_tokens": 0}, {"min_match": 0}, {"min_match": 4, "max_match": 3}])
def test_bad_fields_are_refused(bad):
    with pytest.raises(RecipeError, match=rf"speculator\.{list(bad)[-1]}: got"):
        Config(**bad)
