# SPDX-License-Identifier: Apache-2.0
"""The body of `POST /v1/messages`, the part of Anthropic's API that agents need, and the chat that it stands for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from speccompile.runtime.requests import Speculation
from speccompile.serving.openai.neutral import LABELS, Neutral
from speccompile.serving.openai.protocol import Body
from speccompile.serving.openai.unions import by_type, tag, text_or_list

_CACHED = {"cache_control": LABELS}
_CITED = {**_CACHED, "citations": Neutral("put them into the text", ([],))}


class TextBlock(Body):
    """A text."""

    neutral: ClassVar = _CITED

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """A reasoning of the model, sent back."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class UseBlock(Body):
    """A call of the model, sent back."""

    neutral: ClassVar = {**_CACHED, "caller": Neutral("tools are called by the model alone", ({"type": "direct"},))}

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Texts = Annotated[Annotated[str, tag("text")] | Annotated[list[TextBlock], tag("list")], text_or_list()]


class ResultBlock(Body):
    """What a call gave."""

    neutral: ClassVar = _CACHED

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = ""
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
    content: Annotated[Annotated[str, tag("text")] | Annotated[list[UserBlock], tag("list")], text_or_list()]

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
    content: Annotated[Annotated[str, tag("text")] | Annotated[list[AssistantBlock], tag("list")], text_or_list()]

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
    """A function of the client; tools that a server would run are not known."""

    neutral: ClassVar = _CACHED

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
    """`thinking`, which changes nothing: a model thinks as its chat template has it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class CountBody(Body):
    """`POST /v1/messages/count_tokens`."""

    neutral: ClassVar = {
        "metadata": LABELS,
        "service_tier": Neutral("there is one tier", ("auto", "standard_only")),
        "cache_control": LABELS,
    }

    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    system: Texts | None = None
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
        """Returns the body of a chat that asks for the same; an assistant's turn at the end is continued."""
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
