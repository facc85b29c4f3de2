# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests: their base, the sampling fields that they share, and unions whose errors name one field.

A field that no body declares is refused, unless `no_op_fields` lists it and its value changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, create_model, model_validator
from pydantic_core import PydanticCustomError

from speccompile.common.surfaces import BIASES, FLAG, INTEGER, NUMBER, STRINGS, TEXT, TOKENS, BodyField, Kind
from speccompile.core.sampling_params import SAMPLING_PARAMETERS
from speccompile.runtime.requests import Speculation
from speccompile.serving.openai.no_op_fields import BODY, STREAM_OPTIONS, NoOp

Item = TypeVar("Item")
MARK = ":"  # begins the names of alternatives in unions, which `errors` leaves out of a field's path
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
