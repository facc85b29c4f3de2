# SPDX-License-Identifier: Apache-2.0
"""The bodies of requests: OpenAI's fields, vLLM's names for those that OpenAI has not, and our own.

A field that is not here is refused. A field of OpenAI's that this server cannot honour may have the value that means
"not wanted"; any other is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from speccompile.runtime.requests import Speculation

_NO_LOGITS = "verification runs inside the graph and gives tokens, not probabilities"
_NO_TOOLS = "the server does not read or write tool calls"

# Field: (values that ask for nothing, why any other is refused).
UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "logprobs": ((False,), _NO_LOGITS),
    "top_logprobs": ((0,), _NO_LOGITS),
    "prompt_logprobs": ((), _NO_LOGITS),
    "best_of": ((1,), _NO_LOGITS),
    "echo": ((False,), "put the prompt in front of the text yourself"),
    "suffix": (("",), "the target continues texts, it does not fill gaps"),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none",), _NO_TOOLS),
    "parallel_tool_calls": ((), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none",), _NO_TOOLS),
    "response_format": (({"type": "text"},), "the output is not constrained"),
    "modalities": ((["text"],), "text is all it makes"),
    "audio": ((), "text is all it makes"),
    "prediction": ((), "the bundle's own speculator drafts"),
    "reasoning_effort": ((), "use chat_template_kwargs where the chat template knows of it"),
    "store": ((False,), "nothing is stored"),
    "metadata": (({},), "nothing is stored"),
    "min_tokens": ((0,), "use ignore_eos, or forbid the end with logit_bias"),
    "guided_json": ((), "the output is not constrained"),
    "use_beam_search": ((False,), "tokens are drawn from the target's law alone"),
}

Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """`stream_options`: `include_usage` asks for a last chunk that has the usage and no choice."""

    include_usage: bool = False


class Sampled(_Body):
    """What completions and chat completions have in common. None: the bundle's default."""

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
    user: str | None = Field(None, description="A label; it has no influence.")
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

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        for name in UNSUPPORTED.keys() & given.keys():
            neutral, reason = UNSUPPORTED[name]
            if given[name] not in neutral or isinstance(given[name], bool) != isinstance(neutral[0], bool):
                raise PydanticCustomError(
                    "unsupported_field", "it is not supported: {reason}", {"param": name, "reason": reason}
                )
            del given[name]
        return given

    @model_validator(mode="after")
    def _check_stream_options(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("invalid_value", "it goes with `stream: true` only", {"param": "stream_options"})
        return self


class CompletionBody(Sampled):
    """`POST /v1/completions`. A list of prompts gives n choices for each, in their order."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]

    def prompts(self) -> list[str | list[int]]:
        """One or more texts, or lists of token ids."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(_Body):
    """A part of a message's content; text is all there is."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        # Clients send back an answer's message as it came: with tool_calls null, refusal null and the like.
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data

    def for_template(self) -> dict[str, Any]:
        """What a chat template reads."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


class ChatBody(Sampled):
    """`POST /v1/chat/completions`."""

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
