# SPDX-License-Identifier: Apache-2.0
"""From step outputs to what the page draws."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

from speccompile.runtime.output_stream import OutputStream
from speccompile.runtime.requests import StepOutput, StepTrace
from speccompile.runtime.text import text_of_token
from speccompile.serving.openai.errors import error_from_step_output
from speccompile.serving.openai.events import FINISH_REASONS
from speccompile.serving.openai.stream import event_from_json


class Painter(Protocol):
    """The part of `runtime.text.TextSink` that turns one token at a time into text."""

    def push(self, tokens: Sequence[int]) -> tuple[str, int, bool]: ...

    def finish(self) -> str: ...


def kinds_from_step_output(step_output: StepOutput) -> list[str]:
    """Returns the kind of each token of a step: drafts first, then the one that the target gave."""
    last = "bonus" if step_output.is_bonus else "recovered" if step_output.num_draft_tokens else "plain"
    return [*["accepted"] * step_output.num_accepted, last][: len(step_output.tokens)]


def json_from_trace(trace: StepTrace, next_text: str) -> dict[str, Any]:
    """Returns the tree of a step: `texts` and `parents` by node, the kept `path`, and the text of the next token."""
    return {"texts": trace.texts, "parents": trace.parents, "path": trace.path, "next": next_text}


async def events(
    step_outputs: OutputStream, painter: Painter | None, tokenizer: Any, num_prompt: int, drafts: Callable[[], str]
) -> AsyncGenerator[bytes, None]:
    """Server-sent events: `start`, a `step` for each step, `end` or `error`.

    Args:
        painter: makes text of single tokens; None without a tokenizer.
        tokenizer: of the bundle, or None.
    """
    start_s = perf_counter()
    yield event_from_json({"kind": "start", "num_prompt_tokens": num_prompt})
    async for _, step_output in step_outputs:
        if step_output.tokens:
            yield event_from_json(_step(step_output, painter, tokenizer, (perf_counter() - start_s) * 1e3))
        if step_output.finish_reason is None:
            continue
        if step_output.finish_reason not in FINISH_REASONS:
            yield event_from_json({"kind": "error", **error_from_step_output(step_output).json_from_error()})
            return
        tail = painter.finish() if painter is not None else ""
        end = {"reason": step_output.finish_reason, "tail": tail, "stats": step_output.stats, "drafts": drafts()}
        yield event_from_json({"kind": "end", **end})


def _step(step_output: StepOutput, painter: Painter | None, tokenizer: Any, time_ms: float) -> dict[str, Any]:
    texts = [painter.push([token])[0] if painter is not None else f" {token}" for token in step_output.tokens]
    step: dict[str, Any] = {
        "kind": "step",
        "tokens": [list(pair) for pair in zip(texts, kinds_from_step_output(step_output), strict=True)],
        "num_draft_tokens": step_output.num_draft_tokens,
        "num_accepted": step_output.num_accepted,
        "is_bonus": step_output.is_bonus,
        "time_ms": round(time_ms, 2),
    }
    if step_output.trace is not None:
        following = step_output.trace.next_token
        text = text_of_token(tokenizer, following) if tokenizer is not None else str(following)
        step["tree"] = json_from_trace(step_output.trace, text)
    return step
