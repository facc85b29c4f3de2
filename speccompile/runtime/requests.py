# SPDX-License-Identifier: Apache-2.0
"""Requests to the scheduler, the step outputs and results that come back, and the faults that end one alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from speccompile.core.sampling_params import SamplingParams
from speccompile.core.tree import TokenTree, Verdict
from speccompile.errors import RuntimeFault, SpecCompileError
from speccompile.runtime.images import ImageData
from speccompile.runtime.logprobs import TokenLogprobs
from speccompile.runtime.text import Tokenizer, text_of_token

# What an engine, a method or a bug in the code for one request may raise. Exits and interrupts are not among them.
FAULTS = (
    SpecCompileError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    NameError,
    ArithmeticError,
    LookupError,
    MemoryError,
    BufferError,
    OSError,
)


class NotFinite(RuntimeFault):
    """The target's logits for a sequence are NaN or infinite: no token can be chosen."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(
            f"logits after {num_tokens} tokens",
            "a row that is not finite",
            "numbers: neither NaN nor infinity",
            "Look for NaN in the checkpoint's weights (embeddings first), or build with a dtype of a larger range; "
            "other requests are not affected.",
        )


def text_from_fault(fault: BaseException) -> str:
    """Returns the error text of a request that a fault ended: our own errors as they are, others with their type."""
    return str(fault) if isinstance(fault, SpecCompileError) else f"{type(fault).__name__}: {fault}"


Speculation = Literal["auto", "on", "off"]
SPECULATION: tuple[Speculation, ...] = ("auto", "on", "off")


class Busy(RuntimeFault):
    """The queue is full: the request was not accepted; it may be sent again later."""


@dataclass(frozen=True)
class Request:
    """One prompt and how to decode it.

    Args:
        sampling: see `SamplingParams`. Output i of several draws with `sampling.seed + i`.
        num_outputs: independent continuations of the prompt (`n` in the OpenAI API).
        speculation: `auto`: the controller decides; `on`: always draft, within the limits; `off`: never.
        timeout_s: seconds from submission to the last token; None: no limit but the service's own.
        wants_trace: add the tree of every step to its step output.

    Raises:
        RuntimeFault: a value is out of range.
    """

    prompt: str | Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_outputs: int = 1
    speculation: Speculation = "auto"
    timeout_s: float | None = None
    wants_trace: bool = False
    images: Sequence[ImageData] = ()

    def __post_init__(self) -> None:
        timeout = self.timeout_s
        checks: tuple[tuple[str, bool, object, str], ...] = (
            ("num_outputs", 1 <= self.num_outputs <= 128, self.num_outputs, "1 to 128"),
            ("speculation", self.speculation in SPECULATION, self.speculation, ", ".join(SPECULATION)),
            ("timeout_s", timeout is None or 0 < timeout < float("inf"), timeout, "above 0, or None"),
        )
        for name, is_right, got, expected in checks:
            if not is_right:
                raise RuntimeFault(f"Request.{name}", repr(got), expected, "Correct the request.")


@dataclass(frozen=True)
class StepTrace:
    """The tree of one step of one sequence."""

    tokens: list[int]  # of each node; node 0 is the root, the last token emitted before
    parents: list[int]  # of each node; the root's is -1
    path: list[int]
    next_token: int  # recovered or bonus token after the path
    texts: list[str]  # of `tokens`, each decoded alone (empty without a tokenizer)


def trace_of_step(tokenizer: Tokenizer | None, tree: TokenTree, verdict: Verdict, slot: int) -> StepTrace:
    """Returns the tree of one sequence in one step."""
    tokens, parents = tree.nodes_of(slot)
    texts = [] if tokenizer is None else [text_of_token(tokenizer, token) for token in tokens]
    path, following = verdict.nodes_kept(slot), int(verdict.next_token[slot])
    return StepTrace(tokens, parents, path, following, texts)


class StepOutput(NamedTuple):
    """Result of one step for one sequence.

    Args:
        is_bonus: a whole path of at least one draft was kept, so the last token is a bonus and not recovered.
        finish_reason: None before the end; `stop`, `length`, `cache_full`, `cancelled`, `timeout` or `error`.
        stats: of the whole output, in its last step output: the dict of `SequenceStats.json_of_request`.
        prompt_logprobs: of each prompt token (None for the first), in the first step output, where requested.
    """

    output_index: int  # which output, counted over all requests that were submitted as one; offline: which prompt
    text: str  # to show; never half a character, no part of a stop string
    tokens: list[int]  # new token ids; the first `num_accepted` of them were drafts (fewer where the text ended before)
    num_draft_tokens: int = 0
    num_accepted: int = 0
    is_bonus: bool = False
    finish_reason: str | None = None
    stats: dict[str, Any] | None = None
    trace: StepTrace | None = None
    error: str | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    stop_string: str | None = None  # that ended the text, where the finish reason is `stop`; None: a token did
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()

    @property
    def kinds(self) -> list[str]:
        """Of each token: `accepted` drafts, then the `bonus`, `recovered` or `plain` token that the target gave."""
        last = "bonus" if self.is_bonus else "recovered" if self.num_draft_tokens else "plain"
        return [*["accepted"] * self.num_accepted, last][: len(self.tokens)]


Prompt = str | Sequence[int]
Images = Sequence[ImageData] | Sequence[Sequence[ImageData]]


@dataclass(frozen=True)
class Generation:
    """Result of decoding one prompt.

    Args:
        text: of the new tokens, special tokens left out, cut before a stop string.
        tokens: new token ids; a stop token is the last of them.
        error: message, where the finish reason is `error`; other prompts are not affected.
        logprobs: of each of `tokens`; None where they were not asked for.
        prompt_logprobs: the same of the prompt's tokens; None for the first one.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: dict[str, Any]
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def json_from_generation(self) -> dict[str, Any]:
        """Returns a JSON-ready dict; what is None is not in it."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.logprobs is not None:
            given["logprobs"] = [entry.json_from_logprobs() for entry in self.logprobs]
        if self.prompt_logprobs is not None:
            given["prompt_logprobs"] = [entry and entry.json_from_logprobs() for entry in self.prompt_logprobs]
        return {name: value for name, value in given.items() if value is not None}


def generation_of_steps(steps: Sequence[StepOutput]) -> Generation:
    """Returns the result of all step outputs of a sequence."""
    text = "".join(step.text for step in steps)
    tokens = [token for step in steps for token in step.tokens]
    logprobs = [entry for step in steps for entry in step.logprobs]
    last, prompt_logprobs = steps[-1], list(steps[0].prompt_logprobs)
    reason, stats = str(last.finish_reason), last.stats or {}
    return Generation(text, tokens, reason, stats, last.error, logprobs or None, prompt_logprobs or None)
