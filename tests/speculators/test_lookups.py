# SPDX-License-Identifier: Apache-2.0
"""Drafts found in the text: limits, learning, one suffix tree of all requests, states that travel, the distribution."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.core import registry
from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.tree import Verdict
from speccompile.speculators.ngram import proposer as ngram
from speccompile.speculators.ngram.proposer import NgramIndex
from speccompile.speculators.suffix import proposer as suffix
from tests.lab.engines import mock_engine
from tests.mock_lm import MockEngine, MockLM
from tests.runtime import scheduler_lab
from tests.runtime.test_spec_engine import TARGET
from tests.speculators.distribution_check import LEAST, WARPS, decode_many, fit_p_value

BOTH = [{}, {"tree": "auto"}]
ALL = [("ngram", {}), *(("suffix", config) for config in BOTH)]
FIRST_RATES = {"ngram": ngram.FIRST_RATES, "suffix": suffix.FIRST_RATES}


def make(name="suffix", slots=3, costs=None, nodes=16, **config):
    context, method = MethodContext(slots, 512, nodes, {"target": costs or StepCosts()}), registry.method(name)
    return method.make_proposer(method.Config(**config), {}, context)


def batch_of(proposer, texts, max_drafts=99, is_forced=False):
    sequences = [SimpleNamespace(tokens=list(tokens), max_drafts=max_drafts, grammar=None) for tokens in texts]
    for slot, sequence in enumerate(sequences):
        proposer.start(slot, sequence)
    return SimpleNamespace(sequences=sequences, is_forced=is_forced, least_drafts=0)


def propose(sequences, max_drafts=99, costs=None, nodes=16, name="suffix", **config):
    proposer = make(name, costs=costs, nodes=nodes, **config)
    return proposer.propose(batch_of(proposer, sequences, max_drafts))


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


def test_the_latest_occurrence_wins_and_length_grows_with_the_match():
    tokens = [1, 2, 7, 8, 9, 4, 1, 2, 5, 6, 0, 3, 1, 2]
    assert propose([tokens], name="ngram", min_match=2, max_match=4, tokens_per_match=2).tokens.tolist() == [
        [2, 5, 6, 0, 3]
    ]
    longer = [9, 1, 2, 7, 8, 9, 4, 6, 1, 2, 5, 5, 5, 9, 1, 2]
    assert propose([longer], name="ngram", min_match=2, max_match=4, tokens_per_match=2).tokens.tolist() == [
        [2, 7, 8, 9, 4, 6, 1]
    ]


def test_a_match_that_overlaps_its_draft_repeats_the_loop():
    tree = propose(
        [[5, 1, 2, 3, 1, 2, 3]], name="ngram", min_match=2, max_match=2, num_draft_tokens=8, tokens_per_match=8
    )
    assert tree.tokens.tolist() == [[3, 1, 2, 3, 1, 2, 3, 1, 2]]


def test_a_longer_match_gives_a_longer_draft_and_the_most_frequent_wins():
    tokens = [1, 2, 7, 8, 9, 4, 1, 2, 5, 6, 0, 3, 1, 2, 5, 6, 8, 1, 2]
    tree = propose([tokens], min_match=2, tokens_per_match=1.5)
    assert tree.tokens.tolist() == [[2, 5, 6, 8]]  # 5 twice, 7 once; of 0 and 8, which came once each, the latest
    assert propose([tokens], tokens_per_match=1.0).tokens.tolist() == [[2, 5, 6]]
    assert propose([[1, 2, 9, 2]], min_match=2).tokens.tolist() == [[2]]


def test_a_tree_has_the_likeliest_paths_in_the_order_of_their_share():
    tokens = [1, 5, 1, 5, 1, 6, 1, 7, 1]
    tree = propose([tokens], tree="auto", tokens_per_match=1.0)
    assert tree.tokens.tolist() == [[1, 5, 7, 6]] and tree.parents.tolist() == [[-1, 0, 0, 0]]
    assert propose([tokens], tree="auto", tokens_per_match=1.0, min_prob=0.3).tokens.tolist() == [[1, 5]]
    assert propose([tokens], tree="auto", tokens_per_match=1.0, nodes=2).tokens.tolist() == [[1, 5, 7]]


@pytest.mark.parametrize(("name", "config"), ALL)
def test_ragged_batches_are_padded_and_limits_hold(name, config):
    tree = propose([[1, 2, 3, 1, 2], [7, 8, 9]], max_drafts=2, name=name, **config)
    assert tree.num_nodes.tolist() == [3, 1]
    assert tree.tokens[0].tolist() == [2, 3, 1]
    assert tree.parents.tolist() == [[-1, 0, 1], [-1, -1, -1]]
    tree.validate()
    assert propose([[1, 2, 3, 1, 2]], max_drafts=0, name=name, **config).tokens.tolist() == [[2]]


@pytest.mark.parametrize(("name", "config"), ALL)
def test_measured_costs_bound_the_drafts_of_every_slot(name, config):
    sequences = [[1, 2, 3, 1, 2], [7, 8, 9], [4, 4, 4, 4, 4, 4]]
    cheap, dear = StepCosts(((1, 10.0), (64, 11.0))), StepCosts(((1, 1.0), (64, 90.0)))
    assert propose(sequences, costs=cheap, name=name, **config).num_nodes.tolist()[1:] == [1, 16]
    assert propose(sequences, costs=dear, name=name, **config).num_nodes.tolist() == [1, 1, 1]
    if name == "suffix":
        proposer = make(name, costs=dear, **config)
        forced = proposer.propose(batch_of(proposer, sequences, max_drafts=3, is_forced=True))
        assert forced.num_nodes.tolist() == [4, 1, 4]


@pytest.mark.parametrize(("name", "config"), ALL)
def test_rates_are_learned_by_match_length(name, config, monkeypatch):
    first_rates = FIRST_RATES[name]
    proposer = make(name, costs=StepCosts(((1, 1.0), (64, 1.1))), num_draft_tokens=2, **config)
    batch = batch_of(proposer, [[9, 1, 2, 3, 7, 8, 4, 1, 2, 3]])
    estimate = batch.sequences[0].draft_state.estimate

    def step(num_accepted):
        tree = proposer.propose(batch)  # after a match of 3 tokens
        path = np.array([[*range(num_accepted + 1), *[-1] * (2 - num_accepted)]])
        proposer.commit(batch, tree, Verdict(path, np.array([num_accepted]), np.array([0])), {})
        return tree.nodes - 1

    def rate(size):
        return estimate.prob(first_rates[size - 1], size - 1)

    first = [rate(size) for size in (2, 3)]
    assert first == pytest.approx(first_rates[1:3], abs=1e-6)
    assert step(0) == 2 and rate(3) < first[1]
    for _ in range(60):
        step(2)
    assert rate(3) > 0.92 and rate(2) == first[0]
    if name == "suffix":  # the next sequence begins with what this one taught
        estimate = batch_of(proposer, [[1, 2]]).sequences[0].draft_state.estimate
        assert first[1] < rate(3) < 0.92 and rate(2) == first[0]
    else:
        monkeypatch.setattr(proposer.budget, "best", lambda gains, num_slots: (0, 0.0, 0.0))  # no draft gains time
        assert [step(0) for _ in range(300)] == [0] * 300
        assert rate(3) == pytest.approx(first[1], abs=0.02)


def lone(sequence):
    return SimpleNamespace(sequences=[sequence], is_forced=False, least_drafts=0)


def read_all(proposer, tokens, parts):
    """A sequence whose prompt is read in these parts, and the rest before the first draft."""
    sequence = SimpleNamespace(tokens=list(tokens), max_drafts=9, grammar=None)
    proposer.start(0, sequence)
    start = 0
    for num in parts:
        proposer.prefill(0, sequence, np.zeros((1, num), dtype=np.int64), start, {})
        start += num
    return proposer.propose(lone(sequence)).tokens.tolist()


def test_a_prompt_read_in_parts_is_read_once():
    tokens = [3, 1, 4, 1, 5, 3, 1, 4]
    proposer = make()
    wanted = read_all(proposer, tokens, [])
    assert wanted == [[4, 1, 5, 3, 1, 4, 1][: len(wanted[0])]] and len(wanted[0]) == 7
    for parts in ([7], [2, 2, 3], [1] * 7, [4]):
        assert read_all(proposer, tokens, parts) == wanted
    # After a prefix that is in the caches already, reading begins in the middle of the prompt.
    sequence = SimpleNamespace(draft_state=None, tokens=tokens, max_drafts=9, grammar=None)
    assert proposer.resume(0, sequence, 5) == 5
    proposer.prefill(0, sequence, np.zeros((1, 2), dtype=np.int64), 5, {})
    assert proposer.propose(lone(sequence)).tokens.tolist() == wanted


def test_drafts_that_were_refused_are_never_counted():
    proposer = make()
    batch = batch_of(proposer, [[1, 2, 3, 1, 2]])
    for tokens in ([9], [1, 2], [4]):
        tree = proposer.propose(batch)
        assert tree.nodes > 1 or tokens != [9]
        proposer.commit(batch, tree, Verdict(np.zeros((1, 1), dtype=np.int64), np.array([0]), np.array([9])), {})
        batch.sequences[0].tokens += tokens
    proposer.propose(batch)
    state, text = batch.sequences[0].draft_state, batch.sequences[0].tokens
    for size in (1, 2, 3):
        for at in range(len(text) - size + 1):
            run = text[at : at + size]
            assert state.tree.count(run) == sum(text[i : i + size] == run for i in range(len(text)))


def test_requests_share_outputs_only_where_the_recipe_says_so():
    told, asked = [8, 1, 2, 3, 4, 5, 6, 7], [9, 1, 2, 3]

    def drafts_of(*sequences, prompt=8, **config):
        proposer = make(**config)
        for tokens in sequences:
            sequence = SimpleNamespace(tokens=list(tokens[:prompt]), max_drafts=9, grammar=None)
            proposer.start(0, sequence)
            sequence.tokens = list(tokens)
            tree = proposer.propose(lone(sequence))
        return tree.tokens.tolist()

    assert drafts_of(told, asked) == [[3]]
    assert drafts_of(told, asked, prompt=1, shared_bytes=10**6) == [[3, 4, 5, 6, 7]]
    # Of a prompt the last `depth` - 1 tokens alone are known to others.
    assert drafts_of(told, asked, depth=3, shared_bytes=10**6) == [[3]]
    # A sequence that is resumed and started again tells it once.
    proposer = make(shared_bytes=10**6)
    sequence = SimpleNamespace(tokens=told, draft_state=None, max_drafts=9, grammar=None)
    assert [proposer.resume(0, sequence, num) for num in (6, 4, 5)] == [6, 4, 5]
    proposer.start(0, sequence)
    proposer.propose(lone(sequence))
    assert proposer.shared.count([2, 3]) == 1
    # Its own text comes first where both match as well.
    assert drafts_of(told, [1, 2, 3, 0, 1, 2, 3], prompt=1, shared_bytes=10**6)[0][:2] == [3, 0]


@pytest.mark.distribution
@pytest.mark.parametrize("config", BOTH)
@pytest.mark.parametrize("heat", [(0.0, 0, 1.0), *WARPS[:1]])
def test_text_follows_the_targets_distribution(config, heat):
    model = MockLM(seed=5)
    target = MockEngine(model, "target", 8, 64, headroom=17)
    is_greedy = heat[0] == 0
    sequences = decode_many(target, make(slots=8, nodes=8, depth=4, **config), heat, 40 if is_greedy else 1500, 64, 12)
    assert sum(sequence.stats.num_draft_tokens for sequence in sequences) > len(sequences)
    if is_greedy:
        assert {tuple(sequence.tokens) for sequence in sequences} == {(3, 1, 4, *model.greedy([3, 1, 4], 12))}
    else:
        assert fit_p_value(sequences, model, heat) > LEAST


@pytest.mark.parametrize("config", [*BOTH, {"shared_bytes": 10**6}])
def test_moving_sequences_keep_the_targets_text(monkeypatch, config):
    def make_engine(**sizes):
        return mock_engine(TARGET, TARGET, "suffix", nodes=16, headroom=17, **sizes, **config)

    monkeypatch.setitem(scheduler_lab.ENGINES, "suffix", make_engine)
    bench, prompts = scheduler_lab.Bench(kind="suffix"), scheduler_lab.mixed_prompts()
    scheduler_lab.check_moving(bench, [*prompts, [*prompts[0], 1, 2], prompts[2][:20]])
