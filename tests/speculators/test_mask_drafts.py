# SPDX-License-Identifier: Apache-2.0
"""Drafts of one run over masks, with mock engines: what the draft reads, what stays in its cache, and the text."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.sampling import SamplingParams, warp
from speccompile.core.specs import LENGTHS, TOKENS
from speccompile.drafting.kv_cache import DraftCache
from speccompile.drafting.mask_drafts import MaskDraftCache
from speccompile.errors import RecipeError
from speccompile.graph_kinds.decoder import VocabCandidateOptions
from speccompile.runtime.scheduler import decode
from speccompile.runtime.sequences import SequenceBatch, TokenSequence
from speccompile.runtime.verifier import Verifier
from speccompile.speculators.draft_model.config import DraftModelConfig, DraftModelMethod
from tests.lab.decoding import greedy_batch, num_accepted
from tests.mock_lm import MockEngine, MockLM
from tests.speculators.distribution_check import LEAST, decode_many, fit_p_value

TARGET = MockLM(seed=11, sharpness=1.2)
DRAFT = TARGET.blurred(seed=12, blur=0.5)
MASK, MAX_SEQ, MAX_NODES = 777, 64, 8
HEAT = (0.9, 4, 1.0)


class MaskLM:
    """A draft trained with masks: after a text and n of them it knows what the model says n tokens later."""

    def __init__(self, model):
        self.model, self.vocab, self.known = model, model.vocab, {}

    def after(self, text):
        """Returns the logits after a text that ends in masks; refuses a mask inside it."""
        if text not in self.known:
            num = next(i for i, token in enumerate(reversed(text)) if token != MASK)
            prefix = list(text[: len(text) - num])
            assert MASK not in prefix, "a mask among the rows of text"
            self.known[text] = self.model.logits(np.array(prefix + self.model.greedy(prefix, num)))
        return self.known[text]

    def logits_of_nodes(self, cache, lengths, tokens, mask):
        rows = [
            [self.after((*cache[b, : lengths[b]].tolist(), *tokens[b][seen].tolist())) for seen in mask[b]]
            for b in range(len(tokens))
        ]
        return np.array(rows, dtype=np.float32)


class MaskEngine(MockEngine):
    """The draft; it also keeps the tokens and lengths that it was fed."""

    def __init__(self, slots, num_drafts, num_candidates=4):
        super().__init__(MaskLM(DRAFT), "draft", slots, MAX_SEQ, MAX_NODES + 1, num_candidates)
        self.spec = replace(self.spec, num_drafts=num_drafts, mask_token=MASK)
        self.read = []

    def run(self, feeds, first_slot=0):
        self.read.append((feeds[TOKENS].copy(), feeds[LENGTHS].copy()))
        return super().run(feeds, first_slot)


def make_proposer(slots=2, costs=None, built=5, **config):
    asked = DraftModelConfig("draft", **config)
    engine = MaskEngine(slots, built, asked.candidates_needed)
    context = MethodContext(slots, MAX_SEQ, MAX_NODES, costs or {})
    return DraftModelMethod().make_proposer(asked, {"draft": engine}, context)


def commit(proposer, batch, tree, num):
    """Accepts so many drafts of one sequence, and emits a token that is none of them."""
    verdict = SimpleNamespace(num_accepted=np.array([num]), path=np.arange(num + 1)[None])
    proposer.commit(batch, tree, verdict, {})
    batch.sequences[0].tokens += [*tree.tokens[0, 1 : num + 1].tolist(), 7]


@pytest.mark.parametrize("tree", ["chain", {"widths": [1, 1, 1, 1]}])
def test_one_run_reads_the_new_tokens_then_the_masks_and_gives_all_drafts(tree):
    proposer = make_proposer(num_draft_tokens=4, tree=tree)
    engine, batch = proposer.rows.engine, greedy_batch([1, 2, 3])
    proposer.start(0, batch.sequences[0])
    read = 0
    for num in (4, 0, 2, 4, 1):
        text = batch.sequences[0].tokens
        made = proposer.propose(batch)
        [(tokens, lengths)] = engine.read
        assert tokens.tolist() == [[*text[read:], MASK, MASK, MASK]] and lengths.tolist() == [read]
        assert made.tokens[0].tolist() == [text[-1], *DRAFT.greedy(text, 4)]
        read = len(text)  # rows of masks are not counted, whatever was accepted
        commit(proposer, batch, made, num)
        assert engine.cache[0, :read].tolist() == text[:read]
        engine.read.clear()


def test_slots_that_missed_different_numbers_of_tokens_have_masks_after_their_own_roots():
    proposer = make_proposer(num_draft_tokens=3)
    texts = ([5, 6, 7, 8, 9], [4, 2])
    batch = greedy_batch(*texts)
    for slot, sequence in enumerate(batch.sequences):
        proposer.start(slot, sequence)
    tree = proposer.propose(batch)
    [(tokens, _)] = proposer.rows.engine.read
    assert tokens.tolist() == [[5, 6, 7, 8, 9, MASK, MASK], [4, 2, MASK, MASK, 0, 0, 0]]
    for row, text in zip(tree.tokens.tolist(), texts, strict=True):
        assert row == [text[-1], *DRAFT.greedy(list(text), 3)]


def test_there_are_no_more_masks_than_the_longest_path_needs():
    proposer = make_proposer(num_draft_tokens=5)
    engine = proposer.rows.engine
    for max_drafts, num_masks in ((2, 1), (1, 0), (9, 4)):
        batch = greedy_batch([1, 2, 3], max_drafts=max_drafts)
        proposer.start(0, batch.sequences[0])
        assert proposer.propose(batch).num_nodes.tolist() == [min(max_drafts, 5) + 1]
        assert (engine.read.pop()[0] == MASK).sum() == num_masks


def test_a_tree_is_the_product_of_the_candidates_of_its_depths():
    proposer = make_proposer(tree={"widths": [2, 2]})
    batch = greedy_batch([3, 1, 4])
    proposer.start(0, batch.sequences[0])
    tree = proposer.propose(batch)
    [first, second] = [proposer.rows.engine.model.after((3, 1, 4, *[MASK] * n)).argsort()[::-1][:2] for n in (0, 1)]
    assert tree.tokens[0, 1:3].tolist() == first.tolist()
    assert tree.tokens[0, 3:].tolist() == second.tolist() * 2
    assert len(proposer.rows.engine.read) == 1


CASES = [{"num_draft_tokens": 5}, {"tree": "auto", "tree_depth": 4}, {"tree": {"widths": [2, 1, 1]}}, {}]


@pytest.mark.parametrize("config", CASES)
@pytest.mark.parametrize("num_slots", [1, 3])
def test_greedy_text_is_the_targets_own_to_the_last_row_of_the_cache(config, num_slots):
    verifier = Verifier(MockEngine(TARGET, "target", num_slots, MAX_SEQ, headroom=9), MAX_SEQ)
    prompts = [[1 + i, 3, i][: 1 + i % 3] for i in range(7)]
    asked = [SamplingParams(max_new_tokens=500 if i % 2 else 20 + i) for i in range(7)]
    waiting = [
        TokenSequence(i, list(p), a, frozenset(), None) for i, (p, a) in enumerate(zip(prompts, asked, strict=True))
    ]
    for _ in decode(verifier, make_proposer(num_slots, **config), SequenceBatch(waiting, num_slots)):
        pass
    for sequence, prompt in zip(waiting, prompts, strict=True):
        assert sequence.tokens == prompt + TARGET.greedy(prompt, len(sequence.tokens) - len(prompt))
    assert num_accepted(waiting) > 60
    assert max(len(sequence.tokens) for sequence in waiting) >= MAX_SEQ


@pytest.mark.parametrize("costs", [{"target": StepCosts(((1, 10.0), (16, 11.0))), "draft": StepCosts(((1, 0.1),))}])
def test_a_run_costs_as_many_rows_as_it_drafts_tokens(costs):
    drafts = make_proposer(costs=costs, num_draft_tokens="auto", max_draft_tokens=4).likeliest
    assert drafts.budget.runs_once and drafts.budget.max_depth == 4
    steep = {**costs, "draft": StepCosts(((1, 1.0), (2, 2.0), (16, 16.0)))}
    budget = make_proposer(costs=steep, num_draft_tokens="auto", max_draft_tokens=4).likeliest.budget
    assert budget.costs.draft_ms(1) == 4.0 and budget.costs.draft_ms(2) == 8.0


def test_the_recipe_decides_whether_there_are_masks_where_the_draft_knows_one():
    assert isinstance(make_proposer().rows, MaskDraftCache)
    plain = make_proposer(parallel_drafting=False).rows
    assert isinstance(plain, DraftCache) and not isinstance(plain, MaskDraftCache)
    jobs = [
        DraftModelMethod().graph_jobs(DraftModelConfig("d", 6, parallel_drafting=p))[0] for p in (True, "auto", False)
    ]
    found = [job.options.candidates for job in jobs]
    assert [(c.max_parallel, c.is_parallel) for c in found] == [(6, True), (6, False), (1, False)]
    assert found[0] == found[1] == found[2] == VocabCandidateOptions(1, True)  # what is built is in the spec


def test_a_draft_without_masks_or_with_too_few_is_refused():
    with pytest.raises(RecipeError, match="a draft built for 5 tokens; expected 6 on a path"):
        make_proposer(num_draft_tokens=6)
    config, context = DraftModelConfig("draft", parallel_drafting=True), MethodContext(1, MAX_SEQ, MAX_NODES)
    engines = {"draft": MockEngine(DRAFT, "draft", 1, MAX_SEQ)}
    with pytest.raises(RecipeError, match=r"parallel_drafting: got a draft built without a mask token"):
        DraftModelMethod().make_proposer(config, engines, context)


class KeepsMasks(MaskDraftCache):
    """A wrong cache: the rows of accepted drafts are taken for those of their tokens."""

    def commit(self, batch, num_kept, verdict, outputs):
        for slot, num in enumerate(verdict.num_accepted.tolist()):
            self.lengths[slot] += num


class ReadsNext(MaskDraftCache):
    """A wrong cache: a mask's row is taken for that of the mask after it."""

    def expand(self, batch, level):
        return self._depths.after(min(level.depth + 1, self.num_drafts - 1), level.scored_nodes.shape[1])


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", [KeepsMasks, ReadsNext])
def test_wrong_caches_are_noticed(monkeypatch, wrong):
    monkeypatch.setattr("speccompile.speculators.draft_model.config.MaskDraftCache", wrong)
    with pytest.raises(AssertionError):
        test_one_run_reads_the_new_tokens_then_the_masks_and_gives_all_drafts("chain")
    if wrong is KeepsMasks:
        with pytest.raises(AssertionError, match="a mask among the rows of text"):
            test_greedy_text_is_the_targets_own_to_the_last_row_of_the_cache({"num_draft_tokens": 5}, 1)


@pytest.mark.distribution
# Seeds are fixed; p < 1e-4 happens by chance once in ten thousand choices of them.
@pytest.mark.parametrize("config", [{"num_draft_tokens": 3}, {"tree": {"widths": [2, 1]}}])
def test_sampled_text_follows_the_targets_distribution(config):
    engine = MockEngine(TARGET, "target", 60, MAX_SEQ, headroom=9)
    done = decode_many(engine, make_proposer(60, **config), HEAT, 900, MAX_SEQ)
    assert fit_p_value(done, TARGET, HEAT) > LEAST
    assert num_accepted(done) > 100


def test_each_drawn_draft_has_the_distribution_of_its_own_row():
    proposer = make_proposer(1, num_draft_tokens=3)
    batch = SequenceBatch([], 1)
    batch.sequences = [TokenSequence(0, [4, 5], SamplingParams(temperature=0.8, top_k=5, seed=3), frozenset(), None)]
    batch.changed()
    batch.sequences[0].plan(MAX_SEQ)
    proposer.start(0, batch.sequences[0])
    tree = proposer.propose(batch)
    for depth in (1, 2, 3):
        logits = proposer.rows.engine.model.after((4, 5, *[MASK] * (depth - 1)))
        wanted = warp(logits[None, None], [0.8], [5], [1.0])[0, 0]
        np.testing.assert_allclose(tree.draft_probs[0, depth], wanted, rtol=1e-6)
