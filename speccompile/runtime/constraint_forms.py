# SPDX-License-Identifier: Apache-2.0
"""Constraints in the language of llguidance, with white space in JSON that has an end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from speccompile.core.sampling_params import WHERE, StructuredOutputs
from speccompile.errors import RuntimeFault
from speccompile.runtime.constraint_limits import EMPTY, fault_of_matcher, make_matcher
from speccompile.runtime.schema_sizes import with_schemas
from speccompile.runtime.structural_tags import lark_from_structural_tag

# Between the tokens of JSON: a space, or a line end and an indent. A model may go on with more for ever.
WHITE_SPACE = r" |\n {0,20}"


def refuse(wanted: StructuredOutputs, got: str, expected: str = "a grammar that compiles") -> NoReturn:
    """Refuses a constraint. Raises RuntimeFault: always."""
    todo = f"Correct the {wanted.kind}, or leave out what llguidance does not know."
    raise RuntimeFault(f"{WHERE} ({wanted.kind})", " ".join(got.split())[:200], expected, todo)


def grammar_from_constraint(wanted: StructuredOutputs, vocabulary: Any) -> str:
    """Returns a constraint as `llguidance.LLMatcher` takes it.

    Raises RuntimeFault: it has no form of `StructuredOutputs`.
    """
    try:
        return without_used_patterns(_grammar(wanted, vocabulary), vocabulary)
    except RecursionError:
        refuse(wanted, f"a {wanted.kind} that is nested too deeply")
    except (ValueError, IndexError, KeyError, AssertionError, TypeError, AttributeError) as fault:
        refuse(wanted, f"{type(fault).__name__}: {fault}")


def _grammar(wanted: StructuredOutputs, vocabulary: Any) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if wanted.json_object:
        return _json_grammar({"type": "object"}, wanted)
    if wanted.json is not None:
        schema = json.loads(str(wanted.json))
        if not isinstance(schema, dict | bool):
            refuse(wanted, f"a schema of type {type(schema).__name__}")
        return _json_grammar(schema, wanted)
    if wanted.regex is not None:
        return str(LLMatcher.grammar_from_regex(wanted.regex))
    if wanted.choice is not None:  # one terminal: a rule of thousands of texts is beyond the parser's rows
        texts = " | ".join(map(json.dumps, wanted.choice))
        return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}"))
    if wanted.grammar is not None:
        return str(LLMatcher.grammar_from_lark(any_to_lark(wanted.grammar)))
    tag = json.loads(str(wanted.structural_tag))
    return str(LLMatcher.grammar_from_lark(lark_from_structural_tag(tag, vocabulary)))


def _json_grammar(schema: Any, wanted: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    if schema is False:
        refuse(wanted, "a schema that no value has", "a text that is of it")
    whole = schema_with_white_space({} if schema is True else schema, wanted.whitespace_pattern)
    return str(LLMatcher.grammar_from_json_schema(json.dumps(whole)))


def schema_with_white_space(schema: dict[str, Any], pattern: str | None) -> dict[str, Any]:
    """Returns a schema that says which white space stands between its tokens; its own options come first.

    Args:
        pattern: a regular expression; "": no white space; None: `WHITE_SPACE`.
    """
    own = schema.get("x-guidance", {})
    if pattern == "":
        return {**schema, "x-guidance": {"whitespace_flexible": False, **own}}
    has_own = {"whitespace_pattern", "whitespace_flexible"} & own.keys()
    return schema if has_own else {**schema, "x-guidance": {"whitespace_pattern": pattern or WHITE_SPACE, **own}}


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
