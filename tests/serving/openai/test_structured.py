# SPDX-License-Identifier: Apache-2.0
"""Constraints by OpenAI's and vLLM's fields, over a service with a vocabulary for JSON."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from speccompile.common.chat_template import ChatTemplate
from speccompile.core.sampling_params import StructuredOutputs
from speccompile.errors import RuntimeFault
from speccompile.serving.openai.tool_formats import TOOL_FORMATS, grammar_from_tools
from tests.lab.servers import chat_server
from tests.runtime.grammar_lab import SCHEMAS, Pieces, is_valid
from tests.runtime.test_structured_text import make_engine
from tests.serving.asgi_lab import post

pytest.importorskip("llguidance")
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SCHEMA = SCHEMAS[13]
ASK = {"prompt": "a", "max_tokens": 200, "temperature": 1.0}


@pytest.fixture(scope="module")
def app():
    template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}")
    with chat_server(make_engine("draft tree"), template) as (app, _):
        yield app


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
    ids=["response_format", "guided object", "guided text", "structured_outputs"],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_every_choice_is_of_the_schema_in_whole_and_in_parts(app, path, asked):
    start = ASK if path == COMPLETION else {**ASK, "messages": [{"role": "user", "content": "a"}]}
    body = {name: value for name, value in start.items() if path == COMPLETION or name != "prompt"}
    body |= {"n": 3, "seed": 5, **asked}
    whole = post(app, path, body).json()["choices"]
    texts = [c["text"] if path == COMPLETION else c["message"]["content"] for c in whole]
    assert [c["finish_reason"] for c in whole] == ["stop"] * 3
    assert all(is_valid(json.loads(text), SCHEMA) for text in texts)
    parts = ["", "", ""]
    for event in post(app, path, {**body, "stream": True}).events()[:-1]:
        for c in event["choices"]:
            parts[c["index"]] += c["text"] if path == COMPLETION else c["delta"].get("content", "")
    assert parts == texts
    assert [
        c["text"] if path == COMPLETION else c["message"]["content"]
        for c in post(app, path, {**body, "speculation": "off"}).json()["choices"]
    ] == texts


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}}, ""),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": ""}}, ""),
        ({"guided_json": {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}}, ""),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " {1,2}"}}, "( {1,2})?"),
        ({"guided_json": SCHEMA}, r"( |\n {0,20})?"),
        ({"response_format": {"type": "json_object"}}, r"( |\n {0,20})?"),
    ],
)
def test_white_space_has_an_end(app, asked, pattern):
    spaces = []
    for choice in post(app, COMPLETION, {**ASK, "n": 16, "seed": 2, "logit_bias": {"1": 8}, **asked}).json()["choices"]:
        outside = re.sub(r'"([^"\\]|\\.)*"?|[^\s"]+', "x", choice["text"])
        spaces += re.findall(r"\s+", outside.strip())
    assert all(re.fullmatch(pattern, space) for space in spaces), spaces
    assert pattern == "" or spaces


@pytest.mark.parametrize(
    ("asked", "holds"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        ({"guided_regex": "x[0-9]{2}"}, lambda text: text[0] == "x" and text[1:].isdigit()),
        ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"guided_grammar": 'start: "a" DIGITS\nDIGITS: /[0-9]{3}/'}, lambda text: text[0] == "a" and len(text) == 4),
        ({"structured_outputs": {"choice": ["b", "c"]}}, lambda text: text in ("b", "c")),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "x[0-9]{2}"}}},
            lambda text: re.fullmatch("x[0-9]{2}", text),
        ),
        ({"response_format": {"type": "text"}}, lambda text: True),
    ],
)
def test_other_constraints(app, asked, holds):
    choice = post(app, COMPLETION, {**ASK, "seed": 1, **asked}).json()["choices"][0]
    assert holds(choice["text"]) or choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "got type 'xml'; expected text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "got no json_schema.schema; expected"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
            "response_format",
            "got Invalid type: objekt; expected a grammar that compiles. Correct the json",
        ),
        ({"guided_regex": "a[("}, "guided_regex", "invalid regex"),
        ({"guided_json": "{"}, "guided_json", "got JSONDecodeError"),
        ({"guided_choice": []}, "guided_choice", "expected a list of non-empty texts"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "got guided_regex and guided_choice"),
        ({"structured_outputs": {"jso": "a"}}, "structured_outputs", "expected one of json, json_object"),
        ({"structured_outputs": {}}, "structured_outputs", "got no constraint"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": 3}},
            "structured_outputs",
            "got 3; expected a regular expression",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "no structures"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format", "got format: no type"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "grammar", "grammar": "a"}}},
            "response_format",
            "got format: type 'grammar'; expected one of const_string",
        ),
    ],
)
def test_what_does_not_compile_is_a_400_by_its_field(app, asked, param, message):
    reply = post(app, COMPLETION, {**ASK, **asked})
    error = reply.json()["error"]
    assert (reply.status, error["param"]) == (400, param)
    assert message in error["message"] and "expected" in error["message"]


pytest.importorskip("llguidance")
IDS = Pieces()
INTEGER, BOOLEAN = {"type": "integer"}, {"type": "boolean"}


class Address(BaseModel):
    street: str
    kind: Literal["home", "work"] = "home"


class Person(BaseModel):
    name: str
    address: Address
    friends: list[Person] = []


def parameters(a: Any, **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": a}, "required": ["a"], "additionalProperties": False, **others}


def to(pointer: str) -> dict[str, Any]:
    return {"$ref": pointer}


PERSON = Person.model_json_schema()
BY_NAME = parameters(to("#/$defs/U"), **{"$defs": {"U": INTEGER}})
OTHER = parameters(to("#/$defs/U"), **{"$defs": {"U": BOOLEAN}})
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/A"}
ADA = {"name": "a", "address": {"street": "b"}, "friends": [{"name": "c", "address": {"street": "d", "kind": "work"}}]}


def accepts(grammars, form, tools, name, arguments):
    """Returns whether a text that is one call of these arguments is of the grammar."""
    family = TOOL_FORMATS[form]
    wanted = StructuredOutputs(grammar=grammar_from_tools(family, tools, 4, lambda text: None))
    call = json.dumps({"name": name, "parameters" if family.quote else family.arguments: arguments})
    begin = "" if family.is_bare or family.quote else family.begin[0] + family.around
    end = "" if family.quote else family.around + family.end if not family.is_bare else ""
    text = begin + (f"[{call}]" if family.is_list or family.quote else call) + end
    matcher = grammars.matcher(wanted, [])
    mask = matcher.allowed(IDS(text))
    return mask is not None and bool(mask[0])


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (BY_NAME, {"a": 1}, {"a": True}),
        (parameters(to("#/definitions/U"), definitions={"U": INTEGER}), {"a": 1}, {"a": "x"}),
        ({**DRAFT_7, "definitions": {"A": parameters(INTEGER)}}, {"a": 1}, {}),
        (parameters(to("#/$defs/a~1b"), **{"$defs": {"a/b": INTEGER}}), {"a": 1}, {"a": "x"}),
        (parameters(to("#/$defs/a~0b"), **{"$defs": {"a~b": INTEGER}}), {"a": 1}, {"a": "x"}),
        (parameters(to("#/$defs/a%20b"), **{"$defs": {"a b": INTEGER}}), {"a": 1}, {"a": "x"}),
        (parameters(to("#i"), **{"$defs": {"U": {**INTEGER, "$anchor": "i"}}}), {"a": 1}, {"a": "x"}),
        (parameters(to("http://x/y#/$defs/U"), **{"$defs": {"U": INTEGER}, "$id": "http://x/y"}), {"a": 1}, {"a": "x"}),
        ({**parameters({"anyOf": [to("#"), {"type": "null"}]})}, {"a": {"a": None}}, {"a": {"name": "f"}}),
        (parameters({"enum": [to("#/none"), 3]}), {"a": {"$ref": "#/none"}}, {"a": 4}),
        ({"properties": {"$ref": INTEGER, "$id": INTEGER}, "required": ["$ref", "$id"]}, {"$ref": 1, "$id": 2}, 3),
        (PERSON, ADA, {**ADA, "address": {"street": "b", "kind": "c"}}),
        (None, {}, {"name": "f"}),
        ({}, {}, {"name": "f"}),
        ({"properties": {"a": INTEGER}}, {"a": 1}, [1]),
        ({"anyOf": [parameters(INTEGER), parameters(BOOLEAN)]}, {"a": True}, 3),
    ],
)
def test_a_reference_is_resolved_in_its_own_tool(grammars, schema, right, wrong):
    check_reference(grammars, "hermes", schema, right, wrong)


@pytest.mark.parametrize("form", ["llama3_json", "mistral", "gemma"])
def test_every_family_gets_resolved_references(grammars, form):
    for schema, right, wrong in (
        (BY_NAME, {"a": 1}, {"a": True}),
        (PERSON, ADA, {**ADA, "address": {}}),
        (None, {}, 3),
    ):
        check_reference(grammars, form, schema, right, wrong)


def check_reference(grammars, form, schema, right, wrong):
    tool, other = {"name": "f", "parameters": schema}, {"name": "g", "parameters": OTHER}
    for tools in ([tool], [tool, other], [other, tool], [tool, {"name": "h", "parameters": schema}]):
        assert accepts(grammars, form, tools, "f", right) and not accepts(grammars, form, tools, "f", wrong)
        if other in tools:
            assert accepts(grammars, form, tools, "g", {"a": True}) and not accepts(
                grammars, form, tools, "g", {"a": 1}
            )


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("#/$defs/none", "Pointer '/$defs/none' does not exist"),
        ("#none", "Anchor 'none' does not exist"),
        ("http://x.y/z", "Resource 'http://x.y/z' is not present"),
        ("z.json", "Failed to resolve 'z.json'"),
        (3, "$ref must be a string, got 3"),
    ],
)
def test_a_reference_to_nothing_is_refused_by_its_name(grammars, reference, message):
    tools = [{"name": "f", "parameters": parameters({"$ref": reference})}]
    with pytest.raises(RuntimeFault) as fault:
        accepts(grammars, "hermes", tools, "f", {})
    assert message in fault.value.got
