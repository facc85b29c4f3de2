# SPDX-License-Identifier: Apache-2.0
"""Heads count drafts that were not worth scoring, and share a prior of the accepted length unless drafts are drawn."""

from types import SimpleNamespace

import numpy as np
import pytest

from speccompile.core.acceptance import Verdict
from speccompile.core.jobs import StepCosts
from speccompile.core.sampling import SamplingParams
from speccompile.core.specs import HIDDEN
from speccompile.core.tree import TokenTree
from speccompile.drafting.budget import Budget
from speccompile.drafting.heads import HeadsProposer
from speccompile.graph_kinds.heads import candidate_heads_spec, heads_spec

COSTS = StepCosts(((1, 1.0), (8, 1.1)))


def make_chain(may_sample=False):
    engine = SimpleNamespace(spec=heads_spec("heads", 4, 9, 3), max_slots=2)
    return HeadsProposer(engine, Budget(3, 3, 1, COSTS, COSTS, num_runs=1), None, 0.0, may_sample=may_sample)


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
    for may_sample, sequence, is_shared in ((True, greedy, True), (True, hot, False), (False, hot, True)):
        proposer = make_chain(may_sample)
        proposer.start(0, sequence)
        assert (sequence.draft_state.estimate.prior is proposer._prior) == is_shared
