# SPDX-License-Identifier: Apache-2.0
"""One answer as a stream of typed events. Each API converts them to its own shape."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from speccompile.runtime.logprobs import TokenLogprobs
from speccompile.runtime.requests import Request, StepOutput
from speccompile.runtime.service import OutputStream
from speccompile.serving.openai.errors import error_from_step_output
from speccompile.serving.openai.message import MessageReader
from speccompile.serving.openai.tool_reader import CALL as CALL
from speccompile.serving.openai.tool_reader import REASONING as REASONING
from speccompile.serving.openai.tool_reader import TEXT as TEXT
from speccompile.serving.openai.tool_reader import Delta

END = "end"  # of a choice, without text
# Of the runtime: what OpenAI's API calls it. A full cache is a length too. An answer with another one is an error.
FINISH_REASONS: Mapping[str | None, str | None] = {
    None: None,
    "stop": "stop",
    "length": "length",
    "cache_full": "length",
}


@dataclass
class Part:
    """A part of a choice: a text, a reasoning or a call."""

    index: int
    kind: str
    call_id: str = ""
    name: str = ""
    text: str = ""


@dataclass
class Usage:
    """Counts tokens, drafts among them."""

    prompt_tokens: int
    num_outputs: int = 1
    completion_tokens: int = 0
    reused_tokens: int = 0
    drafts: int = 0
    accepted: int = 0

    def add(self, step_output: StepOutput) -> None:
        """Counts a step."""
        self.completion_tokens += len(step_output.tokens)
        self.drafts += step_output.num_draft_tokens
        self.accepted += step_output.num_accepted
        if step_output.stats is not None and step_output.output_index % self.num_outputs == 0:
            self.reused_tokens += step_output.stats.get("num_reused_tokens", 0)


@dataclass
class Choice:
    """One output of an answer, as far as it was read."""

    index: int
    reader: MessageReader | None = None  # splits its text into parts; None: the text is its content
    parts: list[Part] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()
    last: StepOutput | None = None  # the step output that ended it; None: it has not ended

    def text(self, kind: str) -> str:
        """Returns the text of all its parts of a kind."""
        return "".join(part.text for part in self.parts if part.kind == kind)

    @property
    def calls(self) -> list[Part]:
        """Its calls, in order."""
        return [part for part in self.parts if part.kind == CALL]

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's name of the reason of its end."""
        reason = FINISH_REASONS[self.last.finish_reason if self.last else None]
        return "tool_calls" if reason == "stop" and self.calls else reason

    def add(self, delta: Delta) -> Part:
        """Returns the part that a delta belongs to, with its text."""
        if not self.parts or self.parts[-1].kind != delta.kind or delta.call_id:
            self.parts.append(Part(len(self.parts), delta.kind, delta.call_id, delta.name))
        self.parts[-1].text += delta.text
        return self.parts[-1]

    def events(self, step_output: StepOutput) -> list[Event]:
        """Returns the events of a step: the first has its log-probabilities, the last has the end."""
        is_last, logprobs = step_output.finish_reason is not None, step_output.logprobs
        self.logprobs += logprobs
        self.prompt_logprobs = self.prompt_logprobs or step_output.prompt_logprobs
        if self.reader is None:
            deltas = [Delta(TEXT, step_output.text)] if step_output.text or logprobs or is_last else []
        else:
            deltas = self.reader.push(step_output.text, is_last)
        events = [Event(delta.kind, self, self.add(delta), delta.text) for delta in deltas]
        if is_last:
            self.last = step_output
            if self.reader is not None:
                events.append(Event(END, self))
            events[-1] = events[-1]._replace(is_end=True)
        if logprobs:
            first = events.pop(0) if events else Event(TEXT, self)
            events.insert(0, first._replace(logprobs=logprobs))
        return events


class Event(NamedTuple):
    """A text that was added to a choice, the start of a call, or the end of a choice."""

    kind: str  # `TEXT`, `REASONING` or `CALL`: text was added to a part, or a call began; `END`
    choice: Choice  # the whole of it so far, the other events of the same step included
    part: Part | None = None  # that the text was added to; None where there is no text
    text: str = ""  # that was added; empty where a call began
    logprobs: Sequence[TokenLogprobs] = ()
    is_end: bool = False


class Answer:
    """The answer to the requests of a body.

    Args:
        make_reader: makes the reader of a choice; None: its text is its content.
        is_prompt_only: it is about the prompt; the scheduler's one token is left out.
    """

    step_outputs: OutputStream  # of the requests, once they are submitted

    def __init__(
        self,
        requests: Sequence[Request],
        make_reader: Callable[[], MessageReader] | None = None,
        is_prompt_only: bool = False,
    ) -> None:
        self.requests, self._is_prompt_only = requests, is_prompt_only
        self.usage = Usage(sum(len(request.prompt) for request in requests), requests[0].num_outputs)
        num_outputs = sum(request.num_outputs for request in requests)
        self.choices = [Choice(index, make_reader and make_reader()) for index in range(num_outputs)]

    def in_parts(self) -> Answer:
        """Gives each choice a reader, and returns this answer. The end of a choice is then a separate event."""
        for choice in self.choices:
            choice.reader = choice.reader or MessageReader(None, None)
        return self

    async def events(self) -> AsyncIterator[Event]:
        """Yields the events until all choices have ended."""
        async for index, step_output in self.step_outputs:
            if self._is_prompt_only:
                step_output = step_output._replace(text="", tokens=[], logprobs=())
            self.usage.add(step_output)
            if step_output.finish_reason not in FINISH_REASONS:
                raise error_from_step_output(step_output)
            for event in self.choices[index].events(step_output):
                yield event

    async def finish(self) -> Answer:
        """Returns this answer when all its choices have ended."""
        async for _ in self.events():
            pass
        return self
