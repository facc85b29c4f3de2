# SPDX-License-Identifier: Apache-2.0
"""Tools and reasoning of a chat: variables of the template, the grammar of required calls, and the reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from speccompile.common.chat_template import ChatTemplate
from speccompile.core.sampling_params import StructuredOutputs
from speccompile.errors import RuntimeFault
from speccompile.serving.openai.chat_body import ChatBody, ToolChoice
from speccompile.serving.openai.errors import ApiError
from speccompile.serving.openai.message import MessageReader
from speccompile.serving.openai.tool_formats import (
    REASONING,
    TOOL_FORMATS,
    Markers,
    ToolFormat,
    format_from_template,
    grammar_from_tools,
    grammar_of_calls_or,
    markers_from_template,
)

AUTO, NONE = "auto", "none"
MAX_CALLS = 16  # of one answer, where a grammar asks for calls


@dataclass(frozen=True)
class ChatFormats:
    """How the model writes tool calls and reasoning."""

    tools: ToolFormat | None = None  # its tool calls; None: not known
    markers: Markers | None = None  # of its reasoning; None: it has none
    special_tokens: dict[str, int] = field(default_factory=dict)  # ids of the tokenizer's special tokens by text

    def special(self, text: str) -> str | None:
        """Returns how a grammar names a special token; None: the text is none."""
        token = self.special_tokens.get(text)
        return None if token is None else f"<[{token}]>"


def check_parsers(tool_parser: str, reasoning_parser: str) -> None:
    """Refuses names that are no parsers."""
    for option, name, known in (
        ("--tool-call-parser", tool_parser, TOOL_FORMATS),
        ("--reasoning-parser", reasoning_parser, REASONING),
    ):
        if name not in (AUTO, NONE, *known):
            raise RuntimeFault(option, repr(name), f"auto, none, {', '.join(known)}", "Choose one of them.")


def formats_from_options(
    tool_parser: str, reasoning_parser: str, template: ChatTemplate | None, tokenizer: Any
) -> ChatFormats:
    """Returns the formats that a server's options ask for; `auto`: those of the chat template."""
    check_parsers(tool_parser, reasoning_parser)
    source = "" if template is None else template.source
    tools = format_from_template(source) if tool_parser == AUTO else TOOL_FORMATS.get(tool_parser)
    markers = markers_from_template(source) if reasoning_parser == AUTO else REASONING.get(reasoning_parser)
    has_ids = hasattr(tokenizer, "token_to_id")
    if markers is not None and reasoning_parser == AUTO:
        is_known = has_ids and all(tokenizer.token_to_id(marker) is not None for marker in markers)
        markers = markers if is_known else None
    added = tokenizer.get_added_tokens_decoder() if hasattr(tokenizer, "get_added_tokens_decoder") else {}
    return ChatFormats(tools, markers, {token.content: number for number, token in added.items() if token.special})


@dataclass(frozen=True)
class ChatPlan:
    """The parts of a chat's request besides its messages."""

    variables: dict[str, Any]
    constraint: tuple[str, StructuredOutputs] | None  # of its text, with the field that asks for it; None: free
    reader: Callable[[str], MessageReader] | None  # makes that of each choice; None: all is content


def plan_chat(
    body: ChatBody, formats: ChatFormats, template: ChatTemplate, constraint: tuple[str, StructuredOutputs] | None
) -> ChatPlan:
    """Returns the plan of a chat. Raises ApiError: tools, choice, model or constraint do not fit each other."""
    choice = body.tool_choice or (AUTO if body.tools else NONE)
    if choice == NONE or (choice == AUTO and not body.tools):
        form, variables = None, dict[str, Any]()
    else:
        form = _format(body, formats, template)
        variables = {"tools": [tool.model_dump(exclude_none=True) for tool in body.tools]}
        if choice == AUTO:
            constraint = _calls_or(body, form, formats, constraint)
        elif constraint is None or constraint[0] == "response_format":  # that of an answer without calls
            constraint = ("tool_choice", StructuredOutputs(grammar=_grammar(body, form, formats)))
        else:
            message = f"`tool_choice`: got a call that must be made and {constraint[0]}; expected one of them. "
            raise ApiError(400, f"{message}Leave one out.", param="tool_choice", code="invalid_value")
    markers = formats.markers
    if constraint is not None and markers is not None:
        field, outputs = constraint
        given = {name: getattr(outputs, name) for name in outputs.__dataclass_fields__}
        constraint = (field, StructuredOutputs(**{**given, "reasoning": markers}))
    if form is None and markers is None:
        return ChatPlan(variables, constraint, None)

    def reader(prompt: str) -> MessageReader:
        is_open = markers is not None and prompt.rstrip().endswith(markers[0])
        is_closed = markers is not None and prompt.rstrip().endswith(markers[1])
        max_calls = None if body.parallel_tool_calls else 1
        names = frozenset(tool.function.name for tool in body.tools)
        return MessageReader(markers, form, is_open, max_calls, names, is_closed)

    return ChatPlan(variables, constraint, reader)


def _format(body: ChatBody, formats: ChatFormats, template: ChatTemplate) -> ToolFormat:
    if not body.tools:
        message = "`tool_choice`: got no tools; expected `tools` to choose from. Add them, or leave it out."
        raise ApiError(400, message, param="tool_choice", code="invalid_value")
    if "tools" not in template.source:
        message = (
            "`tools`: got tools, and a chat template that does not write them; expected one that does. Serve a model "
            "that was trained to call tools."
        )
        raise ApiError(400, message, param="tools", code="no_tools_in_template")
    if formats.tools is None:
        message = (
            f"`tools`: got a model whose way to write calls is not known; expected one of {', '.join(TOOL_FORMATS)}. "
            "Start the server with --tool-call-parser."
        )
        raise ApiError(400, message, param="tools", code="no_tool_parser")
    return formats.tools


def _calls_or(
    body: ChatBody, form: ToolFormat, formats: ChatFormats, constraint: tuple[str, StructuredOutputs] | None
) -> tuple[str, StructuredOutputs] | None:
    if constraint is None:
        return None
    field, outputs = constraint
    try:
        grammar = grammar_of_calls_or(_grammar(body, form, formats), outputs)
    except ValueError as fault:
        message = f"`{field}`: got a text that is no JSON: {fault}; expected a JSON schema. Correct it."
        raise ApiError(400, message, param=field, code="invalid_grammar") from fault
    if grammar is None:
        message = (
            f"`{field}`: got a {outputs.kind} beside tools that the model may call; expected a JSON schema. "
            "Send `tool_choice: none`, or leave one out."
        )
        raise ApiError(400, message, param=field, code="invalid_value")
    return field, StructuredOutputs(grammar=grammar)


def _grammar(body: ChatBody, form: ToolFormat, formats: ChatFormats) -> str:
    functions = [tool.function.model_dump() for tool in body.tools]
    max_calls = MAX_CALLS if body.parallel_tool_calls else 1
    if isinstance(body.tool_choice, ToolChoice):
        name, max_calls = body.tool_choice.function.name, 1
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            message = f"`tool_choice`: got {name!r}; expected the name of one of `tools`. Correct it."
            raise ApiError(400, message, param="tool_choice", code="invalid_value")
    for function in functions:
        kind = (function["parameters"] or {}).get("type", "object")
        if kind != "object":
            message = (
                f"`tools`: got parameters of type {kind!r} of {function['name']!r}; expected an object. "
                "Name each argument among its properties."
            )
            raise ApiError(400, message, param="tools", code="invalid_value")
    return grammar_from_tools(form, functions, max_calls, formats.special)
