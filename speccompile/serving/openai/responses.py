# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/responses`, the part of OpenAI's Responses API that agents need: the chat of a body, and its answer."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from speccompile.runtime.requests import Speculation
from speccompile.serving.openai.bodies import BODY, LABEL, LABELS, Body, NoOp, TextOrList, by_type, tag
from speccompile.serving.openai.chat import ChatApi, chat_from_fields
from speccompile.serving.openai.chat_body import Function
from speccompile.serving.openai.errors import ApiError
from speccompile.serving.openai.events import CALL, REASONING, TEXT, Answer, Event, Part
from speccompile.serving.openai.server import Api, OpenAIServer

_LABELS = {"id": LABEL, "status": LABEL}  # of items that are sent back
_NO_STORE = NoOp("nothing is stored: send the whole input")
_NO_TOOLS = NoOp("the client's functions are the only tools")


class TextPart(Body):
    """A text in an item."""

    no_op_fields: ClassVar = {
        "annotations": NoOp("put them into the text", ([],)),
        "logprobs": NoOp("they are not read", ([],)),
        "prompt_cache_breakpoint": LABELS,
    }

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class MessageItem(Body):
    """A message."""

    no_op_fields: ClassVar = {**_LABELS, "phase": LABEL}

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrList[TextPart]


class CallItem(Body):
    """A call of the model, sent back."""

    no_op_fields: ClassVar = {**_LABELS, "caller": NoOp("tools are called by the model alone", ({"type": "direct"},))}

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResultItem(Body):
    """The result of a call."""

    no_op_fields: ClassVar = CallItem.no_op_fields

    type: Literal["function_call_output"]
    call_id: str
    output: TextOrList[TextPart]


class ReasoningItem(Body):
    """A reasoning of the model, sent back."""

    no_op_fields: ClassVar = {**_LABELS, "encrypted_content": NoOp("this server made none")}

    type: Literal["reasoning"]
    summary: list[TextPart] = Field(default_factory=list)
    content: list[TextPart] = Field(default_factory=list)


Item = Annotated[
    Annotated[MessageItem, tag("message")]
    | Annotated[CallItem, tag("function_call")]
    | Annotated[ResultItem, tag("function_call_output")]
    | Annotated[ReasoningItem, tag("reasoning")],
    by_type("message", "function_call", "function_call_output", "reasoning", default="message"),
]


class FunctionTool(Function):
    """A function that may be called; tools that a server runs are not supported."""

    no_op_fields: ClassVar = {"defer_loading": NoOp(_NO_TOOLS.reason, (False,))}

    type: Literal["function"]


class NamedChoice(Body):
    """One function that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def chat(self) -> dict[str, Any]:
        """Returns the `response_format` of a chat."""
        named = {"name": self.name, "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, **({"json_schema": named} if self.type == "json_schema" else {})}


class TextOptions(Body):
    """`text`."""

    no_op_fields: ClassVar = {"verbosity": BODY["verbosity"]}

    format: TextFormat | None = None


class Reasoning(Body):
    """`reasoning`: summaries are given anyway, and are the whole reasoning."""

    no_op_fields: ClassVar = {"summary": LABEL, "generate_summary": LABEL}

    effort: str | None = None


class ResponsesBody(Body):
    """`POST /v1/responses`."""

    no_op_fields: ClassVar = {
        **{name: BODY[name] for name in ("service_tier", "safety_identifier", "prompt_cache_key", "moderation")},
        **{name: BODY[name] for name in ("prompt_cache_options", "prompt_cache_retention")},
        "user": LABEL,
        "store": NoOp(_NO_STORE.reason, (False, True)),
        "previous_response_id": _NO_STORE,
        "conversation": _NO_STORE,
        "prompt": _NO_STORE,
        "context_management": _NO_STORE,
        "background": NoOp(_NO_STORE.reason, (False,)),
        "truncation": NoOp("shorten the input yourself", ("disabled",)),
        "include": NoOp("it asks for what this server does not have", ([], ["reasoning.encrypted_content"])),
        "top_logprobs": NoOp("it is for chat completions", (0,)),
        "max_tool_calls": _NO_TOOLS,
        "stream_options": NoOp("events are not padded", ({"include_obfuscation": False}, {})),
    }

    model: str | None = None
    input: TextOrList[Item]
    instructions: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict, description="Sent back with the answer.")
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool = True
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: Reasoning = Field(default_factory=Reasoning)
    speculation: Speculation = "auto"
    seed: int | None = None
    logit_bias: dict[str, float] | None = None

    @model_validator(mode="after")
    def _check_input(self) -> ResponsesBody:
        if not self.input:
            raise PydanticCustomError("invalid_value", "expected a text or a list of items", {"param": "input"})
        return self

    def chat(self) -> dict[str, Any]:
        """Returns the body of the chat that asks for the same."""
        same = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "speculation", "seed", "logit_bias")
        chat: dict[str, Any] = {name: getattr(self, name) for name in same}
        chat |= {"max_completion_tokens": self.max_output_tokens, "reasoning_effort": self.reasoning.effort}
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        chat["messages"] = [*system, *messages_from_items(items)]
        chat["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools
        ]
        chat["tool_choice"] = choice = self.tool_choice
        if isinstance(choice, NamedChoice):
            chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        if self.text.format is not None:
            chat["response_format"] = self.text.format.chat()
        return chat


def messages_from_items(items: list[Any]) -> list[dict[str, Any]]:
    """Returns the messages of a chat. Successive reasoning, text and calls become one message of the assistant."""
    messages: list[dict[str, Any]] = []
    is_open = False  # the last message is the assistant's and has no text or calls yet

    for item in items:
        last = messages[-1] if messages else {}
        is_own = last.get("role") == "assistant"
        if isinstance(item, ReasoningItem):
            parts = item.content or item.summary
            messages.append({"role": "assistant", "content": "", "reasoning_content": _joined(parts)})
            is_open = True
            continue
        if isinstance(item, CallItem):
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            if not is_own:
                last = {"role": "assistant", "content": ""}
                messages.append(last)
            last.setdefault("tool_calls", []).append(call)
        elif isinstance(item, ResultItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
        elif is_open and item.role == "assistant":
            last["content"] = _joined(item.content)
        else:
            messages.append({"role": item.role, "content": _joined(item.content)})
        is_open = False
    return messages


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ResponsesApi(Api):
    """Responses."""

    path, body = "/v1/responses", ResponsesBody

    def __init__(self, server: OpenAIServer, body: ResponsesBody, answer: Answer) -> None:
        self._answer, [self._choice] = answer, answer.choices
        self._num_events = 0
        choice = body.tool_choice
        self._head: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model or server.model_name,
            "error": None,
            "instructions": body.instructions,
            "metadata": body.metadata,
            "parallel_tool_calls": body.parallel_tool_calls,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": choice.model_dump() if isinstance(choice, NamedChoice) else choice or "auto",
            "tools": [{"type": tool.type, **tool.model_dump(exclude_unset=True)} for tool in body.tools],
        }

    @staticmethod
    async def answer_from_body(server: OpenAIServer, body: ResponsesBody) -> Answer:
        return (await ChatApi.answer_from_body(server, chat_from_fields(body.chat()))).in_parts()

    def whole(self) -> dict[str, Any]:
        return self._response(self._status(), [self._item(part) for part in self._choice.parts])

    async def stream(self) -> AsyncGenerator[bytes, None]:
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._response("in_progress", []))
        output: list[dict[str, Any]] = []
        part: Part | None = None
        try:
            async for event in self._answer.events():
                if event.part is not part:
                    if part is not None:
                        output.append(self._item(part))
                        for written in self._end_of_part(part):
                            yield written
                    if (part := event.part) is not None:
                        for written in self._start_of_part(part):
                            yield written
                if part is not None and event.text:
                    yield self.chunk_from_event(event, part)
        except ApiError as error:
            failed = {"code": error.code, "message": error.message}
            yield self._event("failed", response={**self._response("failed", output), "error": failed})
            return
        yield self._event(self._status(), response=self._response(self._status(), output))

    def chunk_from_event(self, event: Event, part: Part) -> bytes:
        """Returns the event for a text that was added to a part."""
        if part.kind == CALL:
            return self._in_part("function_call_arguments.delta", part, delta=event.text)
        if part.kind == REASONING:
            return self._in_part("reasoning_summary_text.delta", part, summary_index=0, delta=event.text)
        return self._in_part("output_text.delta", part, content_index=0, delta=event.text, logprobs=[])

    def _start_of_part(self, part: Part) -> list[bytes]:
        events = [self._event("output_item.added", output_index=part.index, item=_item(part, "", "in_progress"))]
        if part.kind == TEXT:
            events.append(self._in_part("content_part.added", part, content_index=0, part=_output_text("")))
        return events

    def _end_of_part(self, part: Part) -> list[bytes]:
        events = []
        if part.kind == CALL:
            done = {"name": part.name, "arguments": part.text}
            events.append(self._in_part("function_call_arguments.done", part, **done))
        elif part.kind == TEXT:
            at = {"content_index": 0}
            events.append(self._in_part("output_text.done", part, **at, text=part.text, logprobs=[]))
            events.append(self._in_part("content_part.done", part, **at, part=_output_text(part.text)))
        return [*events, self._event("output_item.done", output_index=part.index, item=self._item(part))]

    def _in_part(self, kind: str, inside: Part, **fields: Any) -> bytes:
        return self._event(kind, output_index=inside.index, item_id=_item_id(inside), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": f"response.{kind}", "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: response.{kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()

    def _status(self, part: Part | None = None) -> str:
        last, is_last = self._choice.last, part is None or part is self._choice.parts[-1]
        return "incomplete" if is_last and last is not None and last.finish_reason != "stop" else "completed"

    def _item(self, part: Part) -> dict[str, Any]:
        return _item(part, part.text, self._status(part))

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        used = self._answer.usage
        usage = {
            "input_tokens": used.prompt_tokens,
            "input_tokens_details": {"cached_tokens": used.reused_tokens},
            "output_tokens": used.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used.prompt_tokens + used.completion_tokens,
        }
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        ends = {"status": status, "incomplete_details": details, "output": output}
        return {**self._head, **ends, "usage": None if status == "in_progress" else usage}


def _item_id(part: Part) -> str:
    return f"fc_{part.call_id}" if part.kind == CALL else f"{'rs' if part.kind == REASONING else 'msg'}_{part.index}"


def _item(part: Part, text: str, status: str) -> dict[str, Any]:
    at = {"id": _item_id(part)}
    if part.kind == CALL:
        call = {**at, "type": "function_call", "call_id": part.call_id, "name": part.name}
        return {**call, "arguments": text, "status": status}
    if part.kind == REASONING:
        return {**at, "type": "reasoning", "summary": [{"type": "summary_text", "text": text}], "status": status}
    content = [_output_text(text)] if text else []
    return {**at, "type": "message", "status": status, "role": "assistant", "content": content}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}
