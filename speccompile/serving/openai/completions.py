# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/completions`: its body, the request of it, and its answers. Chat completions build on these."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

from pydantic import field_validator

from speccompile.common.tokenizer_file import LONG, encode_text
from speccompile.core.sampling_params import SamplingParams, StructuredOutputs
from speccompile.errors import RuntimeFault
from speccompile.runtime.images import Image
from speccompile.runtime.logprobs import TokenLogprobs
from speccompile.runtime.requests import Busy, Request
from speccompile.runtime.service import Service
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.serving.openai.bodies import (
    COMPLETION,
    NumLogprobs,
    Sampled,
    StreamOptions,
    TokenId,
    sampling_from_body,
)
from speccompile.serving.openai.errors import ApiError, error_from_fault, request_timeout
from speccompile.serving.openai.events import TEXT, Answer, Choice, Event, Usage
from speccompile.serving.openai.server import DONE, Api, OpenAIServer, event_from_json

MAX_CHOICES = 128  # of one request


_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


class CompletionBody(Sampled):
    """`POST /v1/completions`. A list of prompts gives n choices for each, in their order."""

    no_op_fields: ClassVar = COMPLETION

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
        numbers = [num for num in (self.prompt_logprobs, self.logprobs if self.echo else None) if num is not None]
        return max(numbers, default=None)

    @property
    def is_prompt_only(self) -> bool:
        return self.max_tokens == 0 and (self.echo or self.prompt_logprobs is not None)

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts, each a text or a list of token ids."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class CompletionApi(Api):
    """Completions."""

    path, body = "/v1/completions", CompletionBody
    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, server: OpenAIServer, body: Sampled, answer: Answer) -> None:
        self._fields, self._answer, self._options = body, answer, body.stream_options or StreamOptions()
        self._identity = {
            "id": f"{self.prefix}{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model or server.model_name,
            "system_fingerprint": server.fingerprint,
        }
        self._has_metrics = server.options.request_metrics
        self._texts = server.token_texts
        self._prompts = _echoed(body, answer, server.engine.tokenizer)
        self._lengths: dict[int, int] = {}  # characters of each choice in a stream, so far

    @staticmethod
    async def answer_from_body(server: OpenAIServer, body: CompletionBody) -> Answer:
        engine, prompts = server.engine, body.prompts()
        if not prompts or (body.n <= MAX_CHOICES < len(prompts) * body.n):
            message = (
                f"`prompt`: got {len(prompts)} prompts with {body.n} outputs each, expected 1 to {MAX_CHOICES} in all."
            )
            raise ApiError(400, message, param="prompt", code="invalid_value")
        sampling, constraint = sampling_from_body(body, engine.defaults), structured_from_body(body)
        ids = [await encode(engine, p, special=True) if isinstance(p, str) else p for p in prompts]
        for tokens in ids:
            check_length(tokens, body, engine)
        sampling = await constrained(sampling, constraint, server.service, body.timeout_s)
        requests = [request_from_tokens(ids[0], body, sampling)]
        for tokens in ids[1:]:
            if body.seed is None:
                sampling = replace(sampling, seed=secrets.randbits(63))
            requests.append(request_from_tokens(tokens, body, sampling))
        return Answer(requests, is_prompt_only=body.is_prompt_only)

    def whole(self) -> dict[str, Any]:
        choices = [self._whole_choice(choice) for choice in self._answer.choices]
        usage = json_from_usage(self._answer.usage)
        return {**self._identity, "object": self.whole_object, "choices": choices, "usage": usage, **self._metrics()}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        for choice in self._opening():
            yield self._chunk([choice])
        try:
            async for event in self._answer.events():
                yield self.chunk_from_event(event)
        except ApiError as error:
            yield event_from_json(error.json_from_error())
            yield DONE
            return
        if self._options.include_usage:
            yield self._chunk([], usage=json_from_usage(self._answer.usage), **self._metrics())
        yield DONE

    def chunk_from_event(self, event: Event) -> bytes:
        """Returns the chunk of an event."""
        choice, text, logprobs = event.choice, event.text, None
        if is_first := choice.index not in self._lengths:
            text = self._prompt_text(choice) + text
            self._lengths[choice.index] = len(self._prompt_text(choice))
        if event.logprobs or (is_first and choice.prompt_logprobs):
            logprobs = self._logprobs(choice, event.logprobs, self._lengths[choice.index], has_prompt=is_first)
            self._lengths[choice.index] += sum(self._texts.num_letters(entry.token) for entry in event.logprobs)
        return self._chunk([self._choice(choice, {"text": text}, logprobs, event.is_end)])

    def _opening(self) -> list[dict[str, Any]]:
        return []

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        prompt = self._prompt_text(choice)
        logprobs = self._logprobs(choice, choice.logprobs, len(prompt), has_prompt=True)
        whole = self._choice(choice, {"text": prompt + choice.text(TEXT)}, logprobs, True)
        if self._fields.prompt_logprobs is not None:
            whole["prompt_logprobs"] = self._texts.prompt(choice.prompt_logprobs)
        return whole

    def _prompt_text(self, choice: Choice) -> str:
        return self._prompts[choice.index][0] if self._prompts else ""

    def _logprobs(
        self, choice: Choice, entries: Sequence[TokenLogprobs], at: int, has_prompt: bool
    ) -> dict[str, Any] | None:
        if self._fields.num_logprobs is None:
            return None
        own = self._texts.completion(entries, at)
        if not (has_prompt and self._prompts):
            return own
        text, tokens = self._prompts[choice.index]
        prompt = self._texts.completion_prompt(tokens, choice.prompt_logprobs, text)
        return {name: values + own[name] for name, values in prompt.items()}

    def _choice(
        self, choice: Choice, content: Mapping[str, Any], logprobs: dict[str, Any] | None, is_end: bool
    ) -> dict[str, Any]:
        reason = choice.finish_reason if is_end else None
        part = {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": reason}
        if is_end and choice.last is not None and self._fields.return_stats:
            part["stats"] = choice.last.stats
        return part

    def _chunk(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        chunk = {**self._identity, "object": self.chunk_object, "choices": choices}
        if self._options.include_usage:
            is_running = self._options.continuous_usage_stats
            chunk["usage"] = json_from_usage(self._answer.usage) if is_running else None
        return event_from_json({**chunk, **fields})

    def _metrics(self) -> dict[str, Any]:
        if not self._has_metrics or len(self._answer.choices) > 1 or (last := self._answer.choices[0].last) is None:
            return {}
        return {"metrics": metrics_from_stats(last.stats or {})}


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


def _echoed(body: Sampled, answer: Answer, tokenizer: Any) -> list[tuple[str, Sequence[int]]]:
    if not isinstance(body, CompletionBody) or not body.echo:
        return []
    texts = [
        prompt
        if isinstance(prompt, str)
        else str(tokenizer.decode(prompt, skip_special_tokens=False))
        if tokenizer
        else ""
        for prompt in body.prompts()
    ]
    ids = [cast("Sequence[int]", request.prompt) for request in answer.requests]
    return [pair for pair in zip(texts, ids, strict=True) for _ in range(body.n)]


def json_from_usage(usage: Usage) -> dict[str, Any]:
    """Returns OpenAI's `usage`; its `prediction` tokens are drafts: proposed, and then accepted or not."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.reused_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.drafts - usage.accepted,
        },
    }


def metrics_from_stats(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Returns vLLM's `metrics` of a request: acceptance, and times in milliseconds."""
    drafts, accepted = stats["num_draft_tokens"], stats["num_accepted"]
    steps, histogram = stats["num_steps"], stats["acceptance_histogram"]
    return {
        "speculative_decoding": {
            "mean_acceptance_length": stats["mean_acceptance_length"],
            "draft_acceptance_rate": accepted / drafts if drafts else 0.0,
            "acceptance_histogram": histogram,
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafts,
            "num_spec_tokens": len(histogram) - 1,
        },
        "time_to_first_token_ms": stats["time_to_first_token_ms"],
        "generation_time_ms": stats["step_ms"],
        "queue_time_ms": stats["queue_ms"],
        "mean_itl_ms": stats["time_per_token_ms"],
        "tokens_per_second": stats["tokens_per_s"],
    }
