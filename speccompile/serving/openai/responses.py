# SPDX-License-Identifier: Apache-2.0
"""From step outputs to the objects of OpenAI's API: whole answers, chunks, usage."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from speccompile.runtime.logprobs import TokenLogprobs
from speccompile.runtime.output_stream import OutputStream
from speccompile.runtime.requests import StepOutput
from speccompile.serving.openai.echo import Echo, Told
from speccompile.serving.openai.errors import error_from_step_output
from speccompile.serving.openai.logprobs import TokenTexts
from speccompile.serving.openai.message import MessageReader, message_from_deltas
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
        with_usage: streams: the usage in a chunk of its own at the end.
        reader: makes the reader of a choice's message; None: its text is its content.
        with_metrics: of answers of one choice: `metrics` with acceptance and times in vLLM's shape.
        running: streams with usage: the usage so far, in every chunk; None: null in all but the last.
        echo: what is told of the prompts; None: nothing.
    """

    form: Form
    identity: Mapping[str, Any]
    with_usage: bool = False
    with_stats: bool = False
    texts: TokenTexts | None = None
    reader: Callable[[], MessageReader] | None = None
    with_metrics: bool = False
    running: Usage | None = None
    echo: Echo | None = None

    def choice(
        self,
        index: int,
        text: Mapping[str, Any],
        last: StepOutput | None,
        logprobs: dict[str, Any] | None = None,
        has_calls: bool = False,
    ) -> dict[str, Any]:
        """Returns one choice of an answer or a chunk; `last` is the step output that ended it."""
        reason = FINISH_REASONS[last.finish_reason if last else None]
        if has_calls and reason == "stop":
            reason = "tool_calls"
        choice = {"index": index, **text, "logprobs": logprobs, "finish_reason": reason}
        if last is not None and self.with_stats:
            choice["stats"] = last.stats
        return choice

    def logprobs(self, found: Sequence[TokenLogprobs], offset: int = 0) -> dict[str, Any] | None:
        """Returns the `logprobs` of a choice; None where they are not asked for. See `Form.logprobs`."""
        return None if self.texts is None else self.form.logprobs(self.texts, found, offset)

    def with_echo(self, index: int, told: Told, logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
        if self.echo is None or not self.echo.has_text or logprobs is None:
            return logprobs
        return {name: values + logprobs[name] for name, values in self.echo.logprobs(index, told).items()}

    def metrics(self, lasts: Sequence[StepOutput | None]) -> dict[str, Any]:
        """Returns the field `metrics` of an answer; empty where it has none."""
        stats = lasts[0].stats if len(lasts) == 1 and lasts[0] is not None else None
        return {} if stats is None or not self.with_metrics else {"metrics": metrics_from_stats(stats)}

    def chunk_from_choice(self, choice: dict[str, Any]) -> bytes:
        told = None if self.running is None else self.running.json_from_usage()
        usage = {"usage": told} if self.with_usage else {}
        return event_from_json({**self.identity, "object": self.form.chunk, "choices": [choice], **usage})


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


@dataclass
class Usage:
    """Adds up tokens, drafts among them.

    `prediction` tokens of OpenAI's API are the same idea as drafts: drafted, and then kept or not.
    """

    prompt_tokens: int
    num_outputs: int = 1
    completion_tokens: int = 0
    reused_tokens: int = 0
    drafts: int = 0
    accepted: int = 0

    def add(self, step_output: StepOutput) -> None:
        """Counts a step output."""
        self.completion_tokens += len(step_output.tokens)
        self.drafts += step_output.num_draft_tokens
        self.accepted += step_output.num_accepted
        if step_output.stats is not None and step_output.output_index % self.num_outputs == 0:
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
    prompt_logprobs: Told = ()
    last: StepOutput | None = None


async def whole_answer(head: Head, step_outputs: OutputStream, usage: Usage) -> dict[str, Any]:
    """Returns the answer once all choices have ended.

    Raises:
        ApiError: one of them did not come to its end.
    """
    choices = [_Choice() for _ in range(step_outputs.num_outputs)]
    async for index, step_output in _told(head, step_outputs):
        usage.add(step_output)
        choices[index].prompt_logprobs = choices[index].prompt_logprobs or step_output.prompt_logprobs
        choices[index].parts.append(step_output.text)
        choices[index].logprobs += step_output.logprobs
        if step_output.finish_reason is not None:
            if error := error_from_step_output(step_output):
                raise error
            choices[index].last = step_output
    made = [_whole_choice(head, i, one) for i, one in enumerate(choices)]
    answer = {**head.identity, "object": head.form.whole, "choices": made, "usage": usage.json_from_usage()}
    if head.echo is not None and head.form is CHAT:
        answer |= head.echo.field(choices[0].prompt_logprobs)
    return {**answer, **head.metrics([one.last for one in choices])}


async def _told(head: Head, step_outputs: OutputStream) -> AsyncGenerator[tuple[int, StepOutput], None]:
    begun = set[int]()
    async for index, step_output in step_outputs:
        if head.echo is not None:
            step_output = head.echo.step_output(index, step_output, index not in begun)
            begun.add(index)
        yield index, step_output


def _whole_choice(head: Head, index: int, one: _Choice) -> dict[str, Any]:
    text, offset = "".join(one.parts), 0 if head.echo is None else len(head.echo.text(index))
    logprobs = head.with_echo(index, one.prompt_logprobs, head.logprobs(one.logprobs, offset))
    if head.reader is None:
        choice = head.choice(index, head.form.text_of_whole(text), one.last, logprobs)
        if head.echo is not None and head.form is COMPLETION:
            choice |= head.echo.field(one.prompt_logprobs)
        return choice
    reader = head.reader()
    message = message_from_deltas(reader.push(text, is_last=True))
    return head.choice(index, {"message": message}, one.last, logprobs, reader.has_calls)


async def chunks(head: Head, step_outputs: OutputStream, usage: Usage) -> AsyncGenerator[bytes, None]:
    """Yields the answer as server-sent events. Where a choice fails, the last event of the stream holds the error."""
    if head.form.opening is not None:
        for index in range(step_outputs.num_outputs):
            yield head.chunk_from_choice(head.choice(index, head.form.opening, None))
    readers = [None if head.reader is None else head.reader() for _ in range(step_outputs.num_outputs)]
    lasts: list[StepOutput | None] = [None] * step_outputs.num_outputs
    # Characters of the tokens so far.
    offsets = [0 if head.echo is None else len(head.echo.text(i)) for i in range(step_outputs.num_outputs)]
    async for index, step_output in _told(head, step_outputs):
        usage.add(step_output)
        is_last = step_output.finish_reason is not None
        lasts[index] = step_output if is_last else None
        if is_last and (error := error_from_step_output(step_output)):
            yield event_from_json(error.json_from_error())
            yield DONE
            return
        if step_output.text or is_last or step_output.logprobs:
            told = None
            if head.texts is not None and (step_output.logprobs or step_output.prompt_logprobs):
                told = head.logprobs(step_output.logprobs, offsets[index])
                if step_output.prompt_logprobs:
                    told = head.with_echo(index, step_output.prompt_logprobs, told)
                offsets[index] += sum(head.texts.num_letters(entry.token) for entry in step_output.logprobs)
            last, reader = step_output if is_last else None, readers[index]
            if reader is None:
                text = head.form.text_of_chunk(step_output.text)
                yield head.chunk_from_choice(head.choice(index, text, last, told))
                continue
            deltas = reader.push(step_output.text, is_last)
            if told is not None and not deltas and last is None:
                deltas = [{}]
            for delta in deltas:
                yield head.chunk_from_choice(head.choice(index, {"delta": delta}, None, told))
                told = None
            if last is not None:
                yield head.chunk_from_choice(head.choice(index, {"delta": {}}, last, told, reader.has_calls))
    if head.with_usage:
        identity = {**head.identity, "object": head.form.chunk}
        told = head.metrics(lasts)
        yield event_from_json({**identity, "choices": [], "usage": usage.json_from_usage(), **told})
    yield DONE
