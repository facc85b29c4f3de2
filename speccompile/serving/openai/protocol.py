# SPDX-License-Identifier: Apache-2.0
"""The bodies of requests: OpenAI's fields, vLLM's names for those that OpenAI has not, and our own.

A field that is not here is refused, unless it is one of `neutral` with a value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator, model_validator
from pydantic_core import PydanticCustomError

from speccompile.common.chat_prompts import message_for_template
from speccompile.common.surfaces import BIASES, FLAG, INTEGER, NUMBER, STRINGS, TEXT, TOKENS, BodyField, Kind
from speccompile.core.sampling_params import SAMPLING_PARAMETERS
from speccompile.runtime.requests import Speculation
from speccompile.serving.openai.neutral import (
    BODY,
    CHAT,
    COMPLETION,
    IMAGE_URL,
    MESSAGE,
    STREAM_OPTIONS,
    TEXT_PART,
    Neutral,
    drop_neutral,
)
from speccompile.serving.openai.unions import by_type, tag, text_or_list

Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[int, Field(ge=0)]
NumLogprobs = Annotated[int, Field(ge=0, le=20)]
_TYPES: Mapping[Kind, Any] = {
    INTEGER: int,
    NUMBER: float,
    STRINGS: str | list[str],
    TEXT: str,
    TOKENS: list[TokenId],
    BIASES: dict[str, Bias],
}


class Body(BaseModel):
    """An object of JSON whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    neutral: ClassVar[Mapping[str, Neutral]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        return drop_neutral(data, cls.neutral)


class StreamOptions(Body):
    """`stream_options`: `include_usage` asks for a last chunk that has the usage and no choice.

    With `continuous_usage_stats` beside it, as of vLLM, every chunk has the usage so far.
    """

    neutral: ClassVar = STREAM_OPTIONS

    include_usage: bool = False
    continuous_usage_stats: bool = False


def _sampling_field(kind: Kind, field: BodyField) -> tuple[Any, Any]:
    """Returns the type and the field of a sampling parameter. None, and a false flag: the bundle's default."""
    if kind is FLAG:
        return bool, Field(False, description=field.description or None)
    bounds: dict[str, Any] = {"ge": field.ge, "le": field.le}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    kind_type: Any = _TYPES[kind]
    if given:
        kind_type = Annotated[kind_type, Field(**given)]
    return kind_type | None, Field(None, description=field.description or None)


def _sampling_fields() -> Any:
    fields: dict[str, Any] = {
        declared.body.name or name: _sampling_field(declared.kind, declared.body)
        for name, declared in SAMPLING_PARAMETERS.items()
        if declared.body is not None
    }
    return create_model("_SamplingFields", __base__=Body, __module__=__name__, **fields)


_SamplingFields: Any = _sampling_fields()


class Sampled(_SamplingFields):  # type: ignore[misc]
    """What completions and chat completions have in common: the sampling parameters, and these fields."""

    neutral: ClassVar = BODY

    model: str | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    # vLLM's names.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    prompt_logprobs: NumLogprobs | None = None
    min_tokens: int = Field(0, ge=0, description="Beside `ignore_eos` alone.")
    structured_outputs: dict[str, Any] | None = None
    # Our own.
    speculation: Speculation = Field("auto", description="on, off, or auto: as the server was started.")
    timeout_s: float | None = Field(None, gt=0, description="Seconds until the request ends with a time-out.")
    return_stats: bool = Field(False, description="Give `stats` with every choice.")

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to name with each token; None: no logprobs."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @model_validator(mode="after")
    def _check_prompt_logprobs(self) -> Sampled:
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError("invalid_value", "streams do not have it", {"param": "prompt_logprobs"})
        return self

    @model_validator(mode="after")
    def _check_stream_options(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("invalid_value", "it goes with `stream: true` only", {"param": "stream_options"})
        return self


class CompletionBody(Sampled):
    """`POST /v1/completions`. A list of prompts gives n choices for each, in their order."""

    neutral: ClassVar = COMPLETION

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: NumLogprobs | None = None
    echo: bool = False

    @field_validator("logprobs", mode="before")
    @classmethod
    def _false_is_none(cls, value: Any) -> Any:
        return None if value is False else value

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        asked = [num for num in (self.prompt_logprobs, self.logprobs if self.echo else None) if num is not None]
        return max(asked, default=None)

    @property
    def tells_prompt_alone(self) -> bool:
        return self.max_tokens == 0 and (self.echo or self.prompt_logprobs is not None)

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(Body):
    """A text in a message's content."""

    neutral: ClassVar = TEXT_PART

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """A data URL: images are not fetched."""

    neutral: ClassVar = IMAGE_URL

    url: str


class ImagePart(Body):
    """An image in a message's content."""

    neutral: ClassVar = TEXT_PART

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[
    Annotated[TextPart, tag("text")] | Annotated[ImagePart, tag("image_url")], by_type("text", "image_url")
]
Content = Annotated[Annotated[str, tag("text")] | Annotated[list[Part], tag("list")], text_or_list()]


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

    neutral: ClassVar = MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
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
        parts = self.content if isinstance(self.content, list) else ()
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]


def _part_for_template(part: TextPart | ImagePart) -> dict[str, str]:
    return {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}


class ChatBody(Sampled):
    """`POST /v1/chat/completions`."""

    neutral: ClassVar = CHAT

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


class TokenizeBody(Body):
    """`POST /tokenize` of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
