# SPDX-License-Identifier: Apache-2.0
"""From the fields that bodies share to a request of the scheduler: sampling, constraint, prompt."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from speccompile.common.parameters import BIASES, FLAG, STRINGS, Kind
from speccompile.common.tokenizer_file import LONG, encode_text
from speccompile.core.sampling_params import SAMPLING_PARAMETERS, SamplingParams, StructuredOutputs
from speccompile.errors import RuntimeFault
from speccompile.runtime.images import Image
from speccompile.runtime.requests import Busy, Request
from speccompile.runtime.service import Service
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.serving.openai.bodies import Sampled
from speccompile.serving.openai.errors import ApiError, error_from_fault, request_timeout

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


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
    wrong = next((token for token in biases if not (token.isascii() and token.isdigit())), None)
    if wrong is not None:
        raise ApiError(400, f"`logit_bias`: {wrong!r} is no token id.", param="logit_bias", code="invalid_value")
    return {int(token): bias for token, bias in biases.items()}


def structured_from_body(body: Sampled) -> tuple[str, StructuredOutputs] | None:
    """Returns the field with a constraint, and the constraint; None: the text is free."""
    given: dict[str, Mapping[str, Any]] = {}
    if body.response_format is not None and (constraint := _from_response_format(body.response_format)):
        given["response_format"] = constraint
    for field, name in _GUIDED.items():
        if (value := getattr(body, field)) is not None:
            given[field] = {name: value}
    if body.structured_outputs is not None:
        given["structured_outputs"] = body.structured_outputs
    if not given:
        return None
    field, fields = next(iter(given.items()))
    if len(given) > 1:
        message = f"`{field}`: got {' and '.join(given)}; expected one of them. Give one constraint in a request."
        raise ApiError(400, message, param=list(given)[1], code="invalid_value")
    try:
        return field, StructuredOutputs(**fields)
    except RuntimeFault as fault:
        raise error_from_constraint(fault, field) from fault
    except TypeError as fault:
        message = f"`{field}`: got {', '.join(fields)}; expected one of json, json_object, regex, choice, grammar, "
        raise ApiError(400, f"{message}structural_tag. Correct its keys.", param=field, code="invalid_value") from fault


def _from_response_format(given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        named = given.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else given.get("schema")
        if isinstance(schema, dict):
            is_strict = (named if isinstance(named, dict) else given).get("strict") is True
            return {"json": schema, "whitespace_pattern": "" if is_strict else None}
        message = "`response_format`: got no json_schema.schema; expected a JSON schema, an object. Add it."
        raise ApiError(400, message, param="response_format", code="invalid_value")
    if kind == "structural_tag":
        return {"structural_tag": {name: value for name, value in given.items() if name != "type"}}
    message = (
        f"`response_format`: got type {kind!r}; expected text, json_object, json_schema or structural_tag. Correct it."
    )
    raise ApiError(400, message, param="response_format", code="invalid_value")


def error_from_constraint(fault: RuntimeFault, field: str) -> ApiError:
    """Returns the answer to a request with a constraint that cannot be compiled; `field` has the constraint."""
    message = f"`{field}`: got {fault.got}; expected {fault.expected}. {fault.todo}"
    return ApiError(400, message, param=field, code="invalid_grammar")


async def constrained(
    sampling: SamplingParams,
    constraint: tuple[str, StructuredOutputs] | None,
    service: Service,
    timeout_s: float | None = None,
) -> SamplingParams:
    """Returns sampling parameters with a constraint, compiled within `timeout_s` seconds; it can be cancelled."""
    if constraint is None:
        return sampling
    field, outputs = constraint
    try:
        async with asyncio.timeout(timeout_s):
            await service.prepare(outputs)
    except TimeoutError as fault:
        raise request_timeout() from fault
    except Busy as fault:
        raise error_from_fault(fault) from fault
    except RuntimeFault as fault:
        raise error_from_constraint(fault, field) from fault
    return replace(sampling, structured_outputs=outputs)


def check_length(tokens: Sequence[int], body: Sampled, engine: SpecEngine) -> None:
    """Refuses a prompt that does not fit, and a `max_tokens` that does not fit after it."""
    try:
        engine.check_prompt("prompt", tokens)
    except RuntimeFault as fault:
        raise error_from_fault(fault) from fault
    context = engine.context.max_seq_len
    left = context - len(tokens)
    if body.max_tokens is not None and body.max_tokens > max(left, 1):
        message = (
            f"`max_tokens`: got {body.max_tokens} after a prompt of {len(tokens)} tokens; expected at most {left}, as "
            f"the context has {context}. Lower it, or leave it out."
        )
        raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")


def request_from_tokens(
    tokens: Sequence[int], body: Sampled, sampling: SamplingParams, images: Sequence[Image] = ()
) -> Request:
    """Returns the request of a prompt."""
    try:
        return Request(tokens, sampling, body.n, body.speculation, body.timeout_s, images=images)
    except RuntimeFault as fault:
        raise error_from_fault(fault) from fault


async def encode(engine: SpecEngine, text: str, special: bool) -> list[int]:
    """Returns the token ids of a text, a long one in a thread; `special`: with those that the tokenizer puts around.

    Raises:
        ApiError: the bundle has no tokenizer, or that fails on the text, or this cannot fit into the context.
    """
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ApiError(400, "This bundle has no tokenizer: give token ids.", param="prompt", code="no_tokenizer")

    try:
        if len(text) <= LONG:
            return encode_text(tokenizer, text, special=special)
        await asyncio.to_thread(engine.prompt_bytes.check, "prompt", text)
        return await asyncio.to_thread(encode_text, tokenizer, text, special=special)
    except RuntimeFault as fault:
        raise error_from_fault(fault) from fault
