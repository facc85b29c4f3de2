# SPDX-License-Identifier: Apache-2.0
"""References in parameters of tools that must be called mean what they mean where the parameters stand alone."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from speccompile.core.sampling_params import StructuredOutputs
from speccompile.errors import RuntimeFault
from speccompile.serving.openai.tool_formats import TOOL_FORMATS, grammar_from_tools
from tests.runtime.grammar_lab import Pieces

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


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral", "gemma"])
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
        (Person.model_json_schema(), ADA, {**ADA, "address": {"street": "b", "kind": "c"}}),
        (None, {}, {"name": "f"}),
        ({}, {}, {"name": "f"}),
        ({"properties": {"a": INTEGER}}, {"a": 1}, [1]),
        ({"anyOf": [parameters(INTEGER), parameters(BOOLEAN)]}, {"a": True}, 3),
    ],
)
def test_a_reference_is_resolved_in_its_own_tool(grammars, form, schema, right, wrong):
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
