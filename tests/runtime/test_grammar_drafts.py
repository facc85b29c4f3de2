# SPDX-License-Identifier: Apache-2.0
"""Drafts within a grammar: none is scored that it refuses, forced tokens are drafts, and texts stay exact."""

import itertools
import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from speccompile.core.jobs import MethodContext
from speccompile.core.sampling import SamplingParams, draw
from speccompile.core.sampling_params import StructuredOutputs
from speccompile.core.specs import CANDIDATE_PROBS, CANDIDATES, NODE_PROBS
from speccompile.core.tree import TokenTree
from speccompile.drafting import grammars as drafting
from speccompile.drafting import static_tree
from speccompile.drafting.heads import add_products
from speccompile.drafting.tree import DraftTrees
from speccompile.runtime import loop
from speccompile.runtime.grammars import Grammars
from speccompile.runtime.sequences import SequenceBatch, TokenSequence
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.speculators.none.config import NoneProposer
from tests.lab.engines import mock_engine, mock_proposer
from tests.mock_lm import MockLM
from tests.runtime import grammar_lab
from tests.runtime.test_logits_processors import RIGHT, WRONG, kept_warps, naive_dist  # noqa: F401

pytest.importorskip("llguidance")
TOKENS = ["", "a", "b", "c", "ab", "bc"]  # 0 ends the text
# After "a" only "bc" may follow: of the two ways to write it, llguidance allows the tokenizer's, one token.
WORDS = ["abca", "abcb", "bcab", "bcac", "caab", "c", "cb", "caca"]
VOCAB, LENGTH, PROMPT, NUM = len(TOKENS), 3, [2], 600  # a longer prompt would give the first token without drafts
PARAMS = SamplingParams(LENGTH, temperature=0.9, top_k=4, top_p=0.9, frequency_penalty=0.3, ignore_eos=True)
WARM = SamplingParams(LENGTH, temperature=1.3, ignore_eos=True)


class SixTokens:
    """The vocabulary of these tests."""

    eos_token_id, bos_token_id, special_token_ids = 0, None, [0]
    tokens = [b"</s>", *(token.encode() for token in TOKENS[1:])]  # noqa: RUF012

    def __call__(self, text):
        left, ids = text if isinstance(text, str) else bytes(text).decode(), []
        while left:
            size = next(n for n in (2, 1) if left[:n] in TOKENS)
            ids.append(TOKENS.index(left[:size]))
            left = left[size:]
        return ids


GRAMMARS, JSON = Grammars(SixTokens(), VOCAB, [0]), grammar_lab.make_grammars()
CONSTRAINT = StructuredOutputs(choice=tuple(WORDS))
TARGET = MockLM(4, vocab=VOCAB, sharpness=1.0)
DRAFT = TARGET.blurred(9, 1.2)


def allowed_after(path: tuple[int, ...]) -> list[bool]:
    """Returns by token whether it may follow, from the list of words alone."""
    if 0 in path:
        return [True] + [False] * (VOCAB - 1)
    text = "".join(TOKENS[t] for t in path)
    if text == "a":
        return [t == "bc" for t in TOKENS]
    return [text in WORDS, *(any(word.startswith(text + t) for word in WORDS) for t in TOKENS[1:])]


def exact_joint(params: SamplingParams) -> np.ndarray:
    """Returns [VOCAB ** LENGTH]: the restricted and renormalised distribution of the texts."""
    joint = np.zeros((VOCAB,) * LENGTH)
    for text in product(range(VOCAB), repeat=LENGTH):
        mass = 1.0
        for at, token in enumerate(text):
            mask = allowed_after(text[:at])
            if not mask[token]:
                mass = 0.0
                break
            row = np.where(mask, TARGET.logits(np.array([*PROMPT, *text[:at]])), -np.inf)
            mass *= naive_dist(row, PROMPT, list(text[:at]), params)[token]
        joint[text] = mass
    assert joint.sum() == pytest.approx(1)
    return joint.reshape(-1)


def judge(texts: list[list[int]], params: SamplingParams) -> tuple[float, float, float]:
    """Returns the total variation, what it stays below with probability 0.9999, and chi-square's p."""
    from scipy import stats

    joint = exact_joint(params)
    found = np.bincount(np.array(texts) @ VOCAB ** np.arange(LENGTH - 1, -1, -1), minlength=len(joint))
    bound = 0.5 * np.sqrt(joint * (1 - joint) / len(texts)).sum() + math.sqrt(math.log(1e4) / 2 / len(texts))
    far, expected = float(np.abs(found / len(texts) - joint).sum() / 2), joint * len(texts)
    if found[expected == 0].any():
        return far, float(bound), 0.0
    rare = expected < 5
    seen, wanted = np.append(found[~rare], found[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    return far, float(bound), float(stats.chisquare(seen[wanted > 0], wanted[wanted > 0]).pvalue)


class OneRun(NoneProposer):
    """Chains of three as one run of a graph draws them: by its own distributions, which no grammar has masked."""

    may_draw = True

    def propose(self, batch):
        rows = []
        for slot, sequence in enumerate(batch.sequences):
            tokens, dists = list(sequence.tokens), []
            for depth in range(1, 4):
                logits = DRAFT.logits(np.array(tokens)).astype(np.float64)
                dists.append(np.float32(np.exp(logits) / np.exp(logits).sum()))
                tokens.append(int(draw(dists[-1], batch.draft_uniforms(depth)[slot, 0])))
            rows.append((tokens[-4:], [np.zeros(VOCAB, np.float32), *dists]))
        nums = np.array([1 + min(3, sequence.max_drafts) for sequence in batch.sequences])
        tree = TokenTree.chain(np.array([row for row, _ in rows]), nums, np.array([dists for _, dists in rows]))
        return drafting.drawn_chains_with_forced(batch, tree)


KINDS = {
    "chain": {"num_draft_tokens": 3},
    "tree": {"tree": {"widths": [2, 1]}},
    "raced chain": {"num_draft_tokens": 3, "drafts": "greedy"},
    "raced tree": {"tree": "auto", "drafts": "greedy", "num_candidates": 2},
    "one run": None,
}


def make_engine(kind: str, slots: int = 100) -> SpecEngine:
    name, config = ("none", {}) if KINDS[kind] is None else ("draft_model", KINDS[kind])
    sizes = {"slots": slots, "max_seq": 16, "nodes": 6, "headroom": 7, "candidates": 2}
    engine = mock_engine(TARGET, DRAFT, name, eos=[0], **sizes, **config)
    if kind == "one run":
        engine.proposer = OneRun()
    engine.grammars = GRAMMARS
    return engine


def texts_of(kind: str, params: SamplingParams, num: int = NUM) -> tuple[list[list[int]], int]:
    """Returns texts with as many seeds, and how many drafts were kept in all of them."""
    asked = [replace(params, seed=seed, structured_outputs=CONSTRAINT) for seed in range(num)]
    results = make_engine(kind).generate([PROMPT] * num, asked)
    return [r.tokens for r in results], sum(r.stats["num_accepted"] for r in results)


@pytest.mark.distribution
@pytest.mark.usefixtures("kept_warps")
@pytest.mark.parametrize(("kind", "params"), [*((kind, PARAMS) for kind in KINDS), ("chain", WARM), ("tree", WARM)])
def test_texts_follow_the_restricted_distribution(kind, params):
    texts, num_accepted = texts_of(kind, params)
    far, bound, p = judge(texts, params)
    assert far < bound and p > RIGHT
    assert num_accepted > 0.3 * NUM


@pytest.mark.distribution
@pytest.mark.usefixtures("kept_warps")
def test_drafts_that_are_masked_are_kept_more_often(monkeypatch):
    masked = {kind: texts_of(kind, PARAMS, 300)[1] for kind in ("chain", "tree")}
    monkeypatch.setattr(static_tree, "restrict", lambda batch, paths, outputs: outputs)
    for kind, num in masked.items():
        texts, num_accepted = texts_of(kind, PARAMS, 300)
        far, bound, _ = judge(texts, PARAMS)
        assert far < bound and num > 1.2 * num_accepted, kind


def _cut_with_the_refused(batch, tree, is_drawn, right=loop.chains_within):
    return right(batch, tree, is_drawn=False)


class _Unmasked:
    """Draws from masked distributions, and verifies with what they were before the mask."""

    def __init__(self):
        self.before = {}

    def restrict(self, batch, paths, outputs, right=static_tree.restrict):
        made = right(batch, paths, outputs)
        for masked, row in zip(
            made[NODE_PROBS].reshape(-1, VOCAB), outputs[NODE_PROBS].reshape(-1, VOCAB), strict=True
        ):
            self.before[masked.tobytes()] = row.copy()
        return made

    def draw(self, drafts, level, depth, slots, node_probs, right=static_tree._Drafts._draw):
        right(drafts, level, depth, slots, node_probs)
        for slot, (column, (_, children, _)) in itertools.product(slots, enumerate(level)):
            drafts.probs[slot, children] = self.before[node_probs[slot, column].tobytes()]


UNMASKED = _Unmasked()
MUTANTS = {
    "the refused draft is cut off as well": ("one run", {(loop, "chains_within"): _cut_with_the_refused}),
    "verified with the distribution before the mask": (
        "chain",
        {
            (static_tree, "restrict"): UNMASKED.restrict,
            (static_tree._Drafts, "_draw"): lambda *args: UNMASKED.draw(*args),
        },
    ),
}


@pytest.mark.mutant
@pytest.mark.usefixtures("kept_warps")
@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_cuts_are_noticed(name, monkeypatch):
    kind, patches = MUTANTS[name]
    for (owner, attribute), wrong in patches.items():
        monkeypatch.setattr(owner, attribute, wrong)
    far, bound, p = judge(texts_of(kind, WARM, 2 * NUM)[0], WARM)
    assert far > bound and p < WRONG


def sequence_of(constraint: StructuredOutputs, text: str = "", **sampling) -> SimpleNamespace:
    grammar = GRAMMARS.matcher(constraint, [])
    grammar.read([TOKENS.index(t) for t in text.split()])
    return SimpleNamespace(grammar=grammar, sampling=SamplingParams(**sampling), tokens=[1], max_drafts=9)


def outputs_of(tokens, sure, probs=None):
    made = {CANDIDATES: np.array([[tokens]]), CANDIDATE_PROBS: np.array([[sure]], np.float32)}
    return made if probs is None else {**made, NODE_PROBS: np.array([[probs]], np.float32)}


def restricted(sequence, path, outputs):
    given = {name: value.copy() for name, value in outputs.items()}
    made = drafting.restrict(SimpleNamespace(sequences=[sequence]), [[path]], outputs)
    for name, value in given.items():
        np.testing.assert_array_equal(outputs[name], value)  # an engine's own arrays
    return [np.round(made[name][0, 0], 6).tolist() for name in made]


def test_candidates_that_are_refused_come_last_and_have_no_probability():
    free = StructuredOutputs(choice=("ac", "bc", "c"))
    sequence = sequence_of(free)
    tokens, sure = restricted(sequence, [], outputs_of([0, 2, 4, 3], [0.4, 0.3, 0.2, 0.06]))
    assert tokens == [2, 3, -1, -1] and sure == pytest.approx([0.75, 0.15, 0, 0], abs=1e-5)
    assert restricted(sequence, [1], outputs_of([2, 0], [0.5, 0.2])) == [[3, -1], [1, 0]]  # one may follow
    assert restricted(sequence, [1, 1], outputs_of([3, 0], [0.5, 0.2])) == [[-1, -1], [0, 0]]  # nothing is known to
    assert restricted(sequence, [], outputs_of([9, 2], [0.5, 0.2]))[0] == [2, -1]  # beyond the vocabulary
    sequence.grammar = None
    outputs = outputs_of([9, 2], [0.5, 0.2])
    assert drafting.restrict(SimpleNamespace(sequences=[sequence]), [[[]]], outputs) is outputs


def test_distributions_are_masked_before_top_k_and_top_p():
    probs = [0.4, 0.3, 0.1, 0.1, 0.05, 0.05]
    for given, wanted in (
        ({}, [0, 0.6, 0.2, 0, 0.1, 0.1]),
        ({"top_k": 2}, [0, 0.75, 0.25, 0, 0, 0]),
        ({"top_p": 0.5}, [0, 1, 0, 0, 0, 0]),
    ):
        sequence = sequence_of(StructuredOutputs(regex="[ab].*"), temperature=1.0, **given)
        tokens, sure, dist = restricted(sequence, [], outputs_of([0, 1, 2], [0.4, 0.3, 0.1], probs))
        assert dist == pytest.approx(wanted, abs=1e-6)
        assert tokens[0] == 1 and sure[0] == pytest.approx(wanted[1], abs=1e-6)
    nothing = restricted(sequence, [], outputs_of([0], [1.0], [1, 0, 0, 0, 0, 0]))
    assert nothing == [[-1], [0], [0] * 6]


def test_the_only_token_that_may_follow_is_the_draft():
    sequence = sequence_of(CONSTRAINT, "a")
    assert sequence.grammar.forced() == [5]
    given = outputs_of([2, 1], [0.9, 0.1], [0, 0.1, 0.9, 0, 0, 0])
    assert restricted(sequence, [], given) == [[5, -1], [1, 0], [0, 0, 0, 0, 0, 1]]


@pytest.mark.parametrize("seed", range(3))
def test_forced_tokens_are_each_the_only_one(seed):
    rng, seen = np.random.default_rng(seed), 0
    for schema in grammar_lab.SCHEMAS[seed::6]:
        matcher, text = JSON.matcher(StructuredOutputs(json=schema), []), list[int]()
        for _ in range(40):
            forced = matcher.forced()
            for at, token in enumerate(forced):
                assert np.flatnonzero(matcher.allowed(forced[:at])).tolist() == [token]
            seen += len(forced)
            allowed = np.flatnonzero(matcher.allowed([]))
            text.append(int(allowed[rng.integers(len(allowed))]))
            matcher.read(text)
    assert seen > 20


def test_a_tree_of_heads_has_what_the_grammar_allows():
    sequence = sequence_of(CONSTRAINT)
    rows = [[0, 3, 1], [1, 5, 2], [1, 2, 3]], [[0.6, 0.3, 0.1]] * 3
    trees, tokens, probs = DraftTrees([0], 90), np.array([rows[0]]), np.array([rows[1]])
    drafting.force_candidates(sequence.grammar, tokens[0], probs[0])
    add_products(SimpleNamespace(sequences=[sequence]), trees, [9], tokens, probs, 30)
    paths = {tuple(trees.path(0, node)) for node in trees.best(90)[1][0][1:]}
    every = [path for length in range(1, 4) for path in product(*rows[0][:length])]
    assert paths == {path for path in every if all(allowed_after(path[:at])[t] for at, t in enumerate(path))}
    assert (1, 5, 1) in paths and (0,) not in paths
    drafts, parents = drafting.drafts_within(sequence.grammar, [1, 0, 5, 1, 2, 9], [0, 0, 1, 2, 3, 1])
    assert (drafts, parents) == ([0, 2, 4], [0, 1, 2])
    shape = TokenTree.tree([[7, 1, 0, 5, 1, 2]], [[-1, 0, 0, 1, 2, 3]])
    kept = drafting.tree_within(SimpleNamespace(sequences=[sequence]), shape)
    assert (kept.tokens.tolist(), kept.parents.tolist()) == ([[7, 1, 5, 2]], [[-1, 0, 1, 2]])


def test_forced_tokens_come_before_a_chains_own_and_in_place_of_a_lookups():
    sequence = sequence_of(CONSTRAINT, "a")
    assert drafting.chain_with_forced(sequence.grammar, [2, 3, 1], [0.5] * 3) == ([5, 3, 1], [1.0, 0.5, 0.5])
    candidates, confidences = np.array([[2, 5], [3, 1]]), np.array([[0.7, 0.2]] * 2)
    drafting.force_candidates(sequence.grammar, candidates, confidences)
    assert candidates.tolist() == [[5, -1], [3, 1]] and confidences.tolist() == [[1.0, 0.0], [0.7, 0.2]]
    proposer = mock_proposer("suffix", None, MethodContext(1, 32, 6))
    proposer.start(0, sequence)
    batch = SimpleNamespace(sequences=[sequence], is_forced=False, least_drafts=0)
    assert proposer.propose(batch).tokens.tolist() == [[1, 5]]
    sequence.max_drafts = 0
    assert proposer.propose(batch).tokens.tolist() == [[1]]


LONG = StructuredOutputs(choice=("c" * 12,))  # every token is forced


@pytest.mark.parametrize(
    ("max_new", "max_seq", "max_forced", "num"),
    [(4, 32, 9, 3), (1, 32, 9, 0), (20, 8, 9, 6), (20, 32, 5, 5), (9, 32, 0, 0)],
)
def test_forced_chains_end_with_the_text_the_cache_and_the_nodes(max_new, max_seq, max_forced, num):
    sequence = TokenSequence(0, [1, 2], SamplingParams(max_new, structured_outputs=LONG), frozenset(), None)
    sequence.grammar = GRAMMARS.matcher(LONG, [])
    sequence.plan(max_seq)
    batch = SequenceBatch([], 1, is_invariant=True, max_forced=max_forced)
    batch.sequences = [sequence]
    batch.changed()
    assert len(sequence.grammar.forced()) > 9
    tree = loop.forced_chains(batch)
    assert (0 if tree is None else tree.nodes - 1) == num
    sequence.speculation = "off"
    assert loop.forced_chains(batch) is None


def test_the_warp_of_drafts_leaves_what_a_grammar_masks_first_to_the_mask():
    """Top-k and top-p of a sequence with a grammar come after its mask; those of the others are fed as they are."""
    params = [
        SamplingParams(9, temperature=0.7, top_k=3, top_p=0.9),
        SamplingParams(9, temperature=0.5, top_k=2, top_p=0.8, structured_outputs=CONSTRAINT),
        SamplingParams(9, structured_outputs=CONSTRAINT),
        SamplingParams(9),
    ]
    batch = SequenceBatch([], 4)
    batch.sequences = [TokenSequence(i, [1], p, frozenset(), None) for i, p in enumerate(params)]
    for sequence in batch.sequences[1:3]:
        sequence.grammar = GRAMMARS.matcher(CONSTRAINT, [])
    batch.changed()
    fed, own = drafting.draft_warp(batch), {name: part.copy() for name, part in batch.warp_feeds().items()}
    assert fed["temperature"].tolist() == pytest.approx([0.7, 0.5, 1.0, 0.0])
    assert fed["top_k"].tolist() == [3, 0, 0, own["top_k"][3]]
    assert fed["top_p"].tolist() == pytest.approx([0.9, 1.0, 1.0, own["top_p"][3]])
    assert own["top_k"][1] == 2  # the target's own
    for name, part in own.items():
        np.testing.assert_array_equal(batch.warp_feeds()[name], part)


def test_forced_tokens_of_some_sequences_stand_before_the_drafts_of_the_method():
    engine = make_engine("raced chain", 2)
    asked = SamplingParams(6, structured_outputs=CONSTRAINT)
    waiting = [engine.make_sequence(0, [1, 2], asked, False), engine.make_sequence(1, [1, 2], asked, False)]
    waiting[0].tokens.append(1)
    batch = SequenceBatch([], 2, is_invariant=True, max_forced=6)
    batch.sequences = waiting
    batch.changed()
    for slot, sequence in enumerate(waiting):
        engine.proposer.start(slot, sequence)
        sequence.plan(16)
    loop.read_grammars(batch)
    assert loop.forced_chains(batch) is None  # the other one has none
    tree = engine.proposer.propose(batch)
    assert tree.tokens[0, 1] == 5 and tree.num_nodes[0] > 2


def test_chains_of_any_proposer_are_cut():
    grammar = GRAMMARS.matcher(CONSTRAINT, [])
    batch = SequenceBatch([], 1)
    batch.sequences = [TokenSequence(0, [1], SamplingParams(temperature=1.0), frozenset(), None)]
    batch.sequences[0].grammar = grammar
    batch.changed()
    probs = np.zeros((1, 4, VOCAB), np.float32)
    tokens = np.array([[1, 3, 0, 2]])
    assert loop.within_grammars(batch, TokenTree.chain(tokens)).num_nodes.tolist() == [3]
    right = TokenTree.chain(np.array([[1, 3, 1, 3]]))
    assert loop.within_grammars(batch, right) is right
    for first, drawn, cut in ((0, 2, 1), (3, 4, 4)):  # the refused one stays where drafts are drawn
        tokens[0, 1:] = [first, 0, 0]
        made = [loop.within_grammars(batch, TokenTree.chain(tokens, None, p)) for p in (probs, None)]
        assert [tree.num_nodes.tolist() for tree in made] == [[drawn], [cut]]
