# SPDX-License-Identifier: Apache-2.0
"""What a text has to look like: one constraint, in the words of vLLM's `structured_outputs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from speccompile.common.surfaces import Kind
from speccompile.errors import RuntimeFault

WHERE = "SamplingParams.structured_outputs"
CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True)
class StructuredOutputs:
    """One of the first six fields is given; the text then is of its language.

    Args:
        structural_tag: `{"structures": [{"begin", "schema", "end"}], "triggers": [..]}`: free text, but what follows a
            trigger is one of the structures; or `{"format": {"type", ..}}` with xgrammar's types
            (docs/reference/server.md).
        whitespace_pattern: a regular expression of the white space that may stand between the tokens of JSON; "": none;
            None: a space, or a line end and an indent of 20 at most.
        reasoning: markers of one token each that stand around a free text before it: ("<think>", "</think>").

    Raises:
        RuntimeFault: none or several are given, or one is of another type.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None  # a regular expression that the whole text matches
    choice: tuple[str, ...] | None = None
    grammar: str | None = None  # in Lark's syntax as llguidance reads it, or in GBNF
    structural_tag: str | Mapping[str, Any] | None = None
    whitespace_pattern: str | None = None
    reasoning: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            got = " and ".join(given) or "no constraint"
            raise RuntimeFault(WHERE, got, f"one of {', '.join(CONSTRAINTS)}", "Give one constraint in a request.")
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, json.dumps(value))
        name, value = given[0], getattr(self, given[0])
        if name == "choice":
            is_right = isinstance(value, list | tuple) and value and all(isinstance(v, str) and v for v in value)
            value = tuple(value) if is_right else value
            object.__setattr__(self, name, value)
        else:
            is_right = value is True if name == "json_object" else isinstance(value, str) and bool(value)
        space: object = self.whitespace_pattern
        if space is not None and not isinstance(space, str):
            name, value, is_right = "whitespace_pattern", space, False
        if not is_right:
            others = {
                "choice": "a list of non-empty texts",
                "json_object": "true",
                "whitespace_pattern": "a regular expression",
            }
            expected = others.get(name, "a text that is not empty")
            raise RuntimeFault(f"{WHERE} ({name})", repr(value)[:200], expected, "Correct the request.")

    @property
    def kind(self) -> str:
        return next(name for name in CONSTRAINTS if getattr(self, name) not in (None, False))


def _read(value: Any) -> StructuredOutputs | None:
    if value is None or isinstance(value, StructuredOutputs):
        return value
    known = {field.name for field in fields(StructuredOutputs)}
    if not isinstance(value, Mapping) or not set(value) <= known:
        raise TypeError("no constraint")
    return StructuredOutputs(**value)


CONSTRAINT = Kind(_read, f"a StructuredOutputs, or a mapping with one of {', '.join(CONSTRAINTS)}")
