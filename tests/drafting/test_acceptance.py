# SPDX-License-Identifier: Apache-2.0
"""Estimates of acceptance: accepted lengths, odds by rank, the prior that sequences share, drafts never scored."""

from types import SimpleNamespace

import numpy as np
import pytest

from speccompile.core.jobs import StepCosts
from speccompile.core.sampling import SamplingParams
from speccompile.core.specs import HIDDEN
from speccompile.core.tree import TokenTree, Verdict
from speccompile.drafting.acceptance import AcceptanceEstimate, SharedPrior, acceptance_probs
from speccompile.drafting.budget import Budget
from speccompile.drafting.heads import HeadsProposer
from speccompile.drafting.tree import DraftTrees
from speccompile.graph_kinds.heads import candidate_heads_spec, heads_spec


def prior(value):
    made = SharedPrior(3)
    made.first = made.value = value
    return made


def estimate(log_odds=0.0):
    return AcceptanceEstimate(SharedPrior(3), log_odds)


def probs_of(known, *confidences):
    """Returns the probabilities of candidates after one node."""
    return acceptance_probs(np.array([known.factors(len(confidences))]), np.array([[confidences]]))[0, 0].tolist()


def tree_of(parents, probs, ranks):
    trees = DraftTrees([0], len(parents))
    trees.put(0, range(1, 1 + len(parents)), parents, probs, ranks)
    return trees


def test_accepted_length_follows_verdicts_and_recovers():
    known = AcceptanceEstimate(prior(1.5))
    for _ in range(200):
        known.learn_length(True, 0)
    assert known.accepted_length < 0.01
    for _ in range(6000):
        known.learn_length(False, 0)
    assert known.accepted_length > 1.4


def test_sequences_begin_with_the_shared_prior_and_rarely_try_again():
    shared = prior(1.5)
    first = AcceptanceEstimate(shared)
    for _ in range(300):
        first.learn_length(True, 0)
    fresh = AcceptanceEstimate(shared)
    assert fresh.accepted_length == shared.value < 0.01
    for _ in range(200):
        fresh.learn_length(False, 0)
    assert 0.1 < fresh.accepted_length < 0.2


def test_the_odds_of_acceptance_are_estimated_by_rank():
    rng, known, tail = np.random.default_rng(3), estimate(), []
    for step in range(6000):
        probs = probs_of(known, 0.3, 0.2)
        tree = tree_of([0, 0], probs, [0, 1])
        hit = int(rng.choice(3, p=[0.3, 0.6, 0.1]))  # none, the first rank, the second
        known.learn_ranks(tree, 0, [0, 1, 2], [0, hit] if hit else [0])
        if step > 500:
            tail.append(probs)
    np.testing.assert_allclose(np.mean(tail, axis=0), [0.6, 0.1], atol=0.02)


def test_later_candidates_share_what_the_first_one_leaves():
    known = estimate(2.0)
    first, *later = probs_of(known, 0.9, 0.08, 0.01)
    assert first == pytest.approx(known.prob(0.9)) and first + sum(later) == pytest.approx(1.0)
    assert later[0] / later[1] == pytest.approx(known.prob(0.08, 1) / known.prob(0.01, 2))


def test_probs_of_children_of_one_parent_add_up_to_at_most_one():
    assert sum(probs_of(estimate(4.0), 0.5, 0.4, 0.05, 0.02, 0.01)) <= 1 + 1e-12
    assert estimate(2.0).factors(9) == pytest.approx(np.exp(2 * np.array([1, 0.2, -0.2, *[-0.4] * 6])))
    assert probs_of(estimate(-1.0), 1.0) == [pytest.approx(1.0)] and probs_of(estimate(-1.0), 0.0) == [0.0]
    assert estimate(1.0).prob(0.4) == pytest.approx(probs_of(estimate(1.0), 0.4)[0])


def test_only_children_of_the_kept_path_change_the_odds():
    tree, known = tree_of([0, 0, 1, 1, 2], [0.5, 0.25, 0.5, 0.2, 0.5], [0, 1, 0, 1, 0]), estimate()
    known.learn_ranks(tree, 0, [0, 1, 2, 5], [0, 1])  # 1 is kept; 2 is not; what follows 2 was never tried
    np.testing.assert_allclose(known.log_odds, [0.05, -0.025, 0, 0])


def test_odds_of_drafts_that_are_never_scored_recover():
    known, tree = estimate(1.0), tree_of([0], [0.5], 0)
    for _ in range(200):
        known.learn_ranks(tree, 0, [0, 1], [0])
    assert known.log_odds[0] < -3
    for _ in range(300):
        known.learn_ranks(tree, 0, [0], [0])
    assert known.log_odds[0] == pytest.approx(1.0, abs=0.05)


COSTS = StepCosts(((1, 1.0), (8, 1.1)))


def make_chain(may_draw=False):
    engine = SimpleNamespace(spec=heads_spec("heads", 4, 9, 3), max_slots=2)
    return HeadsProposer(engine, Budget(3, 3, 1, COSTS, COSTS, num_runs=1), None, 0.0, may_draw=may_draw)


def make_tree():
    engine = SimpleNamespace(spec=candidate_heads_spec("heads", 4, 9, 3, 2), max_slots=2)
    return HeadsProposer(engine, Budget(4, 3, 2, COSTS, COSTS, num_runs=1), None, 0.0)


def commit_roots(proposer, sequences, drafting):
    """Commits a step whose first `drafting` slots drafted, and in which only the roots were scored."""
    proposer._drafting, proposer._num_nodes = list(range(drafting)), [1, 1]
    tree, zeros = TokenTree.roots(np.array([1, 2])), np.zeros(2, np.int64)
    verdict = Verdict(np.zeros((2, 1), np.int64), zeros, zeros)
    proposer.commit(SimpleNamespace(sequences=sequences), tree, verdict, {HIDDEN: np.zeros((2, 1, 4), np.float32)})


@pytest.mark.parametrize("make", [make_chain, make_tree])
def test_drafts_that_were_not_scored_lower_the_accepted_length(make):
    proposer, sequences = make(), [SimpleNamespace(tokens=[1, 2], sampling=SamplingParams()) for _ in range(2)]
    for slot, sequence in enumerate(sequences):
        proposer.start(slot, sequence)
    first = [sequence.draft_state.estimate.accepted_length for sequence in sequences]
    for _ in range(20):
        commit_roots(proposer, sequences, 1)
    drafted, idle = [sequence.draft_state.estimate.accepted_length for sequence in sequences]
    assert drafted < 0.5 * first[0] and drafted < idle
    assert proposer._prior.value < first[0]


def test_nodes_that_another_added_to_the_tree_are_not_the_heads_own():
    """Of two accepted drafts the second is another's: the same is learned as where the first alone is accepted."""
    lengths = []
    for path in ([0, 1, 4], [0, 1, -1]):
        proposer, sequences = make_tree(), [SimpleNamespace(tokens=[1, 2], sampling=SamplingParams())]
        proposer.start(0, sequences[0])
        proposer._drafting, proposer._num_nodes = [0], [3]
        num = sum(node > 0 for node in path)
        tree = TokenTree.tree([[1, 7, 8, 9, 6]], [[-1, 0, 1, 0, 1]])
        verdict = Verdict(np.array([path]), np.array([num]), np.array([5]))
        proposer.commit(SimpleNamespace(sequences=sequences), tree, verdict, {HIDDEN: np.zeros((1, 5, 4), np.float32)})
        lengths.append(sequences[0].draft_state.estimate.accepted_length)
    assert lengths[0] == lengths[1]


def test_only_drafts_that_are_never_drawn_share_a_prior():
    greedy = SimpleNamespace(tokens=[1, 2], sampling=SamplingParams())
    hot = SimpleNamespace(tokens=[1, 2], sampling=SamplingParams(temperature=1.0))
    for may_draw, sequence, is_shared in ((True, greedy, True), (True, hot, False), (False, hot, True)):
        proposer = make_chain(may_draw)
        proposer.start(0, sequence)
        assert (sequence.draft_state.estimate.prior is proposer._prior) == is_shared
