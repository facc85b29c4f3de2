# SPDX-License-Identifier: Apache-2.0
"""From step outputs to the objects of OpenAI's API: whole answers, chunks, usage."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from speccompile.runtime.logprobs import TokenLogprobs
from speccompile.runtime.output_stream import OutputStream
from speccompile.runtime.requests import StepOutput
from speccompile.serving.openai.errors import error_from_step_output
from speccompile.serving.openai.logprobs import TokenTexts
from speccompile.serving.openai.stream import DONE, event_from_json

# Of ours: what OpenAI's API calls it. A full cache is a length too.
FINISH_REASONS: Mapping[str | None, str | None] = {
    None: None,
    "stop": "stop",
    "length": "length",
    "cache_full": "length",
}


@dataclass(frozen=True)
class Form:
    """How the objects of one endpoint look.

    Args:
        prefix: of ids.
        whole, chunk: their `object`.
        text_of_whole, text_of_chunk: the part of a choice that holds a text.
        logprobs: of a choice's tokens, the first of which is so many characters into its text.
        opening: the same of a first chunk that has no text yet; None where there is no such chunk.
    """

    prefix: str
    whole: str
    chunk: str
    text_of_whole: Callable[[str], dict[str, Any]]
    text_of_chunk: Callable[[str], dict[str, Any]]
    logprobs: Callable[[TokenTexts, Sequence[TokenLogprobs], int], dict[str, Any]]
    opening: dict[str, Any] | None = None


COMPLETION = Form(
    "cmpl-",
    "text_completion",
    "text_completion",
    lambda text: {"text": text},
    lambda text: {"text": text},
    TokenTexts.completion,
)
CHAT = Form(
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
    lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    lambda text: {"delta": {"content": text} if text else {}},
    lambda texts, found, offset: texts.chat(found),
    {"delta": {"role": "assistant", "content": ""}},
)


@dataclass(frozen=True)
class Head:
    """What all objects of one answer share.

    Args:
        form: of the endpoint.
        identity: `id`, `created`, `model`, `system_fingerprint`.
        with_usage: streams: the usage in a chunk of its own at the end, and null in all others.
        with_stats: `stats` with every choice.
        texts: of tokens, where logprobs are asked for.
    """

    form: Form
    identity: Mapping[str, Any]
    with_usage: bool = False
    with_stats: bool = False
    texts: TokenTexts | None = None

    def choice(
        self, index: int, text: Mapping[str, Any], last: StepOutput | None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns one choice of an answer or a chunk; `last` is the step output that ended it."""
        reason = FINISH_REASONS[last.finish_reason if last else None]
        choice = {"index": index, **text, "logprobs": logprobs, "finish_reason": reason}
        if last is not None and self.with_stats:
            choice["stats"] = last.stats
        return choice

    def logprobs(self, found: Sequence[TokenLogprobs], offset: int = 0) -> dict[str, Any] | None:
        """Returns the `logprobs` of a choice; None where they are not asked for. See `Form.logprobs`."""
        return None if self.texts is None else self.form.logprobs(self.texts, found, offset)

    def chunk_from_choice(self, choice: dict[str, Any]) -> bytes:
        """Returns the event of one choice."""
        usage = {"usage": None} if self.with_usage else {}
        return event_from_json({**self.identity, "object": self.form.chunk, "choices": [choice], **usage})


@dataclass
class Usage:
    """Adds up tokens, drafts among them.

    `prediction` tokens of OpenAI's API are the same idea as drafts: drafted, and then kept or not.

    Args:
        prompt_tokens: of all prompts of the request.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    reused_tokens: int = 0
    drafts: int = 0
    accepted: int = 0

    def add(self, step_output: StepOutput) -> None:
        """Counts a step output."""
        self.completion_tokens += len(step_output.tokens)
        self.drafts += step_output.num_draft_tokens
        self.accepted += step_output.num_accepted
        if step_output.stats is not None and step_output.output_index == 0:
            self.reused_tokens += step_output.stats.get("num_reused_tokens", 0)

    def json_from_usage(self) -> dict[str, Any]:
        """Returns OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.reused_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafts - self.accepted,
            },
        }


@dataclass
class _Choice:
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: StepOutput | None = None


async def whole_answer(head: Head, step_outputs: OutputStream, usage: Usage) -> dict[str, Any]:
    """Returns the answer once all choices have ended.

    Raises:
        ApiError: one of them did not come to its end.
    """
    choices = [_Choice() for _ in range(step_outputs.num_outputs)]
    async for index, step_output in step_outputs:
        usage.add(step_output)
        choices[index].parts.append(step_output.text)
        choices[index].logprobs += step_output.logprobs
        if step_output.finish_reason is not None:
            if error := error_from_step_output(step_output):
                raise error
            choices[index].last = step_output
    made = [
        head.choice(i, head.form.text_of_whole("".join(one.parts)), one.last, head.logprobs(one.logprobs))
        for i, one in enumerate(choices)
    ]
    return {**head.identity, "object": head.form.whole, "choices": made, "usage": usage.json_from_usage()}


async def chunks(head: Head, step_outputs: OutputStream, usage: Usage) -> AsyncGenerator[bytes, None]:
    """Yields the answer as server-sent events. Where a choice fails, the last event of the stream holds the error."""
    if head.form.opening is not None:
        for index in range(step_outputs.num_outputs):
            yield head.chunk_from_choice(head.choice(index, head.form.opening, None))
    offsets = [0] * step_outputs.num_outputs  # characters of the tokens so far
    async for index, step_output in step_outputs:
        usage.add(step_output)
        is_last = step_output.finish_reason is not None
        if is_last and (error := error_from_step_output(step_output)):
            yield event_from_json(error.json_from_error())
            yield DONE
            return
        if step_output.text or is_last or step_output.logprobs:
            text, told = head.form.text_of_chunk(step_output.text), None
            if head.texts is not None and step_output.logprobs:
                told = head.logprobs(step_output.logprobs, offsets[index])
                offsets[index] += sum(len(head.texts.text(entry.token)) for entry in step_output.logprobs)
            yield head.chunk_from_choice(head.choice(index, text, step_output if is_last else None, told))
    if head.with_usage:
        identity = {**head.identity, "object": head.form.chunk}
        yield event_from_json({**identity, "choices": [], "usage": usage.json_from_usage()})
    yield DONE
