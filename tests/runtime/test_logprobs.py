# SPDX-License-Identifier: Apache-2.0
"""Logprobs are those of each emitted token's own row, with drafts and without, against the model itself."""

from dataclasses import replace

import numpy as np
import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.runtime import host_verify
from speccompile.runtime.logits_processors import LogitsProcessor
from speccompile.runtime.logprobs import TokenLogprobs, log_softmax, token_logprobs
from speccompile.runtime.scheduler import decode
from speccompile.runtime.sequences import SequenceBatch
from tests.lab.decoding import sequences_of
from tests.mock_lm import VOCAB
from tests.runtime.test_loop import TARGET, make_proposer, make_verifier
from tests.runtime.test_spec_engine import make_engine

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5, 3, 5], [8]]
ASKED = [
    SamplingParams(max_new_tokens=25, logprobs=3),
    SamplingParams(max_new_tokens=25, logprobs=0, temperature=1.0, top_p=0.9, seed=4),
    SamplingParams(max_new_tokens=25, logprobs=20, temperature=0.8, frequency_penalty=0.7, seed=5),
    SamplingParams(max_new_tokens=25),
]
PROCESSED = [replace(params, logprobs_mode="processed_logprobs") for params in ASKED]


def decoded(kind, batch, asked, is_invariant=True, **config):
    sequences = sequences_of(PROMPTS, asked)
    told = [[] for _ in sequences]
    for steps in decode(make_verifier(), make_proposer(kind, **config), SequenceBatch(sequences, batch, is_invariant)):
        for step in steps:
            told[step.output_index] += step.logprobs
            assert len(step.logprobs) == (len(step.tokens) if asked[step.output_index].logprobs is not None else 0)
    assert told == [sequence.logprobs for sequence in sequences]
    return sequences


def naive(sequence, at):
    """Returns the row [vocab] that decided a slot's token `at`."""
    tokens, params = sequence.tokens, sequence.sampling
    logits = TARGET.logits(np.array(tokens[:at])).astype(np.float64)
    if params.logprobs_mode == "processed_logprobs":
        processor = LogitsProcessor(params, sequence.num_prompt, VOCAB)
        processor.read(tokens[:at])
        if not params.is_greedy:
            with np.errstate(divide="ignore"):
                return np.log(processor.probs(logits.astype(np.float32), []))
        logits = processor.logits(logits.astype(np.float32), []).astype(np.float64)
    return logits - np.log(np.exp(logits).sum())


def check(sequence):
    assert len(sequence.logprobs) == len(sequence.tokens) - sequence.num_prompt
    for at, entry in enumerate(sequence.logprobs, sequence.num_prompt):
        row = naive(sequence, at)
        assert entry.token == sequence.tokens[at] and len(entry.top) == sequence.sampling.logprobs
        assert entry.logprob == pytest.approx(row[entry.token], abs=1e-5)
        np.testing.assert_allclose([value for _, value in entry.top], np.sort(row)[::-1][: len(entry.top)], atol=1e-5)
        np.testing.assert_allclose([value for _, value in entry.top], row[[token for token, _ in entry.top]], atol=1e-5)


@pytest.mark.parametrize("asked", [ASKED, PROCESSED], ids=["raw", "processed"])
@pytest.mark.parametrize(
    ("kind", "batch", "is_invariant"),
    [("none", 1, True), ("tree", 3, True), ("ngram", 4, True), ("draft_model", 4, True), ("draft_model", 2, False)],
)
def test_every_token_has_the_logprobs_of_its_own_row(kind, batch, is_invariant, asked):
    sequences = decoded(kind, batch, asked, is_invariant)
    assert kind not in ("tree", "draft_model") or sum(sequence.stats.num_draft_tokens for sequence in sequences) > 0
    for sequence in sequences[:3]:
        check(sequence)
    assert sequences[3].logprobs == []


def _one_row_late(verdict, tree, sequences, logits, right=host_verify.logprobs_of_step):
    return right(verdict, tree, sequences, np.roll(logits, -1, axis=1))


@pytest.mark.mutant
def test_the_row_of_another_node_is_noticed(monkeypatch):
    from speccompile.runtime import loop

    monkeypatch.setattr(loop, "logprobs_of_step", _one_row_late)
    with pytest.raises(AssertionError):
        check(decoded("tree", 3, ASKED)[0])


def test_a_tie_is_named_by_the_lower_id_and_minus_infinity_is_kept():
    logs = log_softmax(np.array([1.0, 3.0, -np.inf, 3.0, 3.0], dtype=np.float32))
    assert [token for token, _ in token_logprobs(logs, 4, 2).top] == [1, 3]
    assert token_logprobs(logs, 2, 0) == TokenLogprobs(2, -np.inf, ())
    assert len(token_logprobs(logs, 0, 20).top) == 5
    assert token_logprobs(logs, 2, 0).json_from_logprobs() == {"token": 2, "logprob": -9999.0, "top": []}


def test_generations_and_streams_have_them():
    engine, params = make_engine(), SamplingParams(max_new_tokens=9, logprobs=2)
    [asked], [plain] = engine.generate("abc", params), engine.generate("abc", SamplingParams(max_new_tokens=9))
    assert asked.tokens == plain.tokens and plain.logprobs is None and "logprobs" not in plain.json_from_generation()
    assert [entry.token for entry in asked.logprobs] == asked.tokens
    assert asked.json_from_generation()["logprobs"][0]["top"][0].keys() == {"token", "logprob"}
    steps = list(engine.stream("abc", params))
    assert [entry for step in steps for entry in step.logprobs] == asked.logprobs
