# SPDX-License-Identifier: Apache-2.0
"""Names of a JSON object that a pattern leaves beside the declared ones: llguidance offers one even of none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from speccompile.runtime.constraint_limits import EMPTY, fault_of_matcher, make_matcher
from speccompile.runtime.schema_sizes import with_schemas

_PARTS = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SIGN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # of a regular expression: an escape, a class, a character
_ANY = r"(.|\n)*"


def without_used_patterns(grammar: str, vocabulary: Any) -> str:
    """Returns a grammar in whose JSON schemas each pattern leaves a name beside the declared ones."""
    if "patternProperties" not in grammar:
        return grammar
    return with_schemas(grammar, lambda schema: _changed(schema, vocabulary))


def _changed(schema: Any, vocabulary: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key, part in schema.items():
        if key in _PARTS:
            made[key] = _changed(part, vocabulary)
        elif key in _LISTS and isinstance(part, list):
            made[key] = [_changed(one, vocabulary) for one in part]
        elif key in _MAPS and isinstance(part, dict):
            made[key] = {name: _changed(one, vocabulary) for name, one in part.items()}
    names, patterns = made.get("properties"), made.get("patternProperties")
    if isinstance(names, dict) and isinstance(patterns, dict):
        used = {pattern: part for pattern, part in patterns.items() if _is_used(pattern, names, vocabulary)}
        made["patternProperties"] = {pattern: part for pattern, part in patterns.items() if pattern not in used}
        for name, own in names.items():
            if others := [part for pattern, part in used.items() if re.search(pattern, name)]:
                made["properties"] = {**made["properties"], name: {"allOf": [own, *others]}}
    return made


def _is_used(pattern: str, names: Mapping[str, Any], vocabulary: Any) -> bool:
    matching = [name for name in names if _matches(pattern, name)]
    wholes = list(_wholes(pattern))
    if not matching or None in wholes:
        return False
    texts, others = (" | ".join(parts) for parts in (map(str, wholes), map(json.dumps, matching)))
    matcher = make_matcher(vocabulary, f"start: NAME\nNAME: ({texts}) & ~({others})")
    if not matcher.is_error():
        matcher.compute_logit_bias()  # which looks whether a text follows
    return fault_of_matcher(matcher) == EMPTY


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def _wholes(pattern: str) -> Iterator[str | None]:
    """Yields the alternatives of a pattern as terminals of whole texts; None where an anchor stands inside of one."""
    parts: list[list[str]] = [[]]
    depth = 0
    for sign in _SIGN.findall(pattern):
        depth += (sign == "(") - (sign == ")")
        if sign == "|" and not depth:
            parts.append([])
        else:
            parts[-1].append(sign)
    for part in parts:
        starts, ends = part[:1] == ["^"], part[-1:] == ["$"]
        inner = part[int(starts) : len(part) - int(ends)]
        if "^" in inner or "$" in inner:
            yield None
        else:
            text = "".join(inner).replace("/", r"\/")
            yield f"/{'' if starts else _ANY}({text}){'' if ends else _ANY}/"
