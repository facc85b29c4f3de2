# SPDX-License-Identifier: Apache-2.0
"""The certificate's check of texts under a grammar: the engine as it is, and with defects that are planted."""

import json
from itertools import product

import numpy as np
import pytest
from tokenizers import Tokenizer

from speccompile.certificate import grammar as module
from speccompile.certificate.grammar import REGEX, Allowed, check_grammar, plain_tokens
from speccompile.certificate.sampled import exact_rows, joint_of
from speccompile.core.sampling_params import StructuredOutputs
from speccompile.runtime import grammars
from speccompile.runtime.grammars import GrammarMatcher, Grammars
from speccompile.runtime.logits_processors import LogitsProcessor
from tests.certificate.certificate_lab import PROMPTS, TARGET, make_engine
from tests.mock_lm import VOCAB
from tests.pipeline import fakes
from tests.runtime.grammar_lab import FREE_BONUS_TOKEN, MASK_AFTER_TOP_P, STALE_MATCHER

pytest.importorskip("llguidance")
EOS, NUM = 0, 100
TOKENS = ["</s>", *"abcde", *"0123", *"ABCD", "a1", "12", "2B", "3Aa", " ", "?", "aA", "1a", "é", "00"]
MERGES = [(token[:-1], token[-1]) for token in ("a1", "12", "2B", "3A", "aA", "1a", "00")]


def make_tokenizer() -> Tokenizer:
    """Returns a byte-level tokenizer of as many tokens as the mock model has."""
    signs = {" ": "Ġ", "é": "Ã"}  # a token of half a letter
    vocab = {signs.get(token, token): at for at, token in enumerate(TOKENS)}
    merges = [pair for pair in MERGES if "".join(pair) in vocab]
    end = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added = [{"id": EOS, "content": "</s>", **end}]
    return Tokenizer.from_str(
        json.dumps({"version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model})
    )


def engine_with(tokenizer, eos=(EOS,)):
    engine = make_engine(nodes=12)
    engine.tokenizer, engine.eos_token_ids = tokenizer, frozenset(eos)
    engine.grammars = Grammars(tokenizer, VOCAB, eos)
    return engine


def check(num=NUM):
    return check_grammar(engine_with(make_tokenizer()), PROMPTS, num)


@pytest.mark.distribution
def test_text_has_the_targets_distribution_within_the_grammar():
    found = check(200)
    assert found.status == "passed", found.facts
    runs = {run["run"]: run for run in found.facts["runs"]}
    assert set(runs) == {"plain", "the method's drafts", "planted chains", "planted trees"}
    assert all(run["num_cells"] > 5 and "first_error" not in run for run in runs.values()), runs
    for name in ("the method's drafts", "planted chains", "planted trees"):
        assert runs[name]["num_accepted"] > 60
    assert "the target's distribution within the grammar" in found.summary and found.facts["may_draft"]


def _one_token_late(self, tokens, right=GrammarMatcher.read):
    right(self, tokens[:-1])


def _not_rolled_back(self, path, matcher, right=GrammarMatcher._mask_by):
    class Kept:
        def __getattr__(self, name):
            return (lambda num: None) if name == "rollback" else getattr(matcher, name)

    return right(self, path, Kept())


def _without_penalty_on_drafts(self, logits, path, right=LogitsProcessor.logits):
    if self._grammar is None:
        return right(self, logits, path)
    allowed = self._grammar.allowed(path)
    grammar, self._grammar = self._grammar, None
    try:
        return right(self, np.where(False if allowed is None else allowed, logits, np.float32(-np.inf)), [])
    finally:
        self._grammar = grammar


DRAFTED = ("planted chains", "planted trees")
DEFECTS = {
    "mask after top-p": (*MASK_AFTER_TOP_P, ("plain", *DRAFTED)),
    "matcher not advanced along drafts": (*STALE_MATCHER, DRAFTED),
    "matcher a token late": (GrammarMatcher, "read", _one_token_late, ("plain", *DRAFTED)),
    "matcher not rolled back": (GrammarMatcher, "_mask_by", _not_rolled_back, DRAFTED),
    "no mask on the bonus token": (*FREE_BONUS_TOKEN, DRAFTED),
    "no penalty on drafts": (LogitsProcessor, "logits", _without_penalty_on_drafts, ("planted trees",)),
}


@pytest.mark.mutant
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_fails(name, monkeypatch):
    owner, attribute, wrong, runs = DEFECTS[name]
    monkeypatch.setattr(owner, attribute, wrong)
    found = check()
    assert found.status == "failed", found.facts
    assert all(run in found.summary.partition(": not ")[2] for run in runs), found.summary


def test_what_may_follow_is_what_the_grammar_says():
    tokenizer = make_tokenizer()
    allowed = Allowed(plain_tokens(tokenizer, VOCAB), [EOS], VOCAB)
    assert {token for token, index in tokenizer.get_vocab().items() if index in allowed.tokens} == {
        token for token in TOKENS if token.isascii() and token.isalnum()
    }
    matcher = Grammars(tokenizer, VOCAB, [EOS]).matcher(StructuredOutputs(regex=REGEX), [])
    num = 0
    for text in (text for size in range(4) for text in product([0, 1, 2, 6, 7, 10, 14, 15, 16, 17, 23], repeat=size)):
        mask = matcher.allowed(text)
        if mask is not None:
            num += 1
            np.testing.assert_array_equal(allowed.after(text), mask, str(text))
    assert num > 40


def test_tokens_of_one_byte_are_letters_and_special_ones_are_none():
    words = ["</s>", "<unk>", "<0x61>", "<0x0A>", "b", "▁b", "C9"]
    added = {"content": "b", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    model = {"type": "BPE", "vocab": {word: at for at, word in enumerate(words)}, "merges": [], "byte_fallback": True}
    made = {"version": "1.0", "added_tokens": [{"id": 4, "special": True, **added}], "model": model}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    for decoder, wanted in (({"type": "ByteFallback"}, {2: "a", 6: "C9"}), (level, {6: "C9"})):
        tokenizer = Tokenizer.from_str(json.dumps(made | {"decoder": decoder}))
        assert plain_tokens(tokenizer, 7) == wanted
        assert set(plain_tokens(tokenizer, 6)) == wanted.keys() - {6}


def test_the_exact_joint_is_within_the_grammar():
    allowed = Allowed(plain_tokens(make_tokenizer(), VOCAB), [EOS], VOCAB)
    rows = exact_rows(make_engine(), PROMPTS[0], allowed.probs)
    assert sum(joint_of(rows).values()) == pytest.approx(1)
    logits = TARGET.logits(np.array(PROMPTS[0]))
    likely = sorted(np.flatnonzero(allowed.after(())), key=lambda token: -logits[token])[:5]
    assert set(rows[()]) <= set(map(int, likely)) and EOS not in allowed.tokens


def test_what_cannot_be_checked_is_not_run(monkeypatch):
    words = Tokenizer.from_str(json.dumps(fakes.tokenizer(VOCAB)))
    for engine, why in (
        (make_engine(), "a bundle without a tokenizer"),
        (engine_with(make_tokenizer(), ()), "a bundle without an end-of-sequence token"),
        (engine_with(words), "a tokenizer without bytes: can't determine decoder type"),
    ):
        found = check_grammar(engine, PROMPTS, 4)
        assert found.status == "not run" and found.summary.startswith(why), found.summary
    monkeypatch.setattr(module, "plain_tokens", lambda tokenizer, size: {1: "a", 6: "0", 7: "1", 10: "A"})
    assert "no tokens of letters and digits" in check_grammar(engine_with(make_tokenizer()), PROMPTS, 4).summary
    monkeypatch.setattr(grammars, "_PACKAGE", "no_such_package")
    found = check_grammar(engine_with(make_tokenizer()), PROMPTS, 4)
    assert (found.status, found.summary) == (
        "not run", "no package no_such_package; expected the package of the extra [structured]"
    )  # fmt: skip
    monkeypatch.setattr(module, "gives_logits", lambda engine: False)
    assert "engine.logits: false" in check_grammar(make_engine(), PROMPTS, 4).summary


def test_a_target_that_compacts_in_its_step_is_checked_without_drafts(monkeypatch):
    engine = engine_with(make_tokenizer())
    engine.verifier._compacts = False
    found = check_grammar(engine, PROMPTS, 30)
    assert found.status == "passed" and "no drafts with grammars" in found.summary
    assert [run["run"] for run in found.facts["runs"]] == ["plain"]
