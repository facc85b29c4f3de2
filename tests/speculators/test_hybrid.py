# SPDX-License-Identifier: Apache-2.0
"""Several drafters: who drafts in a step, the text, and the states of those that do not draft."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.protocols import StepTimes
from speccompile.core.sampling import SamplingParams
from speccompile.core.tree import TokenTree, Verdict
from speccompile.errors import RecipeError
from speccompile.runtime.control import FixedLength
from speccompile.runtime.scheduler import decode
from speccompile.runtime.sequences import SequenceBatch, TokenSequence
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.runtime.verifier import Verifier
from speccompile.speculators.hybrid import proposer as proposer_module
from speccompile.speculators.hybrid.choice import DrafterCosts, Offer
from speccompile.speculators.hybrid.config import HybridConfig, HybridMethod
from speccompile.speculators.hybrid.proposer import Drafter, HybridProposer, merge_trees
from speccompile.speculators.none.config import NoneProposer
from tests.lab.engines import Letters
from tests.mock_lm import MockEngine, MockLM
from tests.runtime import scheduler_lab
from tests.runtime.test_spec_engine import TARGET
from tests.speculators.distribution_check import LEAST, WARPS, decode_many, fit_p_value
from tests.speculators.feature_lm import FusedTarget, MockFeatureDraft, MockFusion
from tests.speculators.hidden_lm import MockHeads, MockTarget


class Scripted(NoneProposer):
    """Drafts so many tokens, all of one value, and notes what it is told.

    Args:
        token: of its drafts.
        num: draft tokens; of a drafter that foresees, by step.
        foreseen: accepted drafts that it expects.
    """

    def __init__(self, token, num, catches_up=True):
        self.token, self.num, self.told, self.catches_up = token, num, [], catches_up

    def start(self, slot, sequence):
        sequence.draft_state = f"{self.token}:{slot}"

    def propose(self, batch):
        nums = [min(sequence.max_drafts, self.num) for sequence in batch.sequences]
        self.told.append(("propose", nums))
        tokens = np.full((len(nums), 1 + max(nums)), self.token)
        tokens[:, 0] = [sequence.tokens[-1] for sequence in batch.sequences]
        return TokenTree.chain(tokens, 1 + np.array(nums))

    def commit(self, batch, tree, verdict, outputs):
        self.told.append(("commit", verdict.accepted))

    def skip(self, batch, verdict, outputs):
        self.told.append(("skip", verdict.accepted))

    def flush(self):
        self.told.append(("flush",))


class ForeseeingScript(Scripted):
    """See `Scripted`."""

    foreseen = (0.0,)
    offered = ()


def scripted(known, draft_ms, catches_up=True, slots=1, has_caches=True):
    """A hybrid of a drafter without a graph, which expects `known`, and one with runs of `draft_ms`; its batch."""
    free, costly = ForeseeingScript(7, 4), Scripted(8, 3, catches_up)
    free.foreseen = known
    context = MethodContext(slots, 64, 8, {"target": StepCosts(((1, 10.0), (9, 12.0)))})
    costs = DrafterCosts([StepCosts(((1, draft_ms), (64, 2 * draft_ms)))], has_caches=has_caches)
    hybrid = HybridProposer([Drafter(free, None), Drafter(costly, costs)], context)
    sequences = [SimpleNamespace(tokens=[1, 2, 3], max_drafts=9, grammar=None, sampling=None) for _ in range(slots)]
    for slot, sequence in enumerate(sequences):
        hybrid.start(slot, sequence)
    flags = {"is_forced": False, "is_greedy": True, "least_drafts": 0, "may_draw": True}
    return hybrid, free, costly, SimpleNamespace(sequences=sequences, **flags)


def decide(hybrid, batch, tree, accepted):
    """Tells a verdict, and appends its tokens."""
    nodes = max(accepted) + 1
    path = np.array([[*range(num + 1), *[-1] * (nodes - num - 1)] for num in accepted])
    hybrid.commit(batch, tree, Verdict(path, np.array(accepted), np.array([5] * len(accepted))), {})
    for sequence, row, num in zip(batch.sequences, tree.tokens.tolist(), accepted, strict=True):
        sequence.tokens += [*row[1 : num + 1], 5]


def test_the_drafter_that_runs_follows_expectation_and_cost():
    for known, draft_ms, taken in ((0.0, 1.0, 8), (3.5, 1.0, 7), (1.0, 1.0, 8), (1.0, 9.0, 7)):
        hybrid, free, costly, batch = scripted([known], draft_ms)
        tree = hybrid.propose(batch)
        assert set(tree.tokens[0, 1:].tolist()) == {taken}
        decide(hybrid, batch, tree, [2])
        assert free.told == [("propose", [4]), ("commit", [2])]
        ran = [("propose", [3]), ("commit", [2])]
        assert costly.told == (ran if taken == 8 else [("flush",), ("skip", [2])])
    hybrid, *_, batch = scripted([0.0], 100.0)
    assert hybrid.propose(batch).nodes == 1
    batch.is_forced = True
    assert hybrid.propose(batch).nodes == 4


def test_sequences_of_a_batch_have_different_drafters():
    hybrid, _, costly, batch = scripted([3.5, 0.0, 0.0], 1.0, slots=3)
    batch.sequences[2].max_drafts = 0
    tree = hybrid.propose(batch)
    assert tree.num_nodes.tolist() == [5, 4, 1] and tree.is_chain
    assert tree.tokens[:2].tolist() == [[3, 7, 7, 7, 7], [3, 8, 8, 8, 0]]
    assert costly.told[0] == ("propose", [0, 3, 0])
    decide(hybrid, batch, tree, [3, 1, 0])
    missed = [sequence.draft_state[1].num_missed for sequence in batch.sequences]
    assert missed == [2 + 4, 0, 2 + 1]
    assert batch.sequences[0].draft_state[1].draft_state == "8:0"


def test_acceptance_is_learned_by_drafter_and_sequence():
    hybrid, _, costly, batch = scripted([1.0], 0.5)
    for _ in range(200):
        tree = hybrid.propose(batch)
        decide(hybrid, batch, tree, [0] if tree.tokens[0, 1] == 8 else [1])
    assert hybrid.propose(batch).tokens[0, 1] == 7
    others = sum(told[0] == "skip" for told in costly.told)
    assert others > 100
    estimate = batch.sequences[0].draft_state[1].estimate
    for _ in range(3000):  # it is tried again
        estimate.learn_length(False, 0)
    assert hybrid.propose(batch).tokens[0, 1] == 8


@pytest.mark.parametrize(("has_caches", "taken"), [(True, 7), (False, 8)])
def test_what_a_drafter_missed_counts_where_it_has_caches_of_its_own(has_caches, taken):
    hybrid, _, _, batch = scripted([1.0], 1.0, has_caches=has_caches)
    assert hybrid.propose(batch).tokens[0, 1] == 8
    batch.sequences[0].draft_state[1].num_read = -800
    assert hybrid.propose(batch).tokens[0, 1] == taken


def test_drafts_are_found_in_the_text_where_a_drafter_runs_no_graph():
    hybrid, *_ = scripted([0.0], 1.0)
    assert hybrid.looks_up and not HybridProposer(hybrid.drafters[1:], MethodContext(1, 64, 8, {})).looks_up


def test_a_drafter_that_did_not_read_the_prompt_has_no_part():
    hybrid, _, costly, batch = scripted([0.0], 1.0, catches_up=False)
    assert hybrid.catches_up and hybrid.propose(batch).nodes == 1
    assert ("propose", [3]) not in costly.told
    hybrid.prefill(0, batch.sequences[0], np.zeros((1, 1), dtype=np.int64), 0, {})
    assert hybrid.propose(batch).nodes == 1
    hybrid.prefill(0, batch.sequences[0], np.zeros((1, 1), dtype=np.int64), 1, {})
    assert hybrid.propose(batch).nodes == 4


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_drafters_go_on_from_the_row_that_all_of_them_have(order):
    """One of them needs a row less than it is given, as features do, and another lacks many."""

    class Keeps(Scripted):
        def __init__(self, most, less):
            super().__init__(7, 1)
            self.most, self.less, self.rows = most, less, None

        def resume(self, slot, sequence, num_rows):
            self.rows = min(self.most, num_rows - self.less)
            return self.rows

    for pair, wanted in (((Keeps(99, 0), Keeps(99, 1)), 8), ((Keeps(4, 0), Keeps(99, 1)), 4), ((Keeps(99, 0),) * 2, 9)):
        drafters = [Drafter(pair[i], None) for i in order]
        hybrid = HybridProposer(drafters, MethodContext(1, 64, 8))
        sequence = SimpleNamespace(tokens=[1] * 12, max_drafts=9, grammar=None, sampling=None, has_draft=True)
        assert hybrid.resume(0, sequence, 9) == wanted
        assert {proposer.rows for proposer in pair} == {wanted}


def test_measured_times_are_each_drafters_own():
    hybrid, free, costly, batch = scripted([0.0], 1.0)
    seen = {}
    free.observe = lambda num_slots, num_nodes, times: seen.update(free=times)
    costly.observe = lambda num_slots, num_nodes, times: seen.update(costly=times)
    tree = hybrid.propose(batch)
    decide(hybrid, batch, tree, [0])
    hybrid._seconds = [0.001, 0.004]
    hybrid.observe(1, tree.nodes, StepTimes(0.006, 0.010, 0.020))
    assert seen["free"] == pytest.approx((0.001, 0.010, 0.015))
    assert seen["costly"] == pytest.approx((0.004, 0.010, 0.018))
    rests = []
    hybrid.drafters[1].costs.rest = rests.append
    hybrid.observe(1, 1, StepTimes(0.0, 0.010, 0.020))  # it did not run
    assert rests == [1]


def test_merged_trees_have_the_rows_that_were_picked():
    chain = TokenTree.chain(np.array([[1, 2, 3], [4, 5, 6]]), np.array([3, 2]))
    tree = TokenTree.tree([[1, 7, 8, 9], [4, 7, 8, 0]], [[-1, 0, 0, 1], [-1, 0, 1, -1]])
    assert merge_trees([chain, tree], [0, 0]) is chain
    mixed = merge_trees([chain, tree], [0, 1])
    assert mixed.is_chain and mixed.tokens.tolist() == [[1, 2, 3], [4, 7, 8]] and mixed.num_nodes.tolist() == [3, 3]
    mixed = merge_trees([chain, tree], [1, 0])
    assert not mixed.is_chain and mixed.tokens.tolist() == [[1, 7, 8, 9], [4, 5, 0, 0]]
    assert mixed.parents.tolist() == [[-1, 0, 0, 1], [-1, 0, -1, -1]]
    mixed.validate()


MOCK = MockLM(seed=5)
SECTIONS = {
    "chain": ({"method": "suffix", "depth": 4}, {"method": "draft_model", "model": "draft", "num_draft_tokens": 3}),
    "tree": (
        {"method": "suffix", "depth": 4, "tree": "auto"},
        {"method": "draft_model", "model": "draft", "tree": {"widths": [2, 1]}},
    ),
    "lookup": ({"method": "ngram"}, {"method": "draft_model", "model": "draft", "tree": "auto", "num_candidates": 4}),
}


def make(kind, slots, max_seq=64, model=MOCK):
    draft = MockEngine(model.blurred(6, 0.7), "draft", slots, max_seq, headroom=9)
    context = MethodContext(slots, max_seq, 8)
    return HybridMethod().make_proposer(HybridConfig(SECTIONS[kind]), {"draft": draft}, context), draft, context


@pytest.fixture
def by_lot(monkeypatch):
    """The choice is drawn by lot, so that drafters take turns all the time."""
    rng = random.Random(4)
    monkeypatch.setattr(proposer_module, "choose", lambda known, num, offers, scores: rng.randrange(-1, len(offers)))
    run = HybridProposer._run_costly

    def any_slot(self, index, offer, *rest):
        expected = [rng.choice((0.0, 99.0)) if more else 0.0 for more in offer.expected]
        if any(expected):
            run(self, index, Offer(expected, offer.num_drafts, offer.ms), *rest)

    monkeypatch.setattr(HybridProposer, "_run_costly", any_slot)


@pytest.mark.distribution
@pytest.mark.parametrize("kind", SECTIONS)
@pytest.mark.parametrize("heat", [(0.0, 0, 1.0), WARPS[0]])
def test_text_follows_the_targets_distribution(by_lot, kind, heat):
    proposer, _, _ = make(kind, 8)
    is_greedy = heat[0] == 0
    target = MockEngine(MOCK, "target", 8, 64, headroom=9)
    sequences = decode_many(target, proposer, heat, 40 if is_greedy else 700, 64, 6)
    assert sum(sequence.stats.num_draft_tokens for sequence in sequences) > len(sequences)
    if is_greedy:
        assert {tuple(sequence.tokens) for sequence in sequences} == {(3, 1, 4, *MOCK.greedy([3, 1, 4], 6))}
    else:
        assert fit_p_value(sequences, MOCK, heat) > LEAST


@pytest.mark.parametrize("kind", SECTIONS)
def test_the_draft_has_the_rows_of_a_prompt_that_was_read_anew(by_lot, kind):
    proposer, draft, _ = make(kind, 3)
    verifier = Verifier(MockEngine(MOCK, "target", 3, 64, headroom=9), 64, 5)
    rng, asked = np.random.default_rng(2), SamplingParams(max_new_tokens=25)
    waiting = [
        TokenSequence(i, rng.integers(0, 24, size=3 + 2 * i).tolist(), asked, frozenset(), None) for i in range(5)
    ]
    batch, num_checked, used = SequenceBatch(waiting, 3), 0, set()
    lengths = proposer.caches[0].lengths
    for _ in decode(verifier, proposer, batch):
        used |= set(proposer._picks)
        for slot, sequence in enumerate(batch.sequences):
            held = lengths[slot]
            assert draft.cache[slot, :held].tolist() == sequence.tokens[:held]
            num_checked += held > len(sequence.tokens) - 3
    assert used == {-1, 0, 1} and num_checked > 20


def heads_engine(slots=3, max_seq=64, chunk=7):
    """A suffix tree beside heads, which must have the state before the root whenever they draft."""
    context = MethodContext(slots, max_seq, 8)
    target = MockTarget(TARGET, slots, max_seq, headroom=9)
    heads = MockHeads(TARGET.blurred(22, 0.5), target, 3, slots)
    timed = {scheduler_lab.HEADS: heads}
    config = HybridConfig(({"method": "suffix", "depth": 4}, {"method": "mlp", "model": "heads"}))
    proposer = HybridMethod().make_proposer(config, timed, context)
    inner = proposer.drafters[1].proposer
    propose = inner.propose

    def checked(batch):
        before, tree = heads.num_runs, propose(batch)
        if heads.num_runs > before:
            able = [slot for slot, sequence in enumerate(batch.sequences) if sequence.max_drafts]
            for slot in inner.states.known(batch.sequences, able):
                assert heads.read[slot] == batch.sequences[slot].tokens
        return tree

    inner.propose = checked
    return SpecEngine(target, timed, proposer, Letters(), context, chunk=chunk)


def features_engine(slots=3, max_seq=80, chunk=7):
    """A suffix tree beside a drafter with rows of its own for the target's features."""
    context = MethodContext(slots, max_seq, 8)
    target = FusedTarget(TARGET, slots, max_seq, headroom=9)
    draft = MockFeatureDraft(TARGET.blurred(22, 0.5), target, slots, max_seq, 4)
    engines = {"draft": draft, "fusion": MockFusion(slots)}
    config = HybridConfig(({"method": "suffix", "depth": 4}, {"method": "eagle3", "model": "draft", "tree": "chain"}))
    return SpecEngine(target, engines, HybridMethod().make_proposer(config, engines, context), Letters(), context)


def pair_engine(slots=3, max_seq=64, chunk=7):
    proposer, draft, context = make("chain", slots, max_seq, TARGET)
    target = MockEngine(TARGET, "target", slots, max_seq, headroom=9)
    return SpecEngine(target, {"draft": draft}, proposer, Letters(), context, chunk=chunk)


@pytest.mark.parametrize("engine", [heads_engine, pair_engine])
def test_moving_sequences_keep_the_targets_text(by_lot, monkeypatch, engine):
    monkeypatch.setitem(scheduler_lab.ENGINES, "hybrid", engine)
    bench, prompts = scheduler_lab.Bench(kind="hybrid"), scheduler_lab.mixed_prompts()
    prompts += [[*prompts[0], 1, 2], prompts[2][:20], [*prompts[4], 3], [*prompts[6][:22], 4, 4]]
    scheduler_lab.check_moving(bench, prompts)
    for prompt in prompts[-3:]:  # turns of a chat, which go on in their own caches
        said, _ = bench.ask(prompt)
        asked = [*prompt, *said, 7]
        assert bench.ask(asked)[0] == TARGET.greedy(asked, 8)
    assert bench.scheduler.counters.num_prefix_hits > 1


def test_a_chat_goes_on_where_it_ended_while_nothing_is_drafted(monkeypatch):
    """A drafter of features, which cannot read it later, has no part then, and reads it all when it drafts again."""
    monkeypatch.setitem(scheduler_lab.ENGINES, "hybrid", features_engine)
    planner = FixedLength(0)
    bench, turn, reused = scheduler_lab.Bench(planner, kind="hybrid"), scheduler_lab.numbers(17), []
    for limit in (0, 0, None, None, 0, 0):
        planner.limit = limit
        said, stats = bench.ask(turn)
        assert said == TARGET.greedy(turn, 8)
        turn += said
        reused.append(stats["num_reused_tokens"])
    assert reused[:3] == [0, 23, 0] and 32 < reused[3] < 40 and reused[5] == 55  # all but the last token


DRAFT = {"method": "draft_model", "model": "d"}


@pytest.mark.parametrize(
    ("drafters", "where"),
    [
        ([DRAFT], r"drafters: got 1; expected a list of two"),
        ([DRAFT, DRAFT], r"drafters: got two drafters with a graph called draft"),
        ([DRAFT, {"depth": 3}], r"drafters\[1\]: got no method"),
        ([DRAFT, {"method": "sufix"}], r"drafters\[1\]\.method: got 'sufix'"),
        ([DRAFT, {"method": "suffix", "dept": 3}], r"drafters\[1\]\.dept: got an unknown key"),
        ([{"method": "draft_model"}, {"method": "suffix"}], r"drafters\[0\]: got no value; expected the key model"),
        ([DRAFT, {"method": "hybrid", "drafters": []}], r"drafters\[1\]\.method: got 'hybrid'"),
        ([DRAFT, {"method": "suffix", "depth": 1}], r"speculator\.depth: got 1"),
    ],
)
def test_wrong_lists_are_refused(drafters, where):
    with pytest.raises(RecipeError, match=where):
        HybridConfig(drafters)


def test_the_parts_are_asked_for_what_the_target_must_give():
    config = HybridConfig(({"method": "suffix"}, DRAFT, {"method": "mlp", "model": "h"}))
    assert [job.name for job in HybridMethod().graph_jobs(config)] == ["draft", "heads"]
    bounds = config.draft_bounds
    assert HybridMethod().target_outputs(config).hidden and bounds.is_open and not bounds.has_tree
    assert config.drafters[0]["depth"] == 24 and HybridConfig(config.drafters) == config
    layers = [{"method": "eagle3", "model": "e"}, {"method": "dflash", "model": "f"}]
    with pytest.raises(RecipeError, match=r"different layers|graph called"):
        HybridMethod().target_outputs(HybridConfig(layers))
