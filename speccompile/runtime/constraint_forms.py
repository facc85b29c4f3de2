# SPDX-License-Identifier: Apache-2.0
"""Constraints in the language of llguidance, with white space in JSON that has an end."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from speccompile.common.structured_outputs import WHERE, StructuredOutputs
from speccompile.errors import RuntimeFault
from speccompile.runtime.schema_names import without_used_patterns
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
