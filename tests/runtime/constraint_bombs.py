# SPDX-License-Identifier: Apache-2.0
"""Constraints that no text can follow in bounded time and memory, each with a part of its refusal."""

import json
from typing import Any

NUM = 1000


def chained(links: int, make: Any) -> dict[str, Any]:
    """Returns a schema of definitions that lead to one another."""
    names = {f"d{at}": make({"$ref": f"#/$defs/d{at + 1}"}) for at in range(links)}
    return {"$defs": {**names, f"d{links}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def nested(depth: int, before: str, inner: str, after: str) -> str:
    return before * depth + inner + after * depth


DEEP, EMPTY, SLOW = "nested too deeply", "an empty language", "more than 2 s"
BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "objects by reference": (
        {"json": chained(NUM, lambda to: {"type": "object", "properties": {"a": to}, "required": ["a"]})},
        DEEP,
    ),
    "references": ({"json": chained(4 * NUM, lambda to: to)}, DEEP),
    "arrays by reference": ({"json": chained(4 * NUM, lambda to: {"type": "array", "items": to})}, DEEP),
    "alternatives by reference": ({"json": chained(4 * NUM, lambda to: {"anyOf": [to, {"type": "null"}]})}, DEEP),
    "rules": (
        {"grammar": "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(3 * NUM)) + f'\nr{3 * NUM}: "b"'},
        DEEP,
    ),
    "terminals": (
        {"grammar": "start: T0\n" + "\n".join(f'T{i}: "a" T{i + 1}' for i in range(3 * NUM)) + f'\nT{3 * NUM}: "b"'},
        DEEP,
    ),
    "JSON in a text": ({"json": "[" * 5 * NUM}, DEEP),
    "a schema in a text": ({"json": nested(5 * NUM, '{"items":', "{}", "}")}, DEEP),
    "a tag in a text": ({"structural_tag": nested(5 * NUM, '{"format":', "{}", "}")}, DEEP),
    "GBNF": ({"grammar": f"root ::= {nested(20 * NUM, '(', 'a', ')')}"}, DEEP),
    "Lark": ({"grammar": f"start: {nested(20 * NUM, '(', chr(34) + 'a' + chr(34), ')')}"}, "too deeply nested"),
    "a regular expression": ({"regex": nested(20 * NUM, "(", "a", ")")}, "invalid regex"),
    "patterns of properties": (
        {"json": {"type": "object", "patternProperties": {f"^k{i:05d}$": {} for i in range(2 * NUM)}}},
        SLOW,
    ),
    "a reference to itself": ({"json": {"$ref": "#"}}, EMPTY),
    "references to each other": (
        {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        EMPTY,
    ),
    "a rule that is itself": ({"grammar": "start: start"}, EMPTY),
    "rules that are each other": ({"grammar": "start: a\na: b\nb: a"}, EMPTY),
    "an ambiguous grammar": ({"grammar": 'start: a\na: a a | "x" | '}, "an ambiguous grammar"),
    "texts that exclude each other": ({"grammar": "start: A\nA: /a/ & /b/"}, EMPTY),
    "optional letters": ({"regex": "(a?){300}a{300}"}, "too many expressions"),
    "a long constant": ({"json": {"const": " " * 200 * NUM}}, "a token that takes|more than 2 s"),
    "no value": ({"json": "false"}, "a schema that no value has"),
    "a grammar of 65,536 letters": (
        {"grammar": "start: " + " | ".join(['"a" "b"'] * (1 << 15))},
        "a bound of llguidance|more than 2 s",
    ),
}


def fields_of(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a request's body that ask for a constraint."""
    (kind, value), *_ = given.items()
    if kind == "structural_tag":
        return {"structured_outputs": {kind: value}}
    return {f"guided_{kind}": value if kind != "json" or isinstance(value, str) else json.loads(json.dumps(value))}
