# SPDX-License-Identifier: Apache-2.0
"""Slots with distributions of their own beside others, through the loop, on a target in numpy."""

from dataclasses import replace

import numpy as np
import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.errors import RuntimeFault
from speccompile.runtime.logits_processors import LogitsProcessor
from speccompile.runtime.sequences import TokenSequence
from speccompile.runtime.verifier import Verifier
from tests.decode_one import decode_one
from tests.lab.decoding import finished
from tests.mock_lm import VOCAB, MockEngine
from tests.runtime.test_loop import MAX_SEQ, TARGET, make_proposer, make_verifier

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5, 3, 5], [8], [9, 7, 9, 3, 2, 3]]
DISTS = [
    {"temperature": 1.0, "frequency_penalty": 0.6, "presence_penalty": 0.3},
    {"temperature": 0.8, "top_p": 0.9},
    {"repetition_penalty": 1.6},
    {},
    {"temperature": 1.2, "min_p": 0.1, "logit_bias": {4: 3.0, 7: -100.0}},
]
ASKED = [SamplingParams(max_new_tokens=30 + i, seed=40 + i, **dist) for i, dist in enumerate(DISTS)]


def text_of(kind, batch, asked=ASKED, is_invariant=True, **config):
    proposer = make_proposer(kind, **config)
    sequences = finished(make_verifier(), proposer, PROMPTS, asked, batch, is_invariant=is_invariant)
    return [sequence.tokens[sequence.num_prompt :] for sequence in sequences], sum(
        sequence.stats.num_draft_tokens for sequence in sequences
    )


def test_drafts_and_neighbours_change_nothing():
    alone, _ = text_of("none", 1)
    for kind, batch in (("none", 4), ("tree", 1), ("tree", 4), ("ngram", 3), ("draft_model", 4)):
        texts, num_drafts = text_of(kind, batch)
        assert texts == alone, (kind, batch)
        assert (num_drafts > 0) == (kind != "none")
    others = [a if a.needs_logits else replace(a, max_new_tokens=5) for a in ASKED]
    texts, _ = text_of("tree", 4, others)
    assert [t for t, a in zip(texts, ASKED, strict=True) if a.needs_logits] == [alone[0], alone[2], alone[4]]


def test_a_greedy_penalised_text_is_the_one_written_out_by_hand():
    tokens, params = list(PROMPTS[2]), ASKED[2]
    while len(tokens) < len(PROMPTS[2]) + params.max_new_tokens:
        logits = TARGET.logits(np.array(tokens))
        for token in set(tokens):
            logits[token] = logits[token] / np.float32(1.6) if logits[token] > 0 else logits[token] * np.float32(1.6)
        tokens.append(int(logits.argmax()))
    texts, _ = text_of("tree", 4)
    assert texts[2] == tokens[len(PROMPTS[2]) :]
    assert texts[2] != TARGET.greedy(PROMPTS[2], params.max_new_tokens)


def test_drawn_drafts_are_verified_by_the_distribution_that_is_asked_for():
    """Sampled drafts with residual acceptance: the text is another draw, whatever the batch."""
    texts, num_drafts = text_of("draft_model", 1, is_invariant=False, num_draft_tokens=3)
    assert num_drafts > 0 and 7 not in texts[4]
    assert text_of("draft_model", 4, is_invariant=False, num_draft_tokens=3)[0] == texts


def test_the_single_sequence_oracle_agrees():
    alone, _ = text_of("none", 1)
    for kind in ("tree", "ngram"):
        sequence = TokenSequence(0, PROMPTS[0], ASKED[0], frozenset(), None)
        assert [t for new in decode_one(make_verifier(1), make_proposer(kind, 1), sequence) for t in new] == alone[0]


def test_a_logits_processor_that_forgets_is_noticed(monkeypatch):
    strong = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 3.0}
    asked = [SamplingParams(max_new_tokens=40, temperature=1.0, seed=i, **strong) for i in range(len(PROMPTS))]
    alone, _ = text_of("none", 1, asked)
    assert text_of("tree", 1, asked)[0] == alone
    monkeypatch.setattr(
        LogitsProcessor, "logits", lambda self, logits, path, right=LogitsProcessor.logits: right(self, logits, [])
    )
    assert text_of("tree", 1, asked)[0] != alone


class Compacting(MockEngine):
    """A target that keeps the path of its own verdict in its step."""

    compacts_in_step = True


def test_requests_are_checked_against_the_target():
    verifier, processed = make_verifier(), SamplingParams(presence_penalty=1.0)
    assert verifier.may_draft("request", SamplingParams()) and verifier.may_draft("request", processed)
    compacting = Verifier(Compacting(TARGET, "target", 2, MAX_SEQ), MAX_SEQ)
    assert compacting.may_draft("request", SamplingParams()) and not compacting.may_draft("request", processed)
    with pytest.raises(RuntimeFault) as fault:
        verifier.may_draft("prompt 3", SamplingParams(logit_bias={VOCAB: 1.0}))
    assert str(fault.value) == (
        f"prompt 3 (logit_bias): got token {VOCAB}; expected ids below {VOCAB}. Use the bundle's own ids."
    )
    silent = Verifier(MockEngine(TARGET, "target", 2, MAX_SEQ), MAX_SEQ)
    silent.engine.spec = replace(silent.engine.spec, outputs=())
    assert silent.may_draft("request", SamplingParams(temperature=1.0))
    with pytest.raises(RuntimeFault) as fault:
        silent.may_draft("request", processed)
    assert str(fault.value) == (
        "request: got min_p, a penalty, a logit_bias, a grammar or logprobs, with a target that keeps its logits to "
        "itself; expected temperature, top_k and top_p alone. Build the bundle with engine.logits: true, or leave "
        "these out."
    )


def test_drawn_drafts_are_verified_on_the_host_as_in_the_graph():
    """A min_p that cuts nothing leaves the distribution as it is, and takes the verdict to the host."""
    dists = [{"temperature": 1.0 + 0.1 * i} for i in range(len(PROMPTS))]
    asked = [SamplingParams(max_new_tokens=40, seed=i, **dist) for i, dist in enumerate(dists)]
    on_host = [replace(params, min_p=1e-30) for params in asked]
    assert all(params.needs_logits for params in on_host)
    plain, _ = text_of("none", 4, asked)
    drawn, num_drafts = text_of("draft_model", 4, asked, is_invariant=False, num_draft_tokens=4)
    assert drawn != plain and num_drafts > 0, "these drafts are not drawn"
    assert text_of("draft_model", 4, on_host, is_invariant=False, num_draft_tokens=4) == (drawn, num_drafts)
