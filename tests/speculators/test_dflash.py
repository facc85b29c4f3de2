# SPDX-License-Identifier: Apache-2.0
"""Block drafters over mock engines: what the draft reads, walks and trees over the lattice, texts' distribution."""

from dataclasses import replace

import numpy as np
import pytest

from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.sampling import SamplingParams, warp
from speccompile.core.specs import (
    CANDIDATE_PROBS,
    CANDIDATES,
    FEATURE_NODES,
    FEATURES,
    HIDDEN,
    LENGTHS,
    NODE_PROBS,
    START_NODES,
    TEMPERATURE,
    TOKENS,
    TOP_P,
    GraphSpec,
    TensorSpec,
)
from speccompile.drafting.block_drafts import BlockCache, Lattice
from speccompile.drafting.budget import Budget
from speccompile.drafting.proposer import DraftProposer
from speccompile.errors import RecipeError
from speccompile.graph_kinds.blocks import (
    BASE_SCORES,
    CANDIDATE_ROWS,
    EMBEDDED,
    NEXT_STATES,
    PAIR_SCORES,
    PATH_SCORES,
    PATH_STATES,
    SLOT_TERMS,
)
from speccompile.runtime.control import FixedLength
from speccompile.runtime.loop import read_prompts, run_step
from speccompile.runtime.sequences import SequenceBatch, TokenSequence
from speccompile.runtime.verifier import Verifier
from speccompile.speculators.dflash.config import DflashConfig
from tests.lab.decoding import finished, num_accepted
from tests.mock_lm import VOCAB, FakeEngine, MockLM
from tests.speculators.distribution_check import LEAST, decode_many, fit_p_value
from tests.speculators.hidden_lm import WIDTH, MockTarget

TARGET = MockLM(seed=1)
DRAFT = TARGET.blurred(seed=2, blur=0.7)
ROWS, NODES, DRAFTS, NUM = 60, 10, 4, 5
NUM_TEXTS = 800
PROMPTS = [[3, 1, 4, 1, 5], [2, 7], [9], [8, 2, 8, 1, 8, 3, 3]]


class MockBlocks(FakeEngine):
    """A draft whose features are the numbers of the target's contexts: row t of a slot must be that of tokens 0 to t.

    Its lattice follows a language model, of which slots after the first see one token.
    """

    def __init__(self, target: MockTarget, max_slots: int, num_drafts: int = DRAFTS) -> None:
        outputs = (
            TensorSpec(CANDIDATES, ("batch", num_drafts, NUM), "int64"),
            TensorSpec(PAIR_SCORES, ("batch", num_drafts, NUM, NUM), "float32"),
        )
        inputs = (TensorSpec(FEATURES, ("batch", "states", WIDTH), "float32"),)
        self.spec = GraphSpec("draft", inputs, outputs, (), VOCAB, num_drafts=num_drafts, num_candidates=NUM)
        self.target, self.max_slots, self.num_runs = target, max_slots, 0
        self.rows = np.full((max_slots, ROWS + NODES + 1), -1)

    def run(self, feeds, first_slot=0):
        self.num_runs += 1
        features = np.asarray(feeds[FEATURES])
        assert set(feeds) == {TOKENS, LENGTHS, FEATURES, FEATURE_NODES, START_NODES}
        outputs = {t.name: np.zeros([len(features), *t.dims[1:]], t.dtype) for t in self.spec.outputs}
        for b, (root,) in enumerate(feeds[TOKENS].tolist()):
            start, last = int(feeds[LENGTHS][b]), int(feeds[START_NODES][b])
            held = self.rows[first_slot + b]
            held[start : start + last + 1] = features[b, feeds[FEATURE_NODES][b, : last + 1], 0]
            held[start + last + 1 : start + last + 2 + DRAFTS] = -2  # the block
            text = self._text(held[: start + last + 1])
            if text is not None:
                outputs[CANDIDATES][b], outputs[PAIR_SCORES][b] = self._lattice(np.append(text, root))
        return outputs

    def _text(self, numbers: np.ndarray) -> np.ndarray | None:
        """Returns the text of features, each of which must be that of its first tokens; None of an idle slot."""
        if numbers.min() < 0:
            return None
        contexts = [self.target.contexts[n] for n in numbers.tolist()]
        for t, context in enumerate(contexts):
            assert np.array_equal(context, contexts[-1][: t + 1]), "a row of another text, or of a draft"
        return contexts[-1]

    def _lattice(self, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        num_drafts = self.spec.num_drafts
        tokens, scores = np.zeros((num_drafts, NUM), np.int64), np.zeros((num_drafts, NUM, NUM), np.float32)
        row = DRAFT.logits(text)
        for i in range(num_drafts):
            best = np.argsort(-row, kind="stable")[:NUM]
            tokens[i] = np.sort(best)  # not the likeliest first
            scores[i] = row[tokens[i]] if i == 0 else DRAFT.last[tokens[i - 1]][:, tokens[i]]
            row = DRAFT.last[best[0]]
        return tokens, scores

    def reset(self, rows=1): ...

    def clear_slot(self, slot): ...

    def move_slot(self, source, dest, rows=None):
        self.rows[dest] = self.rows[source]

    def swap_slots(self, first, second, rows):
        self.rows[[first, second]] = self.rows[[second, first]]


class MockPaths(MockBlocks):
    """A draft whose slots after the first see the last two tokens of their path, by `MockStep`."""

    def __init__(self, target: MockTarget, max_slots: int) -> None:
        super().__init__(target, max_slots)
        outputs = (
            TensorSpec(PAIR_SCORES, ("batch", DRAFTS, 1, NUM), "float32"),
            TensorSpec(EMBEDDED, ("batch", 1 + (DRAFTS - 1) * NUM, VOCAB), "float32"),
            TensorSpec(SLOT_TERMS, ("batch", DRAFTS, 1), "float32"),
            TensorSpec(CANDIDATE_ROWS, ("batch", DRAFTS, NUM, 1), "float32"),
        )
        self.spec = replace(self.spec, outputs=(self.spec.output(CANDIDATES), *outputs))

    def run(self, feeds, first_slot=0):
        outputs = super().run(feeds, first_slot)
        tokens = outputs[CANDIDATES]
        path = np.concatenate((feeds[TOKENS], tokens[:, :-1].reshape(len(tokens), -1)), axis=1)
        outputs |= {EMBEDDED: np.eye(VOCAB, dtype=np.float32)[path], CANDIDATE_ROWS: tokens[..., None]}
        return outputs

    def _lattice(self, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return super()._lattice(text)[0], np.zeros((DRAFTS, 1, NUM), np.float32)


class MockStep:
    """The step over one token of each path: its state is the last two tokens, from 1 on."""

    def __init__(self) -> None:
        inputs = (TensorSpec(PATH_STATES, ("batch", "nodes", 2), "float32"),)
        self.spec, self.num_runs = GraphSpec("step", inputs, (), (), VOCAB), 0

    def run(self, feeds):
        self.num_runs += 1
        tokens, before = feeds[EMBEDDED].argmax(-1), feeds[PATH_STATES][..., 0].astype(np.int64)
        candidates = feeds[CANDIDATE_ROWS][..., 0].astype(np.int64)
        rows = DRAFT.last[tokens] + np.where(before[..., None] > 0, DRAFT.before[before - 1], 0.0)
        scores = feeds[BASE_SCORES][:, None] + np.stack(
            [row[:, own] for row, own in zip(rows, candidates, strict=True)]
        )
        return {NEXT_STATES: np.stack((tokens + 1, before), -1).astype(np.float32), PATH_SCORES: scores}


def make(slots=1, costs=None, *, has_path=False, **fields):
    target = MockTarget(TARGET, slots, ROWS, NODES + 1)
    engine = (MockPaths if has_path else MockBlocks)(target, slots)
    step = MockStep() if has_path else None
    cache = BlockCache(engine, lambda outputs: outputs[HIDDEN], (HIDDEN,), ROWS, NODES + 1, step)
    config, context = DflashConfig("d", **fields), MethodContext(slots, ROWS, NODES, costs or {})
    return target, DraftProposer(cache, *config.make_drafts(cache, engine, "draft", context, DRAFTS))


def run(proposer_of, params, prompts=PROMPTS, slots=2, **fields):
    target, proposer = proposer_of(slots, **fields)
    return finished(Verifier(target, ROWS), proposer, prompts, params, slots), proposer


FORMS = (
    {"tree": "chain"},
    {"tree": "chain", "num_draft_tokens": 2},
    {"tree": "auto", "tree_width": 3},
    {"tree": {"widths": [2, 2, 1]}},
    {"tree": {"widths": [2, 2]}, "drafts": "greedy"},
)


@pytest.mark.parametrize(("slots", "has_path"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_greedy_text_is_the_targets_and_the_cache_holds_accepted_positions_alone(form, slots, has_path):
    params = [SamplingParams(max_new_tokens=24 + i) for i in range(4)]
    done, proposer = run(make, params, slots=slots, has_path=has_path, **form)
    for sequence, prompt in zip(done, PROMPTS, strict=True):
        assert sequence.tokens[len(prompt) :] == TARGET.greedy(prompt, 24 + sequence.index)
    assert num_accepted(done) > 25
    # One run a step, whatever was drafted, and one for each prompt's rows before the last.
    num_steps, num_runs = sum(sum(s.stats.outcomes.values()) for s in done), proposer.rows.engine.num_runs
    assert num_runs <= num_steps + len(PROMPTS)
    assert not has_path or proposer.rows._step.num_runs <= DRAFTS * num_runs  # one for each depth, whatever its nodes


@pytest.mark.parametrize("form", FORMS[:4], ids=range(4))
def test_a_full_cache_ends_as_plain_decoding_does(form):
    done, _ = run(make, [SamplingParams(max_new_tokens=200)] * 4, slots=3, **form)
    for sequence, prompt in zip(done, PROMPTS, strict=True):
        text = TARGET.greedy(prompt, ROWS)
        assert sequence.tokens[len(prompt) :] == text[: len(sequence.tokens) - len(prompt)]
        assert len(sequence.tokens) >= ROWS


WALKS = [(0, (0.9, 4, 1.0), False), (3, (1.0, 0, 0.8), False), (3, (1.5, 3, 1.0), False)]


@pytest.mark.distribution
@pytest.mark.parametrize(("form", "heat", "has_path"), [*WALKS, (0, (0.9, 4, 1.0), True), (3, (1.5, 3, 1.0), True)])
def test_drawn_walks_keep_the_targets_distribution(form, heat, has_path):
    target, proposer = make(8, has_path=has_path, **FORMS[form])
    done = decode_many(target, proposer, heat, NUM_TEXTS, ROWS)
    assert fit_p_value(done, TARGET, heat) > LEAST
    assert num_accepted(done) > 200


@pytest.mark.distribution
def test_a_distribution_after_another_path_is_noticed():
    """Drafts drawn after their own paths, scored with the distribution after the first candidate alone."""
    heat = (1.0, 0, 1.0)
    target, proposer = make(8, has_path=True, tree="chain")
    propose = proposer.propose

    def mistaken(batch):
        tree, lattice = propose(batch), proposer.rows._lattice
        for node in range(2, tree.nodes if tree.draft_probs is not None else 0):
            embedded = np.eye(VOCAB, dtype=np.float32)[lattice.candidates[:, node - 2, :1]]
            _, scores = lattice._run(node - 1, embedded, np.zeros((tree.batch, 1, 2), np.float32))
            tree.draft_probs[:, node] = lattice._outputs(node - 1, scores, batch.warp_feeds())[NODE_PROBS][:, 0]
        return tree

    proposer.propose = mistaken
    assert fit_p_value(decode_many(target, proposer, heat, NUM_TEXTS, ROWS), TARGET, heat) < LEAST


@pytest.mark.distribution
def test_a_distribution_of_another_predecessor_is_noticed():
    """Drafts drawn after one token, scored with the distribution after the first candidate."""
    heat = (1.0, 0, 1.0)
    target, proposer = make(8, tree="chain")
    propose = proposer.propose

    def mistaken(batch):
        tree, lattice = propose(batch), proposer.rows._lattice
        for node in range(2, tree.nodes if tree.draft_probs is not None else 0):
            other = lattice.candidates[:, node - 2, :1]
            tree.draft_probs[:, node] = lattice.after(node - 1, other, batch.warp_feeds())[NODE_PROBS][:, 0]
        return tree

    proposer.propose = mistaken
    assert fit_p_value(decode_many(target, proposer, heat, NUM_TEXTS, ROWS), TARGET, heat) < LEAST


def test_the_lattice_gives_what_follows_each_token_best_first():
    rng = np.random.default_rng(3)
    tokens = np.stack([[rng.permutation(VOCAB)[:NUM] for _ in range(3)] for _ in range(2)])
    scores = rng.normal(size=(2, 3, NUM, NUM)).astype(np.float32)
    lattice = Lattice(tokens, scores, VOCAB)
    heat = {TEMPERATURE: np.array([0.7, 0.0], np.float32), TOP_P: np.array([0.8, 1.0], np.float32)}
    asked = np.array([[tokens[0, 1, 3], tokens[0, 1, 0]], [tokens[1, 1, 2], tokens[1, 1, 4]]])
    found = lattice.after(2, asked, heat)
    for slot, column, before in ((0, 0, 3), (0, 1, 0), (1, 0, 2), (1, 1, 4)):
        row = scores[slot, 2, before]
        order = np.argsort(-row)
        assert found[CANDIDATES][slot, column].tolist() == tokens[slot, 2, order].tolist()
        probs = np.exp(row[order]) / np.exp(row).sum()
        np.testing.assert_allclose(found[CANDIDATE_PROBS][slot, column], probs, rtol=1e-5)
        wide = np.full(VOCAB, -np.inf, np.float32)
        wide[tokens[slot, 2]] = row
        wanted = warp(wide[None], heat[TEMPERATURE][slot : slot + 1], [0], heat[TOP_P][slot : slot + 1])[0]
        np.testing.assert_allclose(found[NODE_PROBS][slot, column], wanted, atol=1e-6)
    assert lattice.after_roots({})[CANDIDATES].shape == (2, 1, NUM)
    assert NODE_PROBS not in lattice.after_roots({})


def test_slots_that_do_not_depend_on_one_another_have_one_row():
    tokens, scores = np.arange(6).reshape(1, 2, 3), np.array([[[[1.0, 3.0, 2.0]], [[0.0, 5.0, 9.0]]]], np.float32)
    lattice = Lattice(tokens, scores, VOCAB)
    for before in (0, 1, 2):
        assert lattice.after(1, np.array([[before]]), {})[CANDIDATES].tolist() == [[[5, 4, 3]]]


def test_one_run_is_paid_once():
    """The time of a run decides whether to draft, and not how deep."""
    costs = {"target": StepCosts(tuple((n, 10.0 + 0.1 * n) for n in range(1, 9))), "draft": StepCosts(((1, 4.0),))}
    once, often = (Budget(4, 4, 1, *costs.values(), num_runs=num) for num in (1, None))
    assert once.draws_on(0, 1.0, 0.5) and often.draws_on(0, 1.0, 0.5)
    assert not once.draws_on(0, 1.0, 0.3)
    assert once.draws_on(1, 1.5, 0.1) and not often.draws_on(1, 1.5, 0.1)
    assert once.draws_on(3, 2.0, 0.03) and not once.draws_on(4, 2.0, 0.9)


def test_a_bundle_built_for_less_is_refused():
    for fields, words in (
        ({"num_draft_tokens": 5, "tree": "chain"}, "got a draft built for 4 tokens; expected 5 on a path"),
        ({"tree": {"widths": [6]}}, "got a draft built for 5 candidates a slot; expected 6"),
        ({"tree": {"widths": [3, 3]}}, r"got 12 draft tokens; expected at most engine\.max_draft_nodes = 10"),
    ):
        with pytest.raises(RecipeError, match=words):
            make(**fields)


@pytest.mark.parametrize(("num_rows", "kept"), [(4, 4), (7, 7), (30, 7), (0, 0)])
def test_rows_beyond_the_prefix_are_not_kept(num_rows, kept):
    _, proposer = make(1, tree="chain")
    sequence = TokenSequence(0, list(PROMPTS[0]), SamplingParams(max_new_tokens=4), frozenset(), None)
    proposer.rows.lengths[0] = 7
    assert proposer.resume(0, sequence, num_rows) == kept == proposer.rows.lengths[0]


def test_a_sequence_decoded_plainly_catches_up():
    """Many pending rows are read in runs of their own before the next draft."""
    target, proposer = make(1, tree="chain")
    sequence = TokenSequence(0, list(PROMPTS[0]), SamplingParams(max_new_tokens=40), frozenset(), None)
    batch = SequenceBatch([sequence], 1)
    verifier = Verifier(target, ROWS)
    read_prompts(verifier, proposer, batch)
    for _ in range(16):
        run_step(verifier, proposer, batch, planner=FixedLength(0))
    runs = proposer.rows.engine.num_runs
    run_step(verifier, proposer, batch)
    assert proposer.rows.engine.num_runs == runs + 2 and proposer.rows.lengths[0] == len(PROMPTS[0]) + 16
    assert sequence.tokens[len(PROMPTS[0]) :] == TARGET.greedy(PROMPTS[0], len(sequence.tokens) - len(PROMPTS[0]))
