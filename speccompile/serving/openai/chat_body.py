# SPDX-License-Identifier: Apache-2.0
"""The body of `POST /v1/chat/completions`. Bodies of the Responses and Messages APIs are converted to it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from speccompile.common.chat_prompts import message_for_template
from speccompile.serving.openai.bodies import (
    CHAT,
    IMAGE_URL,
    MESSAGE,
    TEXT_PART,
    Body,
    NumLogprobs,
    Sampled,
    TextOrList,
    by_type,
    tag,
)


class TextPart(Body):
    """A text in a message's content."""

    no_op_fields: ClassVar = TEXT_PART

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """A data URL: images are not fetched."""

    no_op_fields: ClassVar = IMAGE_URL

    url: str


class ImagePart(Body):
    """An image in a message's content."""

    no_op_fields: ClassVar = TEXT_PART

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[
    Annotated[TextPart, tag("text")] | Annotated[ImagePart, tag("image_url")], by_type("text", "image_url")
]


class CalledFunction(Body):
    """The function of a tool call: arguments are JSON."""

    name: str
    arguments: str = "{}"


class ToolCall(Body):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


class Function(Body):
    """A function that may be called."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool: a function."""

    type: Literal["function"]
    function: Function


class _NamedTool(Body):
    name: str


class ToolChoice(Body):
    """One function that must be called."""

    type: Literal["function"]
    function: _NamedTool


class Message(Body):
    """One turn of a chat."""

    no_op_fields: ClassVar = MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOrList[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing", "Field required", {"param": "content"})
        return self

    def for_template(self) -> dict[str, Any]:
        """Returns the message as a chat template reads it; arguments of tool calls are objects."""
        content: Any = self.content
        if isinstance(content, list):
            content = [_part_for_template(part) for part in content]
        message: dict[str, Any] = {"role": self.role, "content": content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump(include={"id", "type", "function"}) for call in self.tool_calls]
        return message_for_template(message)

    def image_urls(self) -> list[str]:
        """Returns the URLs of its images, in order."""
        parts = self.content if isinstance(self.content, list) else ()
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]


def _part_for_template(part: TextPart | ImagePart) -> dict[str, str]:
    return {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}


class ChatBody(Sampled):
    """`POST /v1/chat/completions`."""

    no_op_fields: ClassVar = CHAT

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None  # the same by its older name
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = Field(None, description="For the chat template.")
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("invalid_value", "it goes with `logprobs: true` only", {"param": "top_logprobs"})
        return self

    @model_validator(mode="after")
    def _check_continued(self) -> ChatBody:
        last = self.messages[-1]
        wrong = {
            "the last message is not the assistant's": last.role != "assistant",
            "the last message has calls or images": bool(last.tool_calls or last.image_urls()),
            "it excludes add_generation_prompt": bool(self.add_generation_prompt),
        }
        if self.continue_final_message and (reasons := [reason for reason, holds in wrong.items() if holds]):
            raise PydanticCustomError("invalid_value", reasons[0], {"param": "continue_final_message"})
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> ChatBody:
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise PydanticCustomError(
                    "invalid_value", "it differs from max_completion_tokens: give one", {"param": "max_tokens"}
                )
            self.max_tokens = self.max_completion_tokens
        return self
