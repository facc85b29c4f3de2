# SPDX-License-Identifier: Apache-2.0
"""Formats of structural tags: which texts each accepts, by regular expressions of Python, and what is refused."""

import itertools
import json
import re

import pytest

from speccompile.core.sampling_params import StructuredOutputs
from speccompile.errors import RuntimeFault
from speccompile.runtime.grammars import Grammars
from tests.runtime.grammar_lab import EOS, TOKENS, Pieces, is_valid, make_object

pytest.importorskip("llguidance")
CHARS = {token.decode(): at for at, token in enumerate(TOKENS) if len(token) == 1}
ANY, FLAG = {"type": "any_text"}, {"type": "json_schema", "json_schema": {"enum": [1]}}


def const(value):
    return {"type": "const_string", "value": value}


def regex(pattern):
    return {"type": "regex", "pattern": pattern}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def group(kind, *elements):
    return {"type": kind, "elements": list(elements)}


def times(kind, content, **numbers):
    return {"type": kind, "content": content, **numbers}


def triggered(triggers, *tags, **options):
    return {"type": "triggered_tags", "triggers": triggers, "tags": list(tags), **options}


def separated(separator, *tags, **options):
    return {"type": "tags_with_separator", "tags": list(tags), "separator": separator, **options}


ONE, SINGLE = {"at_least_one": True}, {"stop_after_first": True}
A_TAG, J_TAG, TEXT_TAG = tag("<a", const("b"), ">"), tag("<a", FLAG, ">"), tag("<1", ANY, ">")
FREE, UP_TO, NEITHER = r"(?:(?!<).)*", r"(?:(?!<|>>).)*", r"(?:(?!<a|<1).)*"
EITHER = r"(?:<a1>|b[^>]*>)"
CASES = {
    "const_string": (const("a<b"), "ab<", r"a<b"),
    "json_schema": (FLAG, "1 ,", r"1"),
    "regex": (regex("(a|/)+b?"), "ab/", r"(a|/)+b?"),
    "any_text": (ANY, "a<1", r".*"),
    "sequence": (group("sequence", regex("[ab]+"), const("ab"), regex("b?")), "ab<", r"[ab]+abb?"),
    "sequence around json": (group("sequence", const("a"), FLAG, regex("[ab]*"), FLAG), "ab1", r"a1[ab]*1"),
    "or": (group("or", const("ab"), regex("a+"), FLAG), "ab1", r"ab|a+|1"),
    "tag": (tag("<", regex("[a>]*"), ">"), "<a>", r"<[a>]*>"),
    "tag with free text": (tag("<", ANY, ">>"), "<a>", r"<(?:(?!>>).)*>>"),
    "free text whose end overlaps": (tag("", ANY, "aab"), "ab", r"(?:(?!aab).)*aab"),
    "free text in an inner tag": (tag("<", group("sequence", FLAG, tag("a", ANY, "")), ">"), "<a1>", r"<1a[^>]*>"),
    "tag in a tag": (tag("<", tag("a", ANY, "a"), ">"), "<a>", r"<a[^a]*a>"),
    "or in a tag": (tag("<", group("or", FLAG, tag("a", ANY, "")), ">"), "<a1>", r"<(1|a[^>]*)>"),
    "triggered_tags": (triggered(["<"], A_TAG), "<ab>", rf"({FREE}<ab>)*{FREE}"),
    "triggered_tags of json": (triggered(["<"], J_TAG), "<a1>", rf"({FREE}<a1>)*{FREE}"),
    "two triggers": (triggered(["<a", "<1"], J_TAG, TEXT_TAG), "<a1>", rf"({NEITHER}<(a1>|1[^>]*>))*{NEITHER}"),
    "at least one": (triggered(["<"], J_TAG, **ONE), "<a1>", rf"<a1>({FREE}<a1>)*{FREE}"),
    "stop after the first": (triggered(["<"], J_TAG, **SINGLE), "<a1>", rf"{FREE}(<a1>)?"),
    "one and no more": (group("sequence", triggered(["<"], J_TAG, **ONE, **SINGLE), const("a")), "<a1>", r"<a1>a"),
    "triggered_tags in a tag": (tag("1", triggered(["<"], A_TAG), ">>"), "1<ab>", rf"1({UP_TO}<ab>)*{UP_TO}>>"),
    "the first alone in a tag": (tag("", triggered(["<"], J_TAG, **SINGLE), ">>"), "<a1>", rf"{UP_TO}(<a1>)?>>"),
    "tags_with_separator": (separated(",", J_TAG, tag("b", ANY, ">")), "<a1>b,", rf"({EITHER}(,{EITHER})*)?"),
    "one separated tag at least": (separated("", tag("b", FLAG, ""), **ONE), "b1", r"(b1)+"),
    "one separated tag at most": (separated(",", tag("b", ANY, ""), **SINGLE), "b1,", r"(b.*)?"),
    "separated tags in a tag": (tag("<", separated(",", tag("b", FLAG, "")), ">"), "<b1,>", r"<(b1(,b1)*)?>"),
    "optional": (group("sequence", times("optional", FLAG), const("a")), "1a", r"1?a"),
    "optional free text": (tag("<", times("optional", tag("a", ANY, "")), ">"), "<a>", r"<(a[^>]*)?>"),
    "star": (group("sequence", times("star", const("ab")), regex("a?")), "ab", r"(ab)*a?"),
    "star of json": (times("star", tag("a", FLAG, "")), "a1", r"(a1)*"),
    "plus": (group("sequence", times("plus", tag("a", FLAG, "")), const("b")), "a1b", r"(a1)+b"),
    "repeat": (times("repeat", regex("a|bb"), min=1, max=3), "ab", r"(a|bb){1,3}"),
    "repeat without a bound": (times("repeat", tag("a", FLAG, ""), min=2, max=-1), "a1", r"(a1){2,}"),
}  # fmt: skip


def accepted(matcher, chars, length):
    """Returns the texts of these characters that may end, by the masks of their paths."""
    texts, paths = set(), [""]
    for path in paths:
        mask = matcher.allowed([CHARS[char] for char in path])
        assert mask is not None and mask.any()
        texts |= {path} if mask[EOS] else set()
        paths += [path + char for char in chars if len(path) < length and mask[CHARS[char]]]
    return texts


@pytest.mark.parametrize("name", CASES)
def test_a_format_accepts_its_texts_and_no_others(grammars, name):
    asked, chars, pattern = CASES[name]
    length = {2: 9, 3: 7, 4: 6, 5: 6, 6: 6}[len(chars)]
    texts = accepted(grammars.matcher(StructuredOutputs(structural_tag={"format": asked}), []), chars, length)
    every = ("".join(text) for n in range(length + 1) for text in itertools.product(chars, repeat=n))
    assert texts == {text for text in every if re.fullmatch(pattern, text)} and texts


def test_a_schema_in_free_text_is_that_of_its_tag(grammars):
    first, second = make_object(x={"type": "integer"}), make_object(ok={"type": "boolean"})
    tags = [
        tag(f"<f={name}>", {"type": "json_schema", "json_schema": schema}, "</f>")
        for name, schema in (("1", first), ("2", second))
    ]
    asked = {"type": "structural_tag", "format": triggered(["<f="], *tags)}
    ids = Pieces()
    for name, text in itertools.product("12", ('{"x": 12}', '{"ok":true}', '{"ok": 1}', '{"x":1', '{ "x" : 1 }', "")):
        matcher = grammars.matcher(StructuredOutputs(structural_tag=asked), [])
        mask = matcher.allowed(ids(f"a <f={name}>{text}</f> b"))
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        assert (mask is not None and bool(mask[EOS])) == is_valid(value, first if name == "1" else second), text


def test_special_tokens_are_named_in_texts():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "<think>", "</think>", "<call>")])
    grammars = Grammars(tokenizer, tokenizer.get_vocab_size(), [tokenizer.token_to_id("<s>")])
    asked = group(
        "sequence",
        tag("<think>", ANY, "\n</think>"),
        triggered(["<call>"], tag("<call>x", FLAG, "<call>"), tag("<call>y", const('é😀"\\<call>'), "")),
    )
    matcher = grammars.matcher(StructuredOutputs(structural_tag={"format": asked}), [])
    for text, is_right in (
        ("<think>é <\n</think>ok", True),
        ("<think></think>ok", False),
        ("<think>\n</think>", True),
        ('<think>a\nb\n</think>a<call>x1<call>b<call>yé😀"\\<call>', True),
        ("<think>\n</think>a<call>b", False),
        ("<think>\n</think><call>x1", False),
        ("a<think>\n</think>", False),
    ):
        mask = matcher.allowed(tokenizer.encode(text).ids)
        assert (mask is not None and bool(mask[tokenizer.token_to_id("<s>")])) == is_right, text
    written = [tokenizer.token_to_id(char) for char in "<think>"]
    assert matcher.allowed(written) is None
    with pytest.raises(RuntimeFault, match="an end-of-sequence token in 'a<s>'"):
        grammars.matcher(StructuredOutputs(structural_tag={"format": const("a<s>")}), [])


DEEP = const("a")
for _ in range(40):
    DEEP = group("sequence", DEEP)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "got format: no type; expected one of const_string, json_schema, regex"),
        ([], "got format: []; expected a format, an object with a type"),
        ({"type": "xml"}, "got format: type 'xml'; expected one of"),
        ({"type": "grammar", "grammar": "root ::= a"}, "got format: type 'grammar'; expected one of"),
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "got format: type 'qwen_xml_parameter'"),
        (tag("a", {"type": "token", "token": "b"}, "c"), "got format.content: type 'token'"),
        ({"type": "dispatch", "rules": []}, "got format: type 'dispatch'"),
        ({**ANY, "excludes": ["a"]}, "got format: excludes of any_text; expected type alone"),
        ({"type": "const_string"}, "got format: const_string without value"),
        (const(""), "got format.value: ''; expected a text with characters"),
        (regex("a["), "(structural_tag): got"),
        (regex("a\\"), "a pattern that ends with a backslash"),
        ({"type": "json_schema", "json_schema": "{}"}, "got format.json_schema: '{}'"),
        (
            {"type": "json_schema", "json_schema": {"type": "objekt"}},
            "Invalid type: objekt; expected a grammar that compiles",
        ),
        (group("or"), "got format.elements: []; expected a list that is not empty"),
        (tag("a", ANY, ["b"]), "got format.end: ['b']; expected a text"),
        (group("sequence", const("a"), 3), "got format.elements[1]: 3"),
        (group("sequence", ANY, const("a")), "got format.elements[0]: any_text, which holds free text"),
        (group("sequence", tag("a", ANY, ""), FLAG), "got format.elements[0]: tag, which holds free text"),
        (times("star", group("or", const("a"), ANY)), "got format.content: or, which holds free text"),
        (triggered(["<"], tag("<", ANY, "")), "got format.tags[0]: tag, which holds free text"),
        (triggered(["<"], A_TAG, tag("a", ANY, "b")), "got format.tags[1]: begin 'a' after no trigger"),
        (triggered(["<", "<a"], A_TAG), "begin '<a' after '<' and '<a'; expected one trigger"),
        (triggered(["<", ">"], A_TAG), "got format.triggers: '>', which begins no tag"),
        (triggered(["<"], const("<")), "got format.tags[0]: type 'const_string'; expected one of tag"),
        (triggered(["<"], A_TAG, at_least_one=1), "got format.at_least_one: 1; expected true or false"),
        (separated(",", tag("a", ANY, "")), "got format.tags[0]: tag, which holds free text"),
        (times("repeat", const("a"), min=3, max=2), "got format: min 3 and max 2; expected 0 <= min <= max"),
        (times("repeat", const("a"), min=0, max=5000), "expected 0 <= min <= max <= 1000"),
        (DEEP, "expected 32 at most"),
    ],
)
def test_a_format_that_is_wrong_or_not_known_is_refused_by_its_place(grammars, asked, message):
    with pytest.raises(RuntimeFault) as fault:
        grammars.matcher(StructuredOutputs(structural_tag={"format": asked}), [])
    assert message in str(fault.value) and fault.value.expected and fault.value.todo


def test_both_forms_at_once_are_refused(grammars):
    with pytest.raises(RuntimeFault, match="got format and structures and triggers; expected format alone"):
        grammars.matcher(StructuredOutputs(structural_tag={"format": ANY, "structures": [], "triggers": []}), [])
    for wrong in ({"structures": [3], "triggers": ["a"]}, {"structures": [{"begin": 3}], "triggers": ["a"]}):
        with pytest.raises(RuntimeFault, match=r"\(structural_tag\): got (Type|Key)Error"):
            grammars.matcher(StructuredOutputs(structural_tag=wrong), [])
