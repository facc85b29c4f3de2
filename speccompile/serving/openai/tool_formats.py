# SPDX-License-Identifier: Apache-2.0
"""The formats of tool calls by family of models, and the marks of their reasoning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from speccompile.core.sampling_params import StructuredOutputs


@dataclass(frozen=True)
class ToolFormat:
    """The format of a family's calls."""

    begin: tuple[str, ...]  # the marks that begin a call or a list of calls; grammars write the first one
    end: str = ""  # the mark of its end; empty: the end of the JSON
    arguments: str = "arguments"
    is_list: bool = False
    is_bare: bool = False  # a text that begins with an object is a call without any mark
    quote: str = ""  # around texts in Gemma's own notation; empty: calls are JSON
    around: str = ""  # white space between the marks and the JSON
    template: str = ""


HERMES = ToolFormat(("<tool_call>",), "</tool_call>", around="\n", template="<tool_call>")
LLAMA = ToolFormat(("<|python_tag|>",), arguments="parameters", is_bare=True, template="<|python_tag|>")
MISTRAL = ToolFormat(("[TOOL_CALLS]",), is_list=True, template="[TOOL_CALLS]")
GEMMA = ToolFormat(("<|tool_call>",), "<tool_call|>", quote='<|"|>', template="<|tool_call>")
FUNCTION_GEMMA = ToolFormat(
    ("<start_function_call>",), "<end_function_call>", quote="<escape>", template="<start_function_call>"
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen": HERMES,
    "qwen3": HERMES,
    "llama3_json": LLAMA,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "gemma4": GEMMA,
    "functiongemma": FUNCTION_GEMMA,
}

# White space in calls that must be made, as `tojson` of chat templates writes it; free, a model may go on with it.
_SPACES = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}

Markers = tuple[str, str]
_THINK = ("<think>", "</think>")
REASONING: Mapping[str, Markers] = {
    "deepseek_r1": _THINK,
    "qwen3": _THINK,
    "glm45": _THINK,
    "think": _THINK,
    "mistral": ("[THINK]", "[/THINK]"),
}


def format_from_template(source: str) -> ToolFormat | None:
    """Returns the format of the family that a chat template belongs to; None: it is not known."""
    found = (one for one in (GEMMA, FUNCTION_GEMMA, HERMES, MISTRAL, LLAMA) if one.template in source)
    return next(found, None)


def markers_from_template(source: str) -> Markers | None:
    """Returns the marks of reasoning that a chat template knows; None: none."""
    return next((marks for marks in (_THINK, REASONING["mistral"]) if marks[1] in source), None)


def grammar_from_tools(form: ToolFormat, tools: Sequence[Mapping[str, Any]], max_calls: int, special: Any) -> str:
    """Returns a Lark grammar of texts that are calls and nothing else, at least one.

    A family's own notation becomes a JSON list, which `ToolReader` reads as well. White space is that of `json.dumps`.

    Args:
        special: returns how a grammar names the special token of a text; None: it is none.
    """
    key = "parameters" if form.quote else form.arguments
    all_parameters = [tool.get("parameters") or {} for tool in tools]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["name"]}, key: _arguments(all_parameters, at)},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for at, tool in enumerate(tools)
    ]
    one = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if form.is_list or form.quote:
        schema = json.dumps({"type": "array", "items": one, "minItems": 1, "maxItems": max_calls, **_SPACES})
        begin = "" if form.quote else f"{_named(form.begin[0], special)} "
        return f"%llguidance {{}}\nstart: {begin}%json {schema}"
    schema = json.dumps({**one, **_SPACES})
    if form.is_bare:
        return f"%llguidance {{}}\nstart: %json {schema}"
    around = json.dumps(form.around)
    call = f"{_named(form.begin[0], special)} {around} %json {schema} {around} {_named(form.end, special)}"
    more = f' ("\\n" call){{0,{max_calls - 1}}}' if max_calls > 1 else ""
    return f"%llguidance {{}}\nstart: call{more}\ncall: {call}"


def grammar_of_calls_or(calls: str, outputs: StructuredOutputs) -> str | None:
    """Returns a Lark grammar of texts that are calls, or follow a constraint; None: that is not one of JSON."""
    if outputs.json is None and not outputs.json_object:
        return None  # lexemes of other texts and of calls could begin alike, which llguidance does not tell apart
    schema = {"type": "object"} if outputs.json is None else from_json(str(outputs.json))
    value = json.dumps({**_SPACES, **schema} if isinstance(schema, dict) else schema)
    return f"{calls.replace('start:', 'calls:', 1)}\nstart: calls | value\nvalue: %json {value}"


def _arguments(all_parameters: Sequence[Mapping[str, Any]], at: int) -> dict[str, Any]:
    """Returns the schema of a function's arguments with an `$id`, so that its references keep their meaning."""
    if not (parameters := all_parameters[at]):
        return {"type": "object", "properties": {}, "additionalProperties": False}
    own = parameters.get("$id")
    is_own = isinstance(own, str) and ":" in own
    is_own = is_own and all(other == parameters for other in all_parameters if other.get("$id") == own)
    # A dialect of its own would hide the identity beside a reference, as drafts 4 to 7 have it.
    schema = {"type": "object", **{name: value for name, value in parameters.items() if name != "$schema"}}
    return {**schema, "$id": own if is_own else f"urn:tool:{at}"}


def _named(text: str, special: Any) -> str:
    named = special(text)
    return json.dumps(text) if named is None else str(named)
