# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests: their base, the sampling fields that they share and what they mean, and unions of objects.

A field that no body declares is refused, unless it is one of those whose no-op values are listed here: clients and
front ends send the defaults of OpenAI's API and of vLLM's server. A value that is the documented default or that does
not change the text is accepted, any other is refused with the reason.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, create_model, model_validator
from pydantic_core import PydanticCustomError

from speccompile.common.json_reader import shown
from speccompile.common.parameters import BIASES, FLAG, INTEGER, NUMBER, STRINGS, TEXT, TOKENS, BodyField, Kind
from speccompile.core.sampling_params import SAMPLING_PARAMETERS, SamplingParams
from speccompile.errors import RuntimeFault
from speccompile.runtime.requests import Speculation
from speccompile.serving.openai.errors import MARK, ApiError, error_from_fault


@dataclass(frozen=True)
class NoOp:
    """Accepted values of a field that is not supported; null is one in every field."""

    reason: str  # why the server refuses other values
    values: tuple[Any, ...] = ()
    kind: type | None = None  # the field is a label: any value of this type is a no-op

    def holds(self, value: Any) -> bool:
        """Returns whether the value changes nothing."""
        if self.kind is not None and isinstance(value, self.kind):
            return True
        # True == 1 in Python, but not in JSON.
        return any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in self.values)


_CACHE = NoOp("prompts are kept in memory as long as there is room", ({}, {"mode": "implicit"}))
_STORE = "nothing is stored"
_TEMPLATE = "use chat_template_kwargs where the chat template knows of it"
_TEXT = "text is all it reads and makes"
_TOKENS = "answers are texts, without special tokens and stop strings"
_TOOLS = "tools are for chats"
_USE_BEAMS = "tokens are drawn from the target's distribution alone"

LABEL = NoOp("it is a text", kind=str)
LABELS = NoOp("it holds labels by name", kind=dict)

BODY: Mapping[str, NoOp] = {
    # OpenAI's.
    "best_of": NoOp("texts are not ranked", (1,)),
    "suffix": NoOp("the target continues texts, it does not fill gaps", ("",)),
    "service_tier": NoOp("there is one tier", ("auto", "default")),
    "store": NoOp(_STORE, (False,)),
    "metadata": LABELS,
    "user": LABEL,
    "safety_identifier": LABEL,
    "prompt_cache_key": LABEL,
    "prompt_cache_options": _CACHE,
    "prompt_cache_retention": NoOp(_CACHE.reason, ("in_memory",)),
    "functions": NoOp("use tools", ([],)),
    "function_call": NoOp("use tool_choice", ("none", "auto")),
    "modalities": NoOp(_TEXT, (["text"],)),
    "audio": NoOp(_TEXT),
    "prediction": NoOp("the bundle's own speculator drafts"),
    "verbosity": NoOp(_TEMPLATE, ("medium",)),
    "web_search_options": NoOp("nothing is looked up"),
    "moderation": NoOp("nothing is moderated"),
    # vLLM's.
    "use_beam_search": NoOp(_USE_BEAMS, (False,)),
    "length_penalty": NoOp(_USE_BEAMS, (1,)),
    "early_stopping": NoOp(_USE_BEAMS, (False,)),
    "skip_special_tokens": NoOp(_TOKENS, (True,)),
    "spaces_between_special_tokens": NoOp(_TOKENS, (True,)),
    "include_stop_str_in_output": NoOp(_TOKENS, (False,)),
    "detokenize": NoOp(_TOKENS, (True,)),
    "return_token_ids": NoOp(_TOKENS, (False,)),
    "return_tokens_as_token_ids": NoOp(_TOKENS, (False,)),
    "truncate_prompt_tokens": NoOp("shorten the prompt yourself"),
    "priority": NoOp("requests are answered in their order", (0,)),
    "cache_salt": NoOp("kept caches are shared by all requests"),
    "logits_processors": NoOp("requests bring no code", ([],)),
    "bad_words": NoOp("forbid tokens with logit_bias", ([],)),
    "allowed_token_ids": NoOp("forbid tokens with logit_bias"),
    "vllm_xargs": NoOp("there are none of them", ({},)),
    "include_reasoning": NoOp("a message has its reasoning where the model marks it", (True,)),
    "documents": NoOp(_TEMPLATE, ([],)),
    "chat_template": NoOp("the template is the bundle's own"),
    "mm_processor_kwargs": NoOp(_TEXT, ({},)),
}

# Texts are encoded with the special tokens that the tokenizer puts around them, chats without: see vLLM's defaults.
COMPLETION: Mapping[str, NoOp] = {
    **BODY,
    "add_special_tokens": NoOp("give token ids instead of a text", (True,)),
    "tools": NoOp(_TOOLS, ([],)),
    "tool_choice": NoOp(_TOOLS, ("none", "auto")),
    "parallel_tool_calls": NoOp(_TOOLS, (True, False)),
    "top_logprobs": NoOp("completions ask by `logprobs`", (0,)),
    "continue_final_message": NoOp("it is for chats", (False,)),
    "reasoning_effort": NoOp("it is for chat templates"),
}
CHAT: Mapping[str, NoOp] = {
    **BODY,
    "add_special_tokens": NoOp("the chat template writes them", (False,)),
    "echo": NoOp("the last message can be continued: continue_final_message", (False,)),
}

# An answer's message, sent back as it came.
MESSAGE: Mapping[str, NoOp] = {
    "function_call": NoOp("use tool_calls"),
    "refusal": NoOp("put it into `content`", ("",)),
    "annotations": NoOp("put them into `content`", ([],)),
    "audio": NoOp(_TEXT),
    "reasoning": NoOp("put it into `reasoning_content`", ("",)),
}

TEXT_PART: Mapping[str, NoOp] = {
    "annotations": MESSAGE["annotations"],
    "cache_control": LABELS,
    "prompt_cache_breakpoint": LABELS,
}

IMAGE_URL: Mapping[str, NoOp] = {"detail": NoOp("every image is read at one size", ("auto",))}

STREAM_OPTIONS: Mapping[str, NoOp] = {"include_obfuscation": NoOp("events are not padded", (False,))}


Item = TypeVar("Item")
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[int, Field(ge=0)]
_TOKEN_KEY = re.compile(r"0|[1-9][0-9]{0,9}")
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
    """A JSON object without undeclared fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    no_op_fields: ClassVar[Mapping[str, NoOp]] = {}  # that are not supported, with the values that change nothing

    @model_validator(mode="before")
    @classmethod
    def _drop_no_op_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        for name in cls.no_op_fields.keys() & given.keys():
            if not cls.no_op_fields[name].holds(given[name]):
                facts = {"param": name, "reason": cls.no_op_fields[name].reason}
                raise PydanticCustomError("unsupported_field", "it is not supported: {reason}", facts)
            del given[name]
        return given


class StreamOptions(Body):
    """`stream_options`: a last chunk that has the usage and no choice; with vLLM's field every chunk has it."""

    no_op_fields: ClassVar = STREAM_OPTIONS

    include_usage: bool = False
    continuous_usage_stats: bool = False


def _sampling_field(kind: Kind, field: BodyField) -> tuple[Any, Any]:
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
    """The fields that completions and chat completions share, the sampling parameters among them."""

    no_op_fields: ClassVar = BODY

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
        """Number of top tokens to return with each token; None: no logprobs."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of top tokens to return with each token of the prompt; None: no logprobs."""
        return self.prompt_logprobs

    @property
    def is_prompt_only(self) -> bool:
        """Whether the body requests facts about the prompt only."""
        return False

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


def sampling_from_body(body: Sampled, defaults: SamplingParams) -> SamplingParams:
    """Returns the bundle's defaults, overridden by the fields of the body; without a `seed` a random one."""
    given: dict[str, Any] = {}
    for name, declared in SAMPLING_PARAMETERS.items():
        if declared.body is not None:
            value = _value(getattr(body, declared.body.name or name), declared.kind)
            if value is not None:
                given[name] = declared.body.convert(value)
    if body.num_logprobs is not None:
        given["logprobs"] = body.num_logprobs
    if body.num_prompt_logprobs is not None:
        given["prompt_logprobs"] = body.num_prompt_logprobs
    if body.is_prompt_only:
        given["max_new_tokens"] = 1  # no engine stops before its first token
    given.setdefault("seed", secrets.randbits(63))
    try:
        sampling = replace(defaults, **given)
    except RuntimeFault as fault:
        raise error_from_fault(fault) from fault
    _check_min_tokens(body.min_tokens, sampling)
    return sampling


def _check_min_tokens(num: int, sampling: SamplingParams) -> None:
    ends = [] if sampling.ignore_eos else ["texts that may end with a token: add `ignore_eos: true`"]
    ends += ["`stop` or `stop_token_ids`: leave these out"] * bool(sampling.stop or sampling.stop_token_ids)
    if num > sampling.max_new_tokens:
        ends = [f"max_tokens of {sampling.max_new_tokens}: raise it"]
    if num and ends:
        message = f"`min_tokens`: it is not supported beside {' and '.join(ends)}."
        raise ApiError(400, message, param="min_tokens", code="unsupported_field")


def _value(value: Any, kind: Kind) -> Any:
    if kind is BIASES:
        return _biases(value) if value else None
    if kind is FLAG:
        return value or None
    if kind is STRINGS and isinstance(value, str):
        return (value,)
    return value


def _biases(biases: dict[str, float]) -> dict[int, float]:
    wrong = next((token for token in biases if not _TOKEN_KEY.fullmatch(token)), None)
    if wrong is not None:
        message = f"`logit_bias`: got the key {shown(wrong)}; expected a token id. Correct it."
        raise ApiError(400, message, param="logit_bias", code="invalid_value")
    return {int(token): bias for token, bias in biases.items()}


def tag(name: str) -> Tag:
    """Returns the mark of an alternative of a union: the value of `type` that selects it."""
    return Tag(MARK + name)


def by_type(*names: str, default: str = "", key: str = "type") -> Discriminator:
    """Returns the rule that selects an alternative of a union by the `type` of an object."""

    def choose(value: Any) -> str | None:
        found = value.get(key, default) if isinstance(value, dict) else getattr(value, key, None)
        return f"{MARK}{found}" if isinstance(found, str) else None

    return _discriminator(choose, f"expected an object whose `{key}` is {' or '.join(names)}")


def _discriminator(choose: Any, message: str) -> Discriminator:
    return Discriminator(choose, custom_error_type="invalid_value", custom_error_message=message)


def _choose_text_or_list(value: Any) -> str | None:
    return MARK + ("text" if isinstance(value, str) else "list") if isinstance(value, str | list) else None


TextOrList = Annotated[
    Annotated[str, tag("text")] | Annotated[list[Item], tag("list")],
    _discriminator(_choose_text_or_list, "expected a text or a list"),
]
