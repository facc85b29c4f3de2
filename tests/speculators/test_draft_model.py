# SPDX-License-Identifier: Apache-2.0
"""Chains of a small model over mock engines: their length, what the draft reads, and the resulting text."""

import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.sampling import SamplingParams
from speccompile.core.specs import CANDIDATE_PROBS, CANDIDATES, NODE_PROBS, GraphSpec
from speccompile.core.tree import TokenTree
from speccompile.drafting.acceptance import DraftState
from speccompile.drafting.budget import Budget
from speccompile.drafting.drawn_length import DrawnLength, DrawnRecord
from speccompile.runtime.scheduler import decode
from speccompile.runtime.sequences import SequenceBatch, TokenSequence
from speccompile.runtime.verifier import Verifier
from speccompile.speculators.draft_model.config import DraftModelConfig, DraftModelMethod
from tests.lab.decoding import greedy_batch
from tests.mock_lm import VOCAB, MockEngine, MockLM
from tests.speculators.distribution_check import LEAST, decode_many, fit_p_value

TARGET = MockLM(seed=11, sharpness=1.2)
DRAFT = TARGET.blurred(seed=12, blur=0.7)
CHEAP = {"target": StepCosts(((1, 10.0), (16, 11.0))), "draft": StepCosts(((1, 0.1),))}
DEAR = {"target": StepCosts(((1, 1.0), (16, 30.0))), "draft": StepCosts(((1, 2.0),))}
HEAT = (0.9, 4, 1.0)


def make_proposer(costs=None, slots=2, **config):
    context = MethodContext(slots, 96, 8, costs or {})
    engine = MockEngine(DRAFT, "draft", slots, 96, num_candidates=1)
    return DraftModelMethod().make_proposer(DraftModelConfig("draft", **config), {"draft": engine}, context)


class Certain:
    """A draft whose one candidate at each depth has a given confidence, and is the one that is drawn.

    Args:
        confidences: [slots][depth].
    """

    spec = GraphSpec("draft", (), (), (), VOCAB, num_candidates=1, gives_probs=True)

    def __init__(self, confidences):
        self.confidences = confidences

    def room(self, slot, sequence):
        return 99

    def begin(self, batch, slots, warp):
        return self._after(0)

    def expand(self, batch, level):
        return self._after(level.depth)

    def _after(self, depth):
        num = len(self.confidences)
        dists = np.tile(np.eye(1, VOCAB, dtype=np.float32), (num, 1, 1))
        sure = np.array([row[depth] for row in self.confidences]).reshape(num, 1, 1)
        return {CANDIDATES: np.zeros((num, 1, 1), dtype=np.int64), CANDIDATE_PROBS: sure, NODE_PROBS: dists}


def draft_lengths(confidences, costs=None, drawn=False, planned=False, odds=1.0, **config):
    """How many drafts of these confidences [slots][depth] are scored."""
    context, scorer = MethodContext(len(confidences), 96, 8, costs or {}), Certain(confidences)
    drafts = DraftModelConfig("draft", confidence_odds=odds, **config).make_drafts(scorer, scorer, "draft", context)
    params, estimate = SamplingParams(temperature=0.8 * drawn), drafts[0].new_estimate
    sequences = [
        SimpleNamespace(tokens=[1], sampling=params, max_drafts=9, grammar=None, draft_state=DraftState(estimate()))
        for _ in confidences
    ]
    fields = {"may_draw": drawn, "is_greedy": not drawn, "is_forced": planned, "least_drafts": 0, "warp_feeds": dict}
    batch = SimpleNamespace(sequences=sequences, **fields)
    batch.draft_uniforms = lambda depth, num: np.zeros((len(sequences), num), dtype=np.float32)
    return (drafts[drawn].propose(batch).num_nodes - 1).tolist()


def draft_length(confidences, *args, **fields):
    return draft_lengths([confidences], *args, **fields)[0]


@pytest.mark.parametrize("drawn", [False, True])
def test_a_fixed_length_does_not_look_at_confidence_or_time(drawn):
    assert draft_length([0.01] * 9, num_draft_tokens=5, drawn=drawn) == 5
    assert draft_length([0.01] * 9, DEAR, num_draft_tokens=5, drawn=drawn) == 5


def test_min_confidence_leaves_out_the_token_that_falls_below_it_unless_it_was_drawn():
    sure, fields = [0.9, 0.8, 0.6, 0.9, 0.9], {"num_draft_tokens": 5, "min_confidence": 0.5}
    assert draft_length(sure, **fields) == 2  # 0.9 * 0.8 * 0.6 < 0.5
    assert draft_length(sure, **fields, drawn=True) == 3
    for drawn in (False, True):
        assert draft_length(sure, **fields, drawn=drawn, planned=True) == 5  # a planned length is kept
        assert draft_length([0.9] * 9, DEAR, min_confidence=0.5, drawn=drawn) >= 6  # time is not weighed


@pytest.mark.parametrize("drawn", [False, True])
def test_auto_follows_the_costs(drawn):
    sure, unsure = [0.95] * 9, [0.5] * 9
    assert draft_length(sure, CHEAP, drawn=drawn) == 8
    assert draft_length(sure, CHEAP, drawn=drawn, max_draft_tokens=3) == 3
    assert draft_length(sure, DEAR, drawn=drawn) == 0
    cheap = draft_length(unsure, CHEAP, drawn=drawn)
    assert draft_length(unsure, DEAR, drawn=drawn) <= cheap < draft_length(sure, CHEAP, drawn=drawn)


@pytest.mark.parametrize("drawn", [False, True])
def test_odds_correct_a_modest_draft(drawn):
    modest = [0.5] * 9
    assert draft_length(modest, CHEAP, drawn=drawn) < draft_length(modest, CHEAP, odds=5.0, drawn=drawn)


def test_a_record_of_drawn_drafts_follows_the_verdicts():
    record = DrawnRecord(0.0)

    def learn(num_drafts, num_accepted):
        record.learn([record.estimate.prob(0.5)] * num_drafts, num_accepted)

    for _ in range(40):  # always right: the odds rise; always wrong: they fall again
        learn(4, 4)
    assert record.estimate.log_odds[0] > 1.5 and record.rate > 0.9
    for _ in range(200):
        learn(1, 0)
    assert record.estimate.log_odds[0] < -1.5 and record.rate < 0.1
    for _ in range(1500):  # a length that is not drafted is probed again
        learn(0, 0)
    assert record.rate > 0.7


@pytest.mark.parametrize(("accepted", "least"), [(0.05, 0.965), (0.36, 0.98), (0.7, 1.18)])
def test_drawn_chains_that_do_not_pay_end_soon(accepted, least):
    """Texts of 160 tokens; a run of the draft costs 0.4 of a step; `least` is the speed, plain decoding's 1."""
    run_ms, target = 4.0, StepCosts(((1, 10.0), (16, 13.0)))
    costs = StepCosts(((1, run_ms),))
    rule, rng, spent_ms, num = DrawnLength(Budget(10, 10, 1, target, costs), 0.0), random.Random(3), 0.0, 0
    for _ in range(60):
        state, first = SimpleNamespace(drawn=None), num
        batch = SimpleNamespace(sequences=[SimpleNamespace(draft_state=state)], is_forced=False)
        while num - first < 160:
            chains, drafts = rule.begin(batch), 0
            while chains.goes_on(0):
                chains.add(0, accepted)
                drafts += 1
            kept = next((at for at in range(drafts) if rng.random() >= accepted), drafts)
            chains.learn([kept])
            spent_ms += target.ms(1 + drafts) + run_ms * drafts
            num += 1 + kept
    assert 10.0 * num / spent_ms > least


def test_slots_that_decide_together_weigh_the_whole_batch_and_those_that_draw_do_not():
    costs = {"target": StepCosts(((1, 10.0), (10, 11.0), (64, 200.0))), "draft": StepCosts(((1, 0.1),))}
    sure, unsure = [0.95] * 9, [0.03] * 9
    assert draft_lengths([sure], costs) == [8]
    lengths = draft_lengths([sure, unsure, unsure, unsure], costs)
    assert max(lengths) < 8  # one good draft does not pay for the padding of three others
    assert draft_lengths([unsure] * 4, costs) == [0] * 4
    drawn = draft_lengths([sure, unsure, unsure, unsure], costs, drawn=True)
    assert drawn == [8, 2, 2, 2] == [draft_length(row, costs, drawn=True) for row in (sure, unsure, unsure, unsure)]


def test_costs_are_interpolated_and_extended():
    costs = StepCosts.from_json({"step_ms": {"8": 4.5, "1": 2.0, "4": 3.5}})
    assert [costs.ms(n) for n in (1, 2, 4, 6, 8, 12)] == pytest.approx([2.0, 2.5, 3.5, 4.0, 4.5, 4.5 + 2.5 * 4 / 7])
    noisy = StepCosts.from_json({"step_ms": {"1": 2.0, "2": 2.9, "3": 2.6, "4": 4.7, "6": 3.7}})
    assert [ms for _, ms in noisy.ms_by_nodes] == [2.0, 2.6, 2.6, 3.7, 3.7]
    assert StepCosts.from_json({}).ms(3) == 0.0
    assert StepCosts(((1, 0.2),)).ms(9) == 0.2


def verdict(num_accepted):
    return SimpleNamespace(num_accepted=np.array([num_accepted]), path=np.arange(num_accepted + 1)[None])


def test_a_draft_that_missed_tokens_catches_up_and_then_reads_little():
    proposer = make_proposer(num_draft_tokens=3)
    batch = greedy_batch([int(t) for t in np.arange(40) % VOCAB])
    [sequence] = batch.sequences
    proposer.start(0, sequence)
    tree = proposer.propose(batch)
    widths = [seen["tokens"][1] for seen in proposer.rows.engine.feeds_seen]
    assert widths == [39, 1, 1, 1]
    assert tree.tokens[0].tolist() == [sequence.tokens[-1], *DRAFT.greedy(sequence.tokens, 3)]
    assert tree.draft_probs is None


def test_after_a_whole_path_two_tokens_are_read_after_a_refusal_one():
    proposer = make_proposer(num_draft_tokens=3)
    batch = greedy_batch([1, 2, 3])
    [sequence] = batch.sequences
    proposer.start(0, sequence)
    for num_accepted, widths in ((3, [2, 1, 1]), (1, [1, 1, 1]), (0, [1, 1, 1])):
        tree = proposer.propose(batch)
        proposer.commit(batch, tree, verdict(num_accepted), {})
        sequence.tokens += [*tree.tokens[0, 1 : num_accepted + 1].tolist(), 7]
        proposer.rows.engine.feeds_seen.clear()
        proposer.propose(batch)
        assert [seen["tokens"][1] for seen in proposer.rows.engine.feeds_seen] == widths
        proposer.commit(batch, tree, verdict(0), {})


def test_rows_of_refused_drafts_are_read_again_even_after_steps_without_drafts():
    proposer = make_proposer(num_draft_tokens=3)
    batch = greedy_batch([1, 2, 3])
    [sequence] = batch.sequences
    proposer.start(0, sequence)
    tree = proposer.propose(batch)
    proposer.commit(batch, tree, verdict(0), {})
    sequence.tokens += [9, 8, 7, 6]  # longer than the refused path: its rows look as if they were the slot's own
    tree = proposer.propose(batch)
    assert tree.tokens[0].tolist() == [6, *DRAFT.greedy(sequence.tokens, 3)]


def test_a_sequence_that_draws_drafts_as_if_it_were_alone():
    """Its drafts change its text, so neither its neighbours nor what came before it decide how far it drafts."""
    costs = {"target": StepCosts(((1, 10.0), (16, 30.0))), "draft": StepCosts(((1, 6.0),))}
    asked = [SamplingParams(max_new_tokens=60, temperature=0.4 + 0.2 * i, seed=i) for i in range(8)]
    prompts = [[1 + i, 3, i] for i in range(8)]

    def drafted(slots, which):
        verifier = Verifier(MockEngine(TARGET, "target", slots, 96, headroom=9), 96)
        waiting = [TokenSequence(i, list(prompts[i]), asked[i], frozenset(), None) for i in which]
        for _ in decode(verifier, make_proposer(costs, slots), SequenceBatch(waiting, slots)):
            pass
        return [(sequence.tokens, sequence.stats.num_draft_tokens) for sequence in waiting]

    alone = [drafted(1, [i])[0] for i in range(8)]
    assert drafted(4, range(8)) == drafted(1, range(8)) == alone
    assert min(num for _, num in alone) < 5 and max(num for _, num in alone) > 25


@pytest.mark.distribution
# `auto` stops on the tokens it has seen: that must not change the distribution. Seeds are fixed; p < 1e-4 happens by
# chance once in ten thousand choices of them.
@pytest.mark.parametrize("config", [{"num_draft_tokens": 2}, {}, {"min_confidence": 0.2}, {"drafts": "greedy"}])
def test_three_sampled_tokens_follow_the_targets_distribution(config):
    target, num = MockEngine(TARGET, "target", 60, 96, headroom=9), 3000
    done = decode_many(target, make_proposer(slots=60, costs=CHEAP, **config), HEAT, num, 96)
    assert fit_p_value(done, TARGET, HEAT) > LEAST
    assert sum(sequence.stats.num_draft_tokens for sequence in done) > num


class Dropping:
    """A proposer whose drawn drafts are left out from the first unlikely one on: a wrong adaptive length."""

    catches_up = True

    def __init__(self, proposer):
        self.proposer, self.caches, self.num_dropped = proposer, proposer.caches, 0

    def __getattr__(self, name):
        return getattr(self.proposer, name)

    def propose(self, batch):
        tree = self.proposer.propose(batch)
        if tree.draft_probs is None:
            return tree
        num_nodes = tree.num_nodes.copy()
        for slot, num in enumerate(num_nodes.tolist()):
            sure = [tree.draft_probs[slot, node, tree.tokens[slot, node]] for node in range(1, num)]
            num_nodes[slot] = 1 + next((i for i, prob in enumerate(sure) if prob < 0.5), num - 1)
        self.num_dropped += int((tree.num_nodes - num_nodes).sum())
        return TokenTree.chain(tree.tokens, num_nodes, tree.draft_probs)


@pytest.mark.distribution
@pytest.mark.parametrize("costs", [CHEAP, {**CHEAP, "draft": StepCosts(((1, 1.0),))}])
def test_an_adaptive_stop_keeps_the_targets_distribution_and_dropping_drawn_tokens_does_not(costs):
    engine = MockEngine(TARGET, "target", 60, 96, headroom=9)
    done = decode_many(engine, make_proposer(costs, 60), HEAT, 1500, 96, 7)
    assert fit_p_value(done, TARGET, HEAT) > LEAST
    first = Counter(next(iter(sequence.stats.outcomes))[0] for sequence in done)
    assert sum(count > 100 for count in first.values()) > 1  # it does adapt
    wrong = Dropping(make_proposer(costs, 60))
    assert fit_p_value(decode_many(engine, wrong, HEAT, 1500, 96), TARGET, HEAT) < LEAST
    assert wrong.num_dropped > 1000
