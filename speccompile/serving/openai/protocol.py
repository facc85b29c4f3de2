# SPDX-License-Identifier: Apache-2.0
"""The bodies of requests: OpenAI's fields, vLLM's names for those that OpenAI has not, and our own.

A field that is not here is refused, unless it is one of `neutral` with a value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from speccompile.runtime.requests import Speculation
from speccompile.serving.openai.neutral import (
    BODY,
    CHAT,
    COMPLETION,
    MESSAGE,
    STREAM_OPTIONS,
    TEXT_PART,
    Neutral,
    drop_neutral,
)

Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    neutral: ClassVar[Mapping[str, Neutral]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        return drop_neutral(data, cls.neutral)


class StreamOptions(_Body):
    """`stream_options`: `include_usage` asks for a last chunk that has the usage and no choice."""

    neutral: ClassVar = STREAM_OPTIONS

    include_usage: bool = False


class Sampled(_Body):
    """What completions and chat completions have in common. None: the bundle's default."""

    neutral: ClassVar = BODY

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, Bias] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # As vLLM names them.
    top_k: int | None = Field(None, ge=-1, description="-1 and 0: off.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    # Our own.
    speculation: Speculation = Field("auto", description="on, off, or auto: as the server was started.")
    timeout_s: float | None = Field(None, gt=0, description="Seconds until the request is given up.")
    return_stats: bool = Field(False, description="Give `stats` with every choice.")

    @model_validator(mode="after")
    def _check_stream_options(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("invalid_value", "it goes with `stream: true` only", {"param": "stream_options"})
        return self


class CompletionBody(Sampled):
    """`POST /v1/completions`. A list of prompts gives n choices for each, in their order."""

    neutral: ClassVar = COMPLETION

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]

    def prompts(self) -> list[str | list[int]]:
        """One or more texts, or lists of token ids."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(_Body):
    """A part of a message's content; text is all there is."""

    neutral: ClassVar = TEXT_PART

    type: Literal["text"]
    text: str


class Message(_Body):
    """One turn of a chat."""

    neutral: ClassVar = MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """What a chat template reads."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


class ChatBody(Sampled):
    """`POST /v1/chat/completions`."""

    neutral: ClassVar = CHAT

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_limit(self) -> ChatBody:
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise PydanticCustomError(
                    "invalid_value", "it differs from max_completion_tokens: give one", {"param": "max_tokens"}
                )
            self.max_tokens = self.max_completion_tokens
        return self
