# SPDX-License-Identifier: Apache-2.0
"""Masks of grammars: what may follow a path, the text's end, reasoning before it, and what is refused."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers

from speccompile.core.sampling import SamplingParams
from speccompile.core.sampling_params import StructuredOutputs
from speccompile.errors import RuntimeFault
from speccompile.runtime import grammars as module
from speccompile.runtime.grammars import GrammarFault, GrammarMatcher, Grammars
from speccompile.runtime.text import text_of_tokens
from tests.pipeline import fakes
from tests.runtime.grammar_lab import EOS, TOKENS, VOCAB, Pieces, make_grammars, tokens_of
from tests.runtime.test_grammar_drafts import CONSTRAINT, GRAMMARS, allowed_after
from tests.runtime.test_text import WORDS, ids_of, llama_decoder

pytest.importorskip("llguidance")
IDS = Pieces()
CODE = StructuredOutputs(regex="[ab]{2}(c|d[ab])?")
REASONED = StructuredOutputs(regex="a+", reasoning=("<", ">"))


def allowed(matcher, path=""):
    mask = matcher.allowed(IDS(path))
    return None if mask is None else tokens_of(mask)


def test_a_mask_follows_the_path_and_leaves_the_text_where_it_was(grammars):
    matcher = grammars.matcher(CODE, [5])
    for _ in range(2):
        assert allowed(matcher) == {"a", "b"}
        assert allowed(matcher, "ab") == {"c", "d", "</s>"}
        assert allowed(matcher, "abd") == {"a", "b"}
        assert allowed(matcher, "ax") is None and allowed(matcher, "abca") is None
    matcher.read([5, *IDS("ab")])
    assert allowed(matcher) == {"c", "d", "</s>"} and allowed(matcher, "da") == {"</s>"}
    with pytest.raises(GrammarFault, match="a text that it does not allow, 4 tokens long"):
        matcher.read([5, *IDS("abx")])


def test_after_its_end_a_text_goes_on_with_its_end_alone(grammars):
    matcher = grammars.matcher(CODE, [])
    ends = matcher.allowed([*IDS("ab"), EOS])
    assert tokens_of(ends) == {"</s>"} and tokens_of(matcher.allowed([*IDS("ab"), EOS, EOS])) == {"</s>"}
    assert matcher.allowed([*IDS("a"), EOS]) is None and matcher.allowed([*IDS("ab"), EOS, *IDS("c")]) is None
    matcher.read([*IDS("ab"), EOS])
    assert tokens_of(matcher.allowed([EOS])) == {"</s>"} and matcher.allowed(IDS("c")) is None
    assert matcher.forced() == []


def test_the_grammar_begins_after_the_reasoning(grammars):
    opened, closed, unknown = (grammars.matcher(REASONED, IDS(text)) for text in ("b<", "b<b>", "b"))
    assert allowed(opened) == {token.decode() for token in TOKENS[1:]} and allowed(closed) == {"a"}
    assert allowed(unknown) == {"a", "<"} and allowed(unknown, "a") == {"a", "</s>"}
    for matcher, start in ((opened, ""), (unknown, "<")):
        assert len(allowed(matcher, f"{start}xy")) == VOCAB - 1
        assert allowed(matcher, f"{start}xy>") == {"a"} and allowed(matcher, f"{start}xy>aa") == {"a", "</s>"}
        assert allowed(matcher, f"{start}xy>ab") is None and matcher.allowed([*IDS(f"{start}x"), EOS]) is None
    assert opened.forced() == unknown.forced() == []
    text = IDS("b<")
    for token in IDS("xy>a"):
        text.append(token)
        opened.read(text)
    assert allowed(opened) == {"a", "</s>"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "a[("}, "(regex): got at 1(8): invalid regex"),
        ({"json": "[1"}, "(json): got JSONDecodeError"),
        ({"json": "3"}, "(json): got a schema of type int"),
        ({"json": {"type": "objekt"}}, "(json): got Invalid type: objekt; expected a grammar that compiles"),
        ({"json": {"type": "object", "not": {}}}, 'got Unimplemented keys: ["not"]'),
        ({"grammar": "start: %%"}, "(grammar): got"),
        ({"structural_tag": {"format": {}}}, "(structural_tag): got format: no type; expected one of const_string"),
        ({"structural_tag": {"formats": {}}}, "(structural_tag): got no structures, or no triggers"),
        ({"structural_tag": "{"}, "(structural_tag): got JSONDecodeError"),
        (
            {"structural_tag": {"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]}},
            "got a structure that begins with 'a', which is after no trigger",
        ),
        ({"regex": "a", "reasoning": ("<think>", "</think>")}, "got no token <think> or </think>"),
    ],
)
def test_what_does_not_compile_is_refused(grammars, given, message):
    with pytest.raises(RuntimeFault) as fault:
        grammars.matcher(StructuredOutputs(**given), [])
    assert message in str(fault.value) and fault.value.todo


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "got no constraint; expected one of json, json_object, regex"),
        ({"regex": "a", "json_object": True}, "got json_object and regex"),
        ({"choice": []}, "(choice): got []; expected a list of non-empty texts"),
        ({"choice": ["a", 3]}, "expected a list of non-empty texts"),
        ({"json": 3}, "(json): got 3; expected a text that is not empty"),
        ({"grammar": ""}, "(grammar): got ''"),
        ({"rege": "a"}, "expected a StructuredOutputs, or a mapping with one of json"),
    ],
)
def test_a_request_has_one_constraint_of_its_type(given, message):
    with pytest.raises(RuntimeFault) as fault:
        SamplingParams(structured_outputs=given)
    assert message in str(fault.value)


def test_a_mapping_is_a_constraint_and_requests_stay_hashable():
    params = SamplingParams(structured_outputs={"json": {"type": "integer"}, "reasoning": ["<", ">"]})
    wanted = StructuredOutputs(json='{"type": "integer"}', reasoning=("<", ">"))
    assert params.structured_outputs == wanted and hash(params.structured_outputs) == hash(wanted)
    assert hash(params) and params.needs_logits


def test_what_is_missing_is_named(monkeypatch):
    for tokenizer, eos, message in (
        (None, [0], "a bundle without a tokenizer"),
        (Pieces(), [], "a bundle without an end-of-sequence token"),
        (Tokenizer.from_str(json.dumps(fakes.tokenizer(VOCAB))), [0], "a tokenizer without bytes: can't determine"),
    ):
        with pytest.raises(RuntimeFault, match=message):
            Grammars(tokenizer, VOCAB, eos).compile(CODE)
    monkeypatch.setattr(module, "_PACKAGE", "no_such_package")
    with pytest.raises(RuntimeFault, match=r"pip install .*\[structured\]"):
        make_grammars().compile(CODE)


@pytest.mark.parametrize("wanted", [{"choice": (" Paris,",)}, {"regex": " {4}return"}])
def test_a_first_space_is_one_of_the_text(wanted):
    """SentencePiece's decoders drop it at the beginning of a text, which the prompt is."""
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = llama_decoder()
    prompt, tokens, [eos] = ids_of(tokenizer, "\u2581The"), [], ids_of(tokenizer, "<s>")
    matcher = Grammars(tokenizer, tokenizer.get_vocab_size(), [eos]).matcher(StructuredOutputs(**wanted), prompt)
    while (token := int(np.flatnonzero(matcher.allowed(tokens))[-1])) != eos:
        tokens.append(token)
    assert text_of_tokens(tokenizer, tokens, prompt) == (" Paris," if "choice" in wanted else "    return")


def test_a_grammar_that_fails_for_drafts_is_whole_for_the_text(monkeypatch):
    grammar = GRAMMARS.matcher(CONSTRAINT, [])
    right, failing = GrammarMatcher._mask_by, []

    def mask_by(self, path, matcher):
        if len(path) == 2:
            failing.append(matcher)
            raise GrammarFault("too complex")
        return right(self, path, matcher)

    monkeypatch.setattr(GrammarMatcher, "_mask_by", mask_by)
    assert grammar.draft_mask([1, 5]) is None and grammar.draft_mask([1]).tolist() == allowed_after((1,))
    assert failing[0] is not grammar._matcher and grammar.allowed([]).tolist() == allowed_after(())
    with pytest.raises(GrammarFault):
        grammar.read([3, 3, 3])
    with pytest.raises(GrammarFault, match="a text that it does not allow"):
        grammar.allowed([])
    assert grammar.draft_mask([]) is None and grammar.forced() == []
