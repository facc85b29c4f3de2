# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.core.acceptance import Verdict
from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.errors import RecipeError
from speccompile.speculators.ngram.config import NgramConfig, NgramMethod
from speccompile.speculators.ngram.proposer import FIRST_RATES, NgramIndex


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


def propose(texts, max_drafts=99, costs=None, **config):
    context = MethodContext(len(texts), 512, 16, {"target": costs or StepCosts()})
    proposer = NgramMethod().make_proposer(NgramConfig(**config), {}, context)
    sequences = [SimpleNamespace(tokens=tokens, max_drafts=max_drafts, grammar=None) for tokens in texts]
    for slot, sequence in enumerate(sequences):
        proposer.start(slot, sequence)
    return proposer.propose(SimpleNamespace(sequences=sequences, least_drafts=0))


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


def test_rates_are_learned_by_match_length():
    context = MethodContext(1, 512, 16, {"target": StepCosts(((1, 1.0), (64, 1.1)))})
    proposer = NgramMethod().make_proposer(NgramConfig(num_draft_tokens=2, min_match=2, max_match=4), {}, context)
    sequence = SimpleNamespace(tokens=[9, 1, 2, 3, 7, 8, 4, 1, 2, 3], max_drafts=9, grammar=None)
    batch = SimpleNamespace(sequences=[sequence], least_drafts=0)
    proposer.start(0, sequence)

    def probs():
        estimate = sequence.draft_state.estimate
        return [estimate.prob(FIRST_RATES[size - 1], size - 1) for size in (2, 3)]

    def step(num_accepted):
        tree = proposer.propose(batch)  # after a match of 3 tokens
        path = np.array([[*range(num_accepted + 1), *[-1] * (2 - num_accepted)]])
        proposer.commit(batch, tree, Verdict(path, np.array([num_accepted]), np.array([0])), {})
        return tree.nodes - 1

    first = probs()
    assert first == pytest.approx(FIRST_RATES[1:3], abs=1e-6)
    assert step(0) == 2
    assert probs()[1] < first[1]
    for _ in range(60):
        step(2)
    assert probs()[1] > 0.92
    assert probs()[0] == first[0]
    proposer.budget.best = lambda gains, num_slots: (0, 0.0, 0.0)  # no draft gains time
    for _ in range(300):
        assert step(0) == 0
    assert probs()[1] == pytest.approx(first[1], abs=0.02)


def test_measured_costs_bound_the_length_of_every_slot():
    sequences = [[1, 2, 3, 1, 2], [7, 8, 9], [4, 4, 4, 4, 4, 4]]
    trees = [propose(sequences, costs=StepCosts(c)) for c in (((1, 10.0), (64, 11.0)), ((1, 1.0), (64, 90.0)))]
    assert trees[0].num_nodes.tolist() == [16, 1, 16]
    assert trees[1].num_nodes.tolist() == [1, 1, 1]


@pytest.mark.parametrize("bad", [{"num_draft_tokens": 0}, {"min_match": 0}, {"min_match": 4, "max_match": 3}])
def test_bad_fields_are_refused(bad):
    with pytest.raises(RecipeError, match=rf"speculator\.{list(bad)[-1]}: got"):
        NgramConfig(**bad)
