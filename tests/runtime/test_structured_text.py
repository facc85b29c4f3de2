# SPDX-License-Identifier: Apache-2.0
"""Texts under a grammar: their exact distribution, and 30 schemas over drafters, chains and trees."""

import json
import math

import numpy as np
import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.core.sampling_params import StructuredOutputs
from speccompile.runtime.grammars import GrammarMatcher, Grammars
from speccompile.runtime.spec_engine import SpecEngine
from tests.core.distribution_lab import CHAIN, NUM_TOKENS, PROMPT, TREE, VOCAB, p_value, tables
from tests.lab.engines import mock_engine
from tests.runtime import grammar_lab
from tests.runtime.grammar_lab import (
    FREE_BONUS_TOKEN,
    MASK_AFTER_TOP_P,
    SCHEMAS,
    STALE_MATCHER,
    Pieces,
    is_valid,
    make_target,
    watch_scored,
)
from tests.runtime.test_logits_processors import RIGHT, WRONG, emit, kept_warps, naive_dist  # noqa: F401

pytest.importorskip("llguidance")
BATCH = 900
SHORT = (-1, 0)  # the token after its draft is one of those that are counted
# Words over the five tokens of the lab: after 'a' alone b or c, after 'ab' alone d; some end before the third token.
WORDS = sorted({"abd", "aca", "acb", "acd", "b", "bd", "bda", "bdb"} | {"c" + x + y for x in "abcd" for y in "ad"})
LETTERS = "\0abcd"  # token 0 ends the text
PARAMS = SamplingParams(temperature=0.9, top_k=3, top_p=0.8, frequency_penalty=0.5)
WARM = SamplingParams(temperature=1.2)


class FiveTokens:
    """The lab's vocabulary."""

    eos_token_id, bos_token_id, special_token_ids = 0, None, [0]
    tokens = [b"</s>", b"a", b"b", b"c", b"d"]  # noqa: RUF012

    def __call__(self, text):
        return [LETTERS.index(chr(byte)) for byte in text if chr(byte) in LETTERS]


GRAMMARS = Grammars(FiveTokens(), VOCAB, [0])
CONSTRAINT = StructuredOutputs(choice=tuple(WORDS))


def allowed_after(text: str) -> list[bool]:
    """Returns by token whether it may follow, from the list of words alone."""
    if text.endswith("\0"):
        return [True] + [False] * 4
    return [text in WORDS, *(any(word.startswith(text + c) for word in WORDS) for c in LETTERS[1:])]


def exact_joint(params: SamplingParams) -> np.ndarray:
    """Returns [VOCAB ** NUM_TOKENS]: the restricted and renormalised distribution of the first tokens."""
    joint = np.zeros((VOCAB,) * NUM_TOKENS)
    for text in np.ndindex(*joint.shape):
        tokens, mass = [*PROMPT, *map(int, text)], 1.0
        for at, token in enumerate(text):
            end = len(PROMPT) + at
            mask = allowed_after("".join(LETTERS[t] for t in text[:at]))
            if not mask[token]:
                mass = 0.0
                break
            row = np.where(mask, tables()[0][tokens[end - 2], tokens[end - 1]], -np.inf)
            mass *= naive_dist(row, list(PROMPT), tokens[len(PROMPT) : end], params)[token]
        joint[text] = mass
    assert joint.sum() == pytest.approx(1)
    return joint.reshape(-1)


def distance(emitted: np.ndarray, joint: np.ndarray) -> tuple[float, float]:
    """Returns the total variation of emitted tokens, and what it stays below with probability 0.9999."""
    cells = emitted @ VOCAB ** np.arange(NUM_TOKENS - 1, -1, -1)
    found = np.bincount(cells, minlength=len(joint)) / len(emitted)
    bound = 0.5 * np.sqrt(joint * (1 - joint) / len(emitted)).sum() + math.sqrt(math.log(1e4) / 2 / len(emitted))
    return float(np.abs(found - joint).sum() / 2), float(bound)


def matcher() -> GrammarMatcher:
    return GRAMMARS.matcher(CONSTRAINT, PROMPT)


@pytest.mark.distribution
@pytest.mark.usefixtures("kept_warps")
@pytest.mark.parametrize(
    ("form", "sampled", "params"),
    [
        ((-1,), False, PARAMS),
        (CHAIN, True, PARAMS),
        (CHAIN, True, WARM),
        (TREE, True, PARAMS),
        (TREE, True, WARM),
        (TREE, False, PARAMS),
    ],
    ids=["plain", "chain", "warm chain", "tree", "warm tree", "top"],
)
def test_texts_follow_the_restricted_distribution(form, sampled, params):
    emitted, joint = emit(form, sampled, params, BATCH, matcher), exact_joint(params)
    far, bound = distance(emitted, joint)
    assert far < bound and p_value(emitted, joint) > RIGHT


MUTANTS = {
    "mask after top-p": MASK_AFTER_TOP_P,
    "stale matcher": STALE_MATCHER,
    "no mask on the bonus token": FREE_BONUS_TOKEN,
}


@pytest.mark.mutant
@pytest.mark.usefixtures("kept_warps")
@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_masks_are_noticed(name, monkeypatch):
    owner, attribute, wrong = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, wrong)
    monkeypatch.setattr(GrammarMatcher, "read", _reads_anything)
    emitted, joint = emit(SHORT, True, PARAMS, BATCH, matcher), exact_joint(PARAMS)
    far, bound = distance(emitted, joint)
    assert far > bound and p_value(emitted, joint) < WRONG


def _reads_anything(self, tokens):
    inside = list(tokens[self._num_read :])
    self._num_read = len(tokens)
    self._matcher.try_consume_tokens([token for token in inside if token])
    self._has_ended = self._has_ended or 0 in inside


KINDS = {
    "none": ("none", {}),
    "ngram": ("ngram", {}),
    "suffix": ("suffix", {}),
    "suffix tree": ("suffix", {"tree": "auto"}),
    "draft chain": ("draft_model", {"num_draft_tokens": 3}),
    "draft tree": ("draft_model", {"tree": {"widths": [2, 1]}}),
    "grown tree": ("draft_model", {"tree": "auto", "drafts": "greedy", "candidates": 8}),
    "hybrid": ("hybrid", {"num_draft_tokens": 3}),
}
TARGET = make_target()
SLOTS, MAX_SEQ = 8, 320


def make_engine(kind: str) -> SpecEngine:
    name, config = KINDS[kind]
    sizes = {"slots": SLOTS, "max_seq": MAX_SEQ, "tokenizer": Pieces(), "eos": [grammar_lab.EOS], "chunk": 128}
    return mock_engine(TARGET, TARGET.blurred(9, 0.8), name, **sizes, **config)


def asked(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(280, temperature, seed=seed, structured_outputs=StructuredOutputs(json=schema))
        for seed, schema in enumerate(SCHEMAS)
    ]


@pytest.fixture(scope="module")
def plain():
    """Returns by temperature the texts without drafts, one by one."""
    engine = make_engine("none")
    return {heat: [r.text for r in engine.generate(["a"] * 30, asked(heat), batch_size=1)] for heat in (0.0, 1.0)}


@pytest.mark.distribution
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_text_is_of_its_schema(kind, temperature, plain, monkeypatch):
    engine = make_engine(kind)
    watch_scored(engine.verifier, monkeypatch)
    results = engine.generate(["a"] * len(SCHEMAS), asked(temperature))
    for result, schema in zip(results, SCHEMAS, strict=True):
        assert (result.finish_reason, result.error) == ("stop", None), (schema, result.text)
        assert is_valid(json.loads(result.text), schema), (schema, result.text)
    if kind != "none":
        assert sum(result.stats["num_accepted"] for result in results) > 0
    if temperature == 0 or kind in ("ngram", "suffix", "suffix tree", "grown tree", "hybrid"):
        assert [result.text for result in results] == plain[temperature]
