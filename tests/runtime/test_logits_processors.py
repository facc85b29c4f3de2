# SPDX-License-Identifier: Apache-2.0
"""Distributions that depend on the tokens before, against transformers, by hand, and through the acceptance rule."""

import math
from dataclasses import replace

import numpy as np
import pytest

from speccompile.core.sampling import SamplingParams, tree_uniforms
from speccompile.core.tree import Verdict
from speccompile.errors import RuntimeFault
from speccompile.runtime import logits_processors as processors
from speccompile.runtime.host_verify import verify_on_host
from speccompile.runtime.logits_processors import LogitsProcessor, TreeProbs
from speccompile.runtime.sequences import TokenSequence
from tests.core.distribution_lab import CHAIN, NUM_TOKENS, PROMPT, TREE, VOCAB, p_value, propose, tables

BATCH, FEW = 3000, 800  # FEW are enough for what is wrong: p is 4e-69 at most
RIGHT, WRONG = 1e-3, 1e-6  # p-values; the draws are seeded, so neither bound is a matter of luck
ALL = SamplingParams(
    temperature=0.9,
    top_k=4,
    top_p=0.95,
    min_p=0.1,
    repetition_penalty=1.4,
    presence_penalty=0.5,
    frequency_penalty=0.7,
    logit_bias={3: 0.8, 0: -0.5},
)
HOT = SamplingParams(temperature=1.3, min_p=0.15, frequency_penalty=-0.9, repetition_penalty=0.8)


def naive_dist(row: np.ndarray, prompt: list[int], text: list[int], params: SamplingParams) -> list[float]:
    """Returns the distribution after `prompt + text`, computed token by token."""
    logits = [float(v) for v in row]
    for token, bias in dict(params.logit_bias).items():
        logits[token] += bias
    for token in set(prompt + text):
        factor = 1 / params.repetition_penalty if logits[token] > 0 else params.repetition_penalty
        logits[token] *= factor
    for token in set(text):
        logits[token] -= params.frequency_penalty * text.count(token) + params.presence_penalty
    heated = [v / params.temperature for v in logits]
    if params.top_k:
        last = sorted(heated, reverse=True)[params.top_k - 1]
        heated = [v if v >= last else -math.inf for v in heated]
    weights = [math.exp(v - max(heated)) for v in heated]
    probs = [w / sum(weights) for w in weights]
    mass, kept = 0.0, [0.0] * len(probs)
    for token in sorted(range(len(probs)), key=lambda t: -probs[t]):
        kept[token] = probs[token] if mass < params.top_p else 0.0
        mass += probs[token]
    kept = [p if p >= params.min_p * max(kept) else 0.0 for p in kept]
    return [p / sum(kept) for p in kept]


@pytest.fixture
def kept_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes each warp and each distribution without a grammar once, for requests that differ in their seeds alone.

    Thousands of sequences have the few texts and rows of a tiny vocabulary, and most of the time is here.
    """
    kept: dict[tuple[bytes, ...], np.ndarray] = {}
    dists: dict[tuple[bytes, ...], np.ndarray] = {}

    def warp(*arrays: np.ndarray) -> np.ndarray:
        key = tuple(np.asarray(array).tobytes() for array in arrays)
        if key not in kept:
            kept[key] = WARP(*arrays)
        return kept[key].copy()

    def probs(processor: LogitsProcessor, logits: np.ndarray, path: list[int]) -> np.ndarray:
        if processor._grammar is not None:
            return PROBS(processor, logits, path)
        key = (processor._seen.tobytes(), processor._counts.tobytes(), logits.tobytes(), bytes(path))
        if key not in dists:
            dists[key] = PROBS(processor, logits, path)
        return dists[key].copy()

    monkeypatch.setattr(processors, "warp", warp)
    monkeypatch.setattr(LogitsProcessor, "probs", probs)


WARP, PROBS = processors.warp, LogitsProcessor.probs


def exact_joint(params: SamplingParams) -> np.ndarray:
    """Returns [VOCAB ** NUM_TOKENS] float64: the distribution of the text after PROMPT, by enumeration."""
    joint = np.ones((VOCAB,) * NUM_TOKENS)
    for text in np.ndindex(*joint.shape):
        tokens = [*PROMPT, *map(int, text)]
        for at, token in enumerate(text):
            end = len(PROMPT) + at
            row = tables()[0][tokens[end - 2], tokens[end - 1]]
            joint[text] *= naive_dist(row, list(PROMPT), tokens[len(PROMPT) : end], params)[token]
    return joint.reshape(-1)


def emit(form: tuple[int, ...], sampled: bool, params: SamplingParams, batch: int, grammar=lambda: None) -> np.ndarray:
    """Returns [batch, NUM_TOKENS]: what drafting and verification emit after PROMPT."""
    sequences = [TokenSequence(i, list(PROMPT), replace(params, seed=i), frozenset(), None) for i in range(batch)]
    for sequence in sequences:
        sequence.grammar = grammar()
    while todo := [sequence for sequence in sequences if len(sequence.tokens) < len(PROMPT) + NUM_TOKENS]:
        ends = np.array([sequence.tokens[-2:] for sequence in todo])
        last = np.array([len(sequence.tokens) - 1 for sequence in todo])
        seeds = np.array([sequence.sampling.seed for sequence in todo], dtype=np.uint64)
        tree, contexts = propose(form, ends[:, 0], ends[:, 1], seeds, last, sampled)
        logits, draws = tables()[0][contexts[..., 0], contexts[..., 1]], tree_uniforms(seeds, last, tree)
        graph = Verdict(np.zeros_like(tree.tokens), np.zeros(len(todo), np.int64), np.zeros(len(todo), np.int64))
        verdict = verify_on_host(graph, tree, todo, range(len(todo)), logits, draws, tree.draft_probs)
        for slot, sequence in enumerate(todo):
            sequence.tokens += [*tree.tokens_on(slot, verdict.path[slot, 1:]), int(verdict.next_token[slot])]
    return np.array([sequence.tokens[len(PROMPT) : len(PROMPT) + NUM_TOKENS] for sequence in sequences])


@pytest.mark.distribution
@pytest.mark.usefixtures("kept_warps")
@pytest.mark.parametrize("params", [ALL, HOT], ids=["all", "hot"])
@pytest.mark.parametrize(
    ("form", "sampled"),
    [((-1,), False), (CHAIN, True), (TREE, True), (TREE, False)],
    ids=["plain", "chain", "tree", "top"],
)
def test_emitted_tokens_follow_the_exact_distribution(form, sampled, params):
    assert p_value(emit(form, sampled, params, BATCH), exact_joint(params)) > RIGHT


@pytest.mark.distribution
@pytest.mark.usefixtures("kept_warps")
def test_deterministic_drafts_leave_the_text_as_it_is():
    plain = emit((-1,), False, ALL, 300)
    for form in (CHAIN, TREE, (-1, 0, 0, 0)):
        np.testing.assert_array_equal(emit(form, False, ALL, 300), plain)


@pytest.mark.parametrize("sampled", [False, True])
def test_greedy_text_is_the_likeliest_token_after_penalties(sampled):
    params = replace(ALL, temperature=0.0)
    tokens = list(PROMPT)
    for _ in range(NUM_TOKENS):
        dist = naive_dist(
            tables()[0][tokens[-2], tokens[-1]], list(PROMPT), tokens[2:], replace(params, temperature=1.0)
        )
        tokens.append(int(np.argmax(dist)))
    unshaped = [*PROMPT]
    for _ in range(NUM_TOKENS):
        unshaped.append(int(tables()[0][unshaped[-2], unshaped[-1]].argmax()))
    assert tokens != unshaped
    for form in ((-1,), CHAIN, TREE):
        assert emit(form, sampled, params, 3).tolist() == [tokens[2:]] * 3


def _blind_to_the_path(logits_processor, logits, path):
    return RIGHT_LOGITS(logits_processor, logits, [])


def _counts_the_prompt(logits_processor, logits, path):
    return RIGHT_LOGITS(logits_processor, logits, [*path, *PROMPT])


def _path_without_its_end(logits_processor, logits, path):
    return RIGHT_LOGITS(logits_processor, logits, path[:-1])


def _bias_after_penalties(logits_processor, logits, path):
    ids, biases = logits_processor._bias
    taken = logits.copy()
    taken[ids] -= biases
    processed = RIGHT_LOGITS(logits_processor, taken, path)
    processed[ids] += biases
    return processed


RIGHT_LOGITS = LogitsProcessor.logits


# The distribution changes enough for few draws to show it.
STRONG = replace(ALL, frequency_penalty=1.8, repetition_penalty=2.5, logit_bias={1: 2.0, 2: -1.0}, top_k=0, min_p=0.0)


@pytest.mark.distribution
@pytest.mark.usefixtures("kept_warps")
def test_strong_penalties_are_followed():
    assert p_value(emit(CHAIN, True, STRONG, BATCH), exact_joint(STRONG)) > RIGHT


@pytest.mark.distribution
@pytest.mark.usefixtures("kept_warps")
@pytest.mark.parametrize(
    "wrong", [_blind_to_the_path, _counts_the_prompt, _path_without_its_end, _bias_after_penalties]
)
def test_wrong_shapes_are_noticed(wrong, monkeypatch):
    monkeypatch.setattr(LogitsProcessor, "logits", wrong)
    assert p_value(emit(CHAIN, True, STRONG, FEW), exact_joint(STRONG)) < WRONG


@pytest.mark.distribution
@pytest.mark.usefixtures("kept_warps")
def test_a_wrong_min_p_is_noticed(monkeypatch):
    monkeypatch.setattr(processors, "keep_likely", lambda probs, min_p: np.where(probs < min_p, 0, probs))
    assert p_value(emit(CHAIN, True, HOT, FEW), exact_joint(HOT)) < WRONG


@pytest.mark.export
def test_distributions_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers import generation

    rng, vocab = np.random.default_rng(4), 40
    for trial in range(60):
        params = SamplingParams(
            temperature=float(rng.uniform(0.3, 2.0)),
            top_k=int(rng.integers(0, 20)),
            top_p=float(rng.choice([1.0, 0.9, 0.5])),
            min_p=float(rng.choice([0.0, 0.05, 0.4])),
            repetition_penalty=float(rng.choice([1.0, 1.3, 0.7])),
            logit_bias={int(t): float(rng.normal() * 3) for t in rng.integers(0, vocab, size=trial % 4)},
        )
        tokens, logits = rng.integers(0, vocab, size=12).tolist(), rng.normal(size=vocab).astype(np.float32) * 3
        chain = generation.LogitsProcessorList()
        if params.logit_bias:
            bias = {(token,): bias for token, bias in params.logit_bias}
            chain.append(generation.SequenceBiasLogitsProcessor(bias))
        chain.append(generation.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        chain.append(generation.TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            chain.append(generation.TopKLogitsWarper(params.top_k))
        chain.append(generation.TopPLogitsWarper(params.top_p))
        chain.append(generation.MinPLogitsWarper(params.min_p))
        wanted = torch.softmax(chain(torch.tensor([tokens]), torch.tensor(logits)[None].clone()), -1)[0].numpy()
        logits_processor = LogitsProcessor(params, 6, vocab)
        logits_processor.read(tokens[:5])
        logits_processor.read(tokens[:9])
        np.testing.assert_allclose(logits_processor.probs(logits, tokens[9:]), wanted, atol=2e-6)


def test_only_nodes_on_the_path_are_processed():
    logits_processor = LogitsProcessor(SamplingParams(temperature=1.0, presence_penalty=2.0), 1, 6)
    logits_processor.read([0])
    probs = TreeProbs(
        logits_processor, np.array([0, 4, 5, 3]), np.array([-1, 0, 0, 1]), np.zeros((4, 6), dtype=np.float32)
    )
    assert probs[3][[3, 4]] == pytest.approx(probs[3][0] * np.exp(-2)) and probs[3][5] == probs[3][0]
    assert len(probs._probs) == 1


def test_a_bias_is_named_once_and_in_order():
    assert SamplingParams(logit_bias={7: 1, 2: -3.5}).logit_bias == ((2, -3.5), (7, 1.0))
    assert SamplingParams(logit_bias=((5, 1.0), (5, 2.0))).logit_bias == ((5, 2.0),)
    assert hash(SamplingParams(logit_bias={1: 2.0})) == hash(SamplingParams(logit_bias=((1, 2.0),)))


@pytest.mark.parametrize(
    ("fields", "needs_logits"),
    [
        ({}, False),
        ({"temperature": 1.0, "top_k": 5, "top_p": 0.5}, False),
        ({"min_p": 0.1}, False),  # greedy: the likeliest token is kept in any case
        ({"min_p": 0.1, "temperature": 0.5}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"logit_bias": {0: 0.0}}, True),
    ],
)
def test_logits_are_processed_where_a_distribution_needs_more_than_the_graph_has(fields, needs_logits):
    assert SamplingParams(**fields).needs_logits is needs_logits


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_p": 1.5}, "SamplingParams.min_p: got 1.5; expected 0 (off) to 1"),
        ({"repetition_penalty": 0.0}, "SamplingParams.repetition_penalty: got 0.0; expected above 0"),
        ({"presence_penalty": 2.5}, "SamplingParams.presence_penalty: got 2.5; expected -2 to 2"),
        ({"frequency_penalty": float("nan")}, "SamplingParams.frequency_penalty: got nan; expected -2 to 2"),
        ({"logit_bias": {-1: 1.0}}, "got ((-1, 1.0),); expected token ids, biases of -100 to 100"),
        ({"logit_bias": {3: 101}}, "got ((3, 101.0),); expected token ids, biases of -100 to 100"),
        ({"logit_bias": {"a": 1}}, "SamplingParams.logit_bias: got {'a': 1}; expected (token id, bias) pairs"),
    ],
)
def test_values_out_of_range_are_refused(fields, message):
    with pytest.raises(RuntimeFault) as fault:
        SamplingParams(**fields)
    assert message in str(fault.value)


@pytest.mark.parametrize("penalty", [1e-300, 1e-45, 1e-20, 1e20, 1e39, 1e300])
@pytest.mark.parametrize("temperature", [0.0, 1e-19, 0.5, 1e30])
def test_extreme_penalties_leave_a_distribution(penalty, temperature):
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
    logits_processor = LogitsProcessor(params, 3, 5)
    logits_processor.read([0, 1, 2])
    logits = np.array([324.0, -324.0, 0.0, -np.inf, 5.0], dtype=np.float32)
    probs = logits_processor.probs(logits, [4])
    assert np.isfinite(probs).all() and probs.sum() == pytest.approx(1, abs=1e-6) and probs[3] == 0
