# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/completions`: its body and its answers, which chat completions build on."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar, cast

from pydantic import field_validator

from speccompile.runtime.logprobs import TokenLogprobs
from speccompile.serving.openai.bodies import COMPLETION, NumLogprobs, Sampled, StreamOptions, TokenId
from speccompile.serving.openai.errors import ApiError
from speccompile.serving.openai.events import TEXT, Answer, Choice, Event, Usage
from speccompile.serving.openai.requests import (
    check_length,
    constrained,
    encode,
    request_from_tokens,
    sampling_from_body,
    structured_from_body,
)
from speccompile.serving.openai.server import DONE, Api, OpenAIServer, event_from_json

MAX_CHOICES = 128  # of one request


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
        requests = [request_from_tokens(tokens, body, sampling) for tokens in ids]
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
