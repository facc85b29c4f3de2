# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/messages`, the part of Anthropic's Messages API that agents need: the chat of a body, and its answer."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from speccompile.runtime.requests import Speculation
from speccompile.serving.openai.bodies import LABELS, Body, NoOp, TextOrList, by_type, tag
from speccompile.serving.openai.chat import ChatApi, chat_from_fields
from speccompile.serving.openai.errors import ApiError
from speccompile.serving.openai.events import CALL, REASONING, Answer, Event, Part
from speccompile.serving.openai.server import Api, OpenAIServer

_CACHED = {"cache_control": LABELS}
_CITED = {**_CACHED, "citations": NoOp("put them into the text", ([],))}


class TextBlock(Body):
    """A text."""

    no_op_fields: ClassVar = _CITED

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """A reasoning of the model, sent back."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class UseBlock(Body):
    """A call of the model, sent back."""

    no_op_fields: ClassVar = {**_CACHED, "caller": NoOp("tools are called by the model alone", ({"type": "direct"},))}

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ResultBlock(Body):
    """The result of a call."""

    no_op_fields: ClassVar = _CACHED

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOrList[TextBlock] = ""
    is_error: bool = False


UserBlock = Annotated[
    Annotated[TextBlock, tag("text")] | Annotated[ResultBlock, tag("tool_result")], by_type("text", "tool_result")
]
AssistantBlock = Annotated[
    Annotated[TextBlock, tag("text")]
    | Annotated[UseBlock, tag("tool_use")]
    | Annotated[ThinkingBlock, tag("thinking")],
    by_type("text", "tool_use", "thinking"),
]


class UserTurn(Body):
    """Texts, and results of calls."""

    role: Literal["user"]
    content: TextOrList[UserBlock]

    def chat(self) -> Iterator[dict[str, Any]]:
        """Yields the messages of a chat: a result has one of its own."""
        if isinstance(self.content, str):
            yield {"role": "user", "content": self.content}
            return
        for block in self.content:
            if isinstance(block, ResultBlock):
                text = _joined(block.content)
                content = f"Error: {text}" if block.is_error else text
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        if texts := [block.text for block in self.content if isinstance(block, TextBlock)]:
            yield {"role": "user", "content": "".join(texts)}


class AssistantTurn(Body):
    """Texts, calls and reasoning."""

    role: Literal["assistant"]
    content: TextOrList[AssistantBlock]

    def chat(self) -> Iterator[dict[str, Any]]:
        """Yields the one message of a chat."""
        if isinstance(self.content, str):
            yield {"role": "assistant", "content": self.content}
            return
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for block in self.content:
            if isinstance(block, TextBlock):
                message["content"] += block.text
            elif isinstance(block, ThinkingBlock):
                message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
            else:
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                message.setdefault("tool_calls", []).append({"id": block.id, "function": function})
        yield message


Turn = Annotated[
    Annotated[UserTurn, tag("user")] | Annotated[AssistantTurn, tag("assistant")],
    by_type("user", "assistant", key="role"),
]


class ClientTool(Body):
    """A function of the client; tools that a server runs are not supported."""

    no_op_fields: ClassVar = _CACHED

    type: Literal["custom"] = "custom"
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {**function, "strict": self.strict}}


class ToolRule(Body):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> ToolRule:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError(
                "invalid_value", "it goes with the type `tool`, which needs it", {"param": "name"}
            )
        return self

    def chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"any": "required"}.get(self.type, self.type)


class Thinking(Body):
    """`thinking`: it has no effect, because the chat template decides."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class CountBody(Body):
    """`POST /v1/messages/count_tokens`."""

    no_op_fields: ClassVar = {
        "metadata": LABELS,
        "service_tier": NoOp("there is one tier", ("auto", "standard_only")),
        "cache_control": LABELS,
    }

    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    system: TextOrList[TextBlock] | None = None
    tools: list[ClientTool] = Field(default_factory=list)
    tool_choice: ToolRule | None = None
    thinking: Thinking | None = None

    @model_validator(mode="after")
    def _check_last(self) -> CountBody:
        last = self.messages[-1]
        blocks = last.content if isinstance(last, AssistantTurn) and not isinstance(last.content, str) else []
        if not all(isinstance(block, TextBlock) for block in blocks):
            facts = {"param": f"messages.{len(self.messages) - 1}.content"}
            raise PydanticCustomError("invalid_value", "an answer goes on from texts alone", facts)
        return self

    def chat(self) -> dict[str, Any]:
        """Returns the body of the chat that asks for the same; it continues an assistant's turn at the end."""
        system = [] if self.system is None else [{"role": "system", "content": _joined(self.system)}]
        messages = [message for turn in self.messages for message in turn.chat()]
        goes_on = isinstance(self.messages[-1], AssistantTurn)
        chat: dict[str, Any] = {"model": self.model, "messages": system + messages}
        if goes_on:
            chat |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools:
            chat["tools"] = [tool.chat() for tool in self.tools]
        if self.tool_choice is not None:
            chat["tool_choice"] = self.tool_choice.chat()
            chat["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        return chat


class MessagesBody(CountBody):
    """`POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    speculation: Speculation = "auto"

    def chat(self) -> dict[str, Any]:
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k", "speculation")
        return {**super().chat(), "stop": self.stop_sequences, **{name: getattr(self, name) for name in same}}


def _joined(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


class MessagesApi(Api):
    """Messages."""

    path, body = "/v1/messages", MessagesBody

    def __init__(self, server: OpenAIServer, body: MessagesBody, answer: Answer) -> None:
        self._answer, [self._choice] = answer, answer.choices
        identity = f"msg_{uuid.uuid4().hex}"
        self._head = {"id": identity, "type": "message", "role": "assistant", "model": body.model or server.model_name}

    @staticmethod
    async def answer_from_body(server: OpenAIServer, body: MessagesBody) -> Answer:
        return (await ChatApi.answer_from_body(server, chat_from_fields(body.chat()))).in_parts()

    def whole(self) -> dict[str, Any]:
        return self._message([_block(part, part.text) for part in self._choice.parts])

    async def stream(self) -> AsyncGenerator[bytes, None]:
        yield _event("message_start", message=self._message([]))
        part: Part | None = None
        try:
            async for event in self._answer.events():
                if event.part is not part:
                    if part is not None:
                        yield _event("content_block_stop", index=part.index)
                    if (part := event.part) is not None:
                        yield _event("content_block_start", index=part.index, content_block=_block(part, ""))
                if part is not None and event.text:
                    yield self.chunk_from_event(event, part)
        except ApiError as error:
            yield _event("error", error={"type": "api_error", "message": error.message})
            return
        used = {"output_tokens": self._answer.usage.completion_tokens}
        yield _event("message_delta", delta=self._end(), usage=used)
        yield _event("message_stop")

    def chunk_from_event(self, event: Event, part: Part) -> bytes:
        """Returns the event for a text that was added to a part."""
        names = {CALL: ("input_json_delta", "partial_json"), REASONING: ("thinking_delta", "thinking")}
        kind, key = names.get(part.kind, ("text_delta", "text"))
        return _event("content_block_delta", index=part.index, delta={"type": kind, key: event.text})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        used = self._answer.usage
        usage = {"input_tokens": used.prompt_tokens, "output_tokens": used.completion_tokens}
        return {**self._head, "content": content, **self._end(), "usage": usage}

    def _end(self) -> dict[str, str | None]:
        if (last := self._choice.last) is None:
            return {"stop_reason": None, "stop_sequence": None}
        reason = "tool_use" if self._choice.calls else "end_turn"
        if last.finish_reason != "stop":
            reason = "max_tokens"
        elif last.stop_string is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": last.stop_string}

    @staticmethod
    def json_from_error(error: ApiError) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}
        kind = "invalid_request_error" if error.status == 400 else kinds.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields}, ensure_ascii=False)}\n\n".encode()


def _block(part: Part, text: str) -> dict[str, Any]:
    if part.kind == REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    if part.kind != CALL:
        return {"type": "text", "text": text}
    try:
        value = json.loads(text or "{}")
    except ValueError:  # cut off
        value = {}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": value}
