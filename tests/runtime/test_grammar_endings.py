# SPDX-License-Identifier: Apache-2.0
"""Texts of JSON end before their tokens are used up, and the mask depends on the text and on what is left alone."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from speccompile.common.tokenizer_file import load_tokenizer
from speccompile.core.sampling import SamplingParams
from speccompile.core.sampling_params import StructuredOutputs
from speccompile.errors import RuntimeFault
from speccompile.runtime import grammar_endings as module
from speccompile.runtime.grammars import Grammars
from speccompile.runtime.schema_sizes import SchemaSizes, growth_of_grammar
from tests.runtime.grammar_lab import EOS, SCHEMAS, Pieces, is_valid, make_object
from tests.runtime.test_structured_text import make_engine

pytest.importorskip("llguidance")
pytestmark = pytest.mark.live
IDS = Pieces()
EXAMPLE = Path(__file__).parents[2] / "examples/models/pycode-16m"
OPTIONAL = {**make_object(need={"type": "integer"}, more={"type": "array", "items": SCHEMAS[5]}), "required": ["need"]}
LIST = {"$defs": {"l": make_object(v=SCHEMAS[24], l={"anyOf": [{"$ref": "#/$defs/l"}, {"type": "null"}]})}}
LIST["$ref"] = "#/$defs/l"
CALL = StructuredOutputs(grammar='%llguidance {}\nstart: "<" %json ' + json.dumps(SCHEMAS[1]) + ' ">"')


def least(grammars, wanted):
    return len(grammars.compile(wanted).checked.ending)


def draw(matcher, num, seed, stays=0.7):
    """Returns a random text; where it could end it goes on with probability `stays`."""
    drawn, text = np.random.default_rng(seed), [5]
    for _ in range(num):
        tokens = np.flatnonzero(matcher.allowed([]))
        if len(tokens) > 1 and drawn.random() < stays:
            tokens = tokens[tokens != EOS]
        token = int(drawn.choice(tokens))
        if token == EOS:
            break
        text.append(token)
        matcher.read(text)
    return text[1:]


@pytest.mark.parametrize("at", range(len(SCHEMAS) + 2))
def test_every_text_is_whole_however_few_tokens_it_has(grammars, at):
    schema = [*SCHEMAS, OPTIONAL, LIST][at]
    for space in (None, ""):
        wanted = StructuredOutputs(json=schema, whitespace_pattern=space)
        for seed, more in enumerate((0, 0, 1, 2, 3, 5, 8, 13, 20, 40)):
            num = least(grammars, wanted) + more
            text = IDS.decode(draw(grammars.matcher(wanted, [5], 1 + num), num, seed))
            if schema is LIST:
                assert "v" in json.loads(text)
            elif schema is OPTIONAL:
                value = json.loads(text)
                assert isinstance(value["need"], int) and set(value) <= {"need", "more"}
            else:
                assert is_valid(json.loads(text), schema), text


ADDRESS = {"type": "string", "format": "email"}
MARKED = {
    "email": make_object(x=ADDRESS),
    "person": make_object(name={"type": "string"}, email=ADDRESS, code={"pattern": "^[0-9]{5}$", "type": "string"}),
    **{
        pattern: make_object(x={"type": "string", "pattern": pattern})
        for pattern in ("^[a-z]+(_[a-z]+){3}$", "^https?://[a-z]+[.]com/[a-z/]*$", "^[A-Z]{2}-[a-z]+@x$", "^.{30}$")
    },
}


@pytest.fixture(scope="module")
def words():
    """Grammars of a vocabulary of words: of most texts they allow thousands of tokens."""
    tokenizer = load_tokenizer(EXAMPLE / "tokenizer.json", RuntimeFault, "")
    made = Grammars(tokenizer, tokenizer.get_vocab_size(), [1])
    yield made
    made.close()


@pytest.mark.parametrize("name", MARKED)
def test_patterns_that_wait_for_a_mark_have_an_ending(words, name):
    ending = words.compile(StructuredOutputs(json=MARKED[name])).checked.ending
    value = json.loads(words._tokenizer.decode(list(ending)))
    assert set(value) == set(MARKED[name]["properties"]) and len(ending) < 80
    assert "@" in value.get("email", "@") and (name[0] != "^" or re.search(name, value["x"]))


def patterned(properties, patterns, *required):
    return {**make_object(**properties), "patternProperties": patterns, "required": list(required)}


NUMBER, TEXT, FLAG = {"type": "integer"}, {"type": "string", "maxLength": 4}, {"type": "boolean"}
PATTERNED = {
    "the same": (patterned({"name": NUMBER}, {"^n": NUMBER}, "name"), lambda v: type(v["name"]) is int),
    "narrower": (
        patterned({"name": NUMBER}, {"^n": {"minimum": 3, "maximum": 5}}, "name"),
        lambda v: 3 <= v["name"] <= 5,
    ),
    "one in common": (
        patterned({"name": {"enum": ["red", "the"]}}, {"^n": {"enum": ["the", "x"]}}, "name"),
        lambda v: v["name"] == "the",
    ),
    "another type": (patterned({"name": NUMBER, "red": FLAG}, {"^n": TEXT}, "red"), lambda v: "name" not in v),
    "none": (patterned({"name": NUMBER, "red": FLAG}, {"^n": False}, "red"), lambda v: set(v) == {"red"}),
    "inside": (
        patterned({"name": patterned({"red": NUMBER}, {"^r": {"minimum": 2}}, "red")}, {"^n": {}}, "name"),
        lambda v: v["name"]["red"] >= 2,
    ),
}
NAMES_OF_PATTERNS = {
    "^a$": ["a"],
    "^(a|b)$": ["a", "b"],
    "^a$|^b$": ["a", "b"],
    "^[ab]$": ["b", "a"],
    "^a{2}$": ["aa"],
    r"^a\.b$": ["a.b"],
    "^a/b c$": ["a/b c"],
    "^(a|b)+$": ["a"],
    "^a": ["a"],
}
CALLED = StructuredOutputs(
    grammar='%llguidance {}\nstart: "<" %json '
    + json.dumps(patterned({"a": NUMBER}, {"^a$": {"maximum": 3}}, "a"))
    + ' ">"'
)
for pattern, names in NAMES_OF_PATTERNS.items():
    PATTERNED[pattern] = (
        patterned(dict.fromkeys(names, NUMBER), {pattern: {"maximum": 3}}, names[0]),
        lambda value, first=names[0]: value[first] <= 3,
    )


@pytest.mark.parametrize(("schema", "is_right"), PATTERNED.values(), ids=PATTERNED.keys())
def test_a_declared_name_that_a_pattern_has_too_is_of_both(grammars, schema, is_right):
    wanted = StructuredOutputs(json=schema)
    for seed, more in enumerate((0, 1, 2, 5, 9, 20, 60) * 2):
        num = least(grammars, wanted) + more
        text = IDS.decode(draw(grammars.matcher(wanted, [5], 1 + num), num, seed))
        assert is_right(json.loads(text)), text


def test_names_of_patterns_within_a_grammar(grammars):
    for seed in range(14):
        num = least(grammars, CALLED) + 9
        text = IDS.decode(draw(grammars.matcher(CALLED, [5], 1 + num), num, seed))
        assert json.loads(text.strip("<>"))["a"] <= 3


@pytest.mark.parametrize("pattern", [TEXT, False])
def test_a_name_that_must_be_there_and_cannot_is_refused(grammars, pattern):
    with pytest.raises(RuntimeFault, match="required property 'name' is unsatisfiable"):
        grammars.compile(StructuredOutputs(json=patterned({"name": NUMBER}, {"^n": pattern}, "name")))


def test_without_the_rule_texts_are_cut_off(grammars, monkeypatch):
    wanted = StructuredOutputs(json=SCHEMAS[1])
    num = least(grammars, wanted) + 3
    monkeypatch.setattr(module.EndingRule, "restrict", lambda *given: None)
    texts = [IDS.decode(draw(grammars.matcher(wanted, [5], 1 + num), num, seed)) for seed in range(20)]
    assert any(not text.endswith("}") for text in texts)


def test_where_there_is_room_nothing_is_left_out(grammars):
    for schema in SCHEMAS:
        wanted = StructuredOutputs(json=schema)
        free, bound = grammars.matcher(wanted, [5]), grammars.matcher(wanted, [5], 2000)
        text = draw(grammars.matcher(wanted, [5], 2000), 60, 1)
        for end in range(min(len(text), 40)):
            np.testing.assert_array_equal(free.allowed(text[:end]), bound.allowed(text[:end]))


@pytest.mark.parametrize("more", [0, 2, 9, 30])
def test_a_path_of_drafts_has_the_mask_of_the_text_that_was_read(grammars, more):
    for schema in (SCHEMAS[1], SCHEMAS[13], SCHEMAS[29], OPTIONAL):
        wanted = StructuredOutputs(json=schema)
        num = least(grammars, wanted) + more
        text = draw(grammars.matcher(wanted, [5], 1 + num), num, 3)
        walked, half, read = (grammars.matcher(wanted, [5], 1 + num) for _ in range(3))
        half.read([5, *text[: len(text) // 2]])
        for end in range(len(text)):
            mask = walked.draft_mask(text[:end])
            np.testing.assert_array_equal(mask, read.allowed([]))
            if end >= len(text) // 2:
                np.testing.assert_array_equal(mask, half.allowed(text[len(text) // 2 : end]))
            read.read([5, *text[: end + 1]])


def test_an_answer_with_a_token_to_spare_ends_by_itself(grammars):
    engine = make_engine("none")
    wanted = StructuredOutputs(json=SCHEMAS[1], whitespace_pattern="")
    num = least(engine.grammars, wanted)
    reasons = []
    for more in (0, 1, 6):
        params = SamplingParams(num + more, temperature=2.0, seed=3, structured_outputs=wanted)
        [one] = engine.generate([[5]], params)
        assert is_valid(json.loads(IDS.decode(one.tokens)), SCHEMAS[1])
        reasons.append(one.finish_reason)
    assert reasons == ["length", "stop", "stop"]


def test_fewer_tokens_than_the_shortest_text_cut_it_off(grammars):
    wanted = StructuredOutputs(json=SCHEMAS[1])
    few = grammars.matcher(wanted, [5], 1 + least(grammars, wanted) - 1)
    np.testing.assert_array_equal(few.allowed([]), grammars.matcher(wanted, [5]).allowed([]))


def test_a_reasoning_leaves_room_for_the_answer(grammars):
    wanted = StructuredOutputs(json=SCHEMAS[1], reasoning=("<", ">"))
    for start in ("<", "b"):
        for more in (2, 3, 7):
            num = least(grammars, wanted) + more
            matcher, text = grammars.matcher(wanted, IDS(start), 1 + num), IDS(start)
            while len(text) < 1 + num and text[-1] != IDS("}")[0]:
                mask = matcher.allowed([])
                mask[EOS] = False
                token = IDS("x")[0] if mask[IDS("x")[0]] and ">" not in IDS.decode(text) and start == "<" else None
                text.append(int(np.flatnonzero(mask)[-1]) if token is None else token)
                matcher.read(text)
            assert is_valid(json.loads(IDS.decode(text).rpartition(">")[2].removeprefix("b")), SCHEMAS[1])


def test_grammars_that_hold_json_end_in_time_too(grammars):
    num = least(grammars, CALL) + 2
    for seed in range(8):
        text = IDS.decode(draw(grammars.matcher(CALL, [5], 1 + num), num, seed))
        assert text[0] + text[-1] == "<>" and is_valid(json.loads(text[1:-1]), SCHEMAS[1])
    for wanted in (StructuredOutputs(regex="a+"), StructuredOutputs(choice=("ab", "c"))):
        assert grammars.compile(wanted).checked.ending is None


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_answers_of_an_engine_are_whole_with_drafts_and_without(temperature):
    engine = make_engine("draft tree")
    prompts, params, schemas = [], [], []
    for at, schema in enumerate([*SCHEMAS[:14], OPTIONAL]):
        wanted = StructuredOutputs(json=schema, whitespace_pattern="")
        num = least(engine.grammars, wanted) + at % 5
        prompts.append([5, at])
        schemas.append(schema)
        params.append(SamplingParams(num, temperature=temperature, seed=at, structured_outputs=wanted))
    drafted, plain = engine.generate(prompts, params), make_engine("none").generate(prompts, params)
    assert temperature or [one.tokens for one in drafted] == [one.tokens for one in plain]
    for one, schema in zip([*drafted, *plain], [*schemas, *schemas], strict=True):
        value = json.loads(IDS.decode(one.tokens))
        assert schema is OPTIONAL or is_valid(value, schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"a": make_object(x={"$ref": "#/$defs/a"})}, "$ref": "#/$defs/a"},
        make_object(x={"$ref": "#"}),
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"anyOf": [make_object(x={"$ref": "#"}), make_object(y={"$ref": "#"})]},
        {"$defs": {"a": make_object(x={"$ref": "#/$defs/b"}), "b": make_object(y={"$ref": "#/$defs/a"})}}
        | {"$ref": "#/$defs/a"},
    ],
)
def test_a_schema_whose_values_never_end_is_refused(grammars, schema):
    with pytest.raises(RuntimeFault, match="an empty language"):
        grammars.compile(StructuredOutputs(json=schema))


SEVERAL = make_object(**{f"a{at}": {"type": "string"} for at in range(9)})
CALLS = {"anyOf": [make_object(name={"const": "go"}), make_object(name={"const": "see"}, a=SEVERAL)]}


@pytest.mark.parametrize(
    ("schema", "size", "growth"),
    [
        (True, 1, 12),
        ({"type": "string"}, 2, 12),
        ({"type": "string", "minLength": 50}, 52, 64),
        ({"enum": ["a", "bbbbbbbb"]}, 3, 22),
        ({"type": "array", "items": {"type": "null"}, "minItems": 4}, 10, 14),
        (make_object(a={"type": "null"}), 9, 12),
        (make_object(é={"enum": ["é"]}), 11, 12),
        (SEVERAL, 83, 12),
        (CALLS, 16, 119),
        ({"anyOf": [{"type": "null"}, make_object(a={"type": "null"})]}, 2, 23),
        ({"type": "array", "items": {"$ref": "#"}}, 2, 17),
        ({"properties": {"x": {"$ref": "#"}}}, 1, 21),
        ({"properties": {"x": {"$ref": "#"}}, "required": ["x"]}, 1, 23),
    ],
)
def test_sizes_of_schemas(schema, size, growth):
    assert SchemaSizes(schema, len).least == size
    whole = json.dumps({"grammars": [{"json_schema": schema}]})
    assert growth_of_grammar(whole, len) == growth
    assert growth_of_grammar("start: /a/", len) is None
    if isinstance(schema, dict):
        assert growth_of_grammar(f"start: %json {json.dumps(schema)}", len) >= 12 + size


def test_parts_that_must_come_leave_out_nothing(grammars):
    wanted = StructuredOutputs(json=SEVERAL)
    num = 1 + least(grammars, wanted) + 16
    first = grammars.matcher(wanted, [5], num).allowed([])
    np.testing.assert_array_equal(first, grammars.matcher(wanted, [5]).allowed([]))
