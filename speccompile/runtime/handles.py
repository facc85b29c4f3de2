# SPDX-License-Identifier: Apache-2.0
"""Requests that were accepted: their outputs, with times and step outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from speccompile.core.acceptance import Verdict
from speccompile.core.tree import TokenTree
from speccompile.runtime.logprobs import TokenLogprobs
from speccompile.runtime.requests import Request, Speculation, StepOutput, StepTrace
from speccompile.runtime.sequences import Step, TokenSequence
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.runtime.text import Tokenizer, text_of_token


class RequestOutput:
    """One continuation of a request's prompt, from the queue to its last step output."""

    __slots__ = ("first_s", "handle", "last_s", "num_first", "num_reused", "request", "sequence", "started_s")

    def __init__(self, handle: RequestHandle, request: Request, sequence: TokenSequence) -> None:
        self.handle, self.request, self.sequence = handle, request, sequence
        self.num_reused = 0  # prompt tokens that a cache already had
        self.started_s: float | None = None  # when reading of its prompt began; None: not yet
        self.first_s: float | None = None  # time of its first tokens; None: none yet
        self.last_s = 0.0  # time of its latest tokens
        self.num_first = 0  # number of its first tokens

    def step_output(self, step: Step, now_s: float, trace: StepTrace | None = None) -> StepOutput:
        """Returns the step output of a step."""
        self.last_s = now_s
        told: Sequence[TokenLogprobs | None] = ()
        if self.first_s is None:
            self.first_s, self.num_first = now_s, len(step.tokens)
            told = self.sequence.prompt_logprobs if self.sequence.sampling.prompt_logprobs is not None else ()
        drafts, kept, reason = step.num_draft_tokens, step.num_accepted, step.finish_reason
        stats = None if reason is None else self.stats(now_s)
        error, sink = self.sequence.error, self.sequence.sink
        return StepOutput(
            self.sequence.index,
            step.text,
            step.tokens,
            drafts,
            kept,
            step.is_bonus,
            reason,
            stats,
            trace,
            error,
            step.logprobs,
            None if sink is None else sink.stop_string,
            told,
        )

    def last_step_output(self, reason: str, now_s: float, error: str | None = None) -> StepOutput:
        """Returns the last step output of an output that no step ended, with the text that was held back."""
        text = self.sequence.text_left()
        return StepOutput(self.sequence.index, text, [], finish_reason=reason, stats=self.stats(now_s), error=error)

    def stats(self, now_s: float) -> dict[str, Any]:
        """Returns `StepOutput.stats`; times that do not exist are None."""
        sequence, handle = self.sequence, self.handle
        first_s, started_s = self.first_s, now_s if self.started_s is None else self.started_s
        num_later = 0 if first_s is None else sequence.stats.num_tokens - self.num_first
        return {
            **sequence.stats.json_from_stats(),
            "num_prompt_tokens": sequence.num_prompt,
            "num_reused_tokens": self.num_reused,
            "queue_ms": (started_s - handle.submitted_s) * 1e3,
            "time_to_first_token_ms": None if first_s is None else (first_s - handle.submitted_s) * 1e3,
            "time_per_token_ms": (self.last_s - (first_s or 0.0)) * 1e3 / num_later if num_later else None,
        }


class RequestHandle:
    """A request that was accepted, or several that were submitted as one; used to cancel it.

    Args:
        timeout_s: seconds that it may take; None: no limit.
        more: requests after the first; their outputs are numbered after its own.
    """

    def __init__(
        self,
        request: Request,
        number: int,
        submitted_s: float,
        timeout_s: float | None,
        on_output: Callable[[StepOutput], None],
        more: Sequence[Request] = (),
    ) -> None:
        self.requests = (request, *more)
        self.request, self.number, self.submitted_s, self.on_output = request, number, submitted_s, on_output
        self.deadline_s = None if timeout_s is None else submitted_s + timeout_s
        self.open: list[RequestOutput] = []  # outputs that have not ended
        self.is_waiting = True  # none of them has a slot yet


def open_outputs(handle: RequestHandle, engine: SpecEngine, default: Speculation) -> None:
    """Makes the outputs of a request handle.

    Raises:
        RuntimeFault: the prompt is empty, too long or not of the vocabulary; its images cannot be read; or stop
            strings without a tokenizer.
    """
    for request in handle.requests:
        images = engine.read_images(request.images)
        prompt = engine.encode(request.prompt, len(images)) if isinstance(request.prompt, str) else list(request.prompt)
        for index in range(request.num_outputs):
            sampling = request.sampling
            if index:
                sampling = replace(sampling, seed=(sampling.seed + index) % 2**64)
            sequence = engine.make_sequence(0, prompt, sampling, with_text=True, images=images)
            sequence.index = len(handle.open)
            sequence.speculation = default if request.speculation == "auto" else request.speculation
            handle.open.append(RequestOutput(handle, request, sequence))


def trace_step(tokenizer: Tokenizer | None, tree: TokenTree, verdict: Verdict, slot: int) -> StepTrace:
    """Returns the tree of one sequence in one step."""
    num = int(tree.num_nodes[slot])
    tokens = tree.tokens[slot, :num].tolist()
    texts = [] if tokenizer is None else [text_of_token(tokenizer, token) for token in tokens]
    path, following = verdict.nodes_kept(slot), int(verdict.next_token[slot])
    return StepTrace(tokens, tree.parents[slot, :num].tolist(), path, following, texts)
