# SPDX-License-Identifier: Apache-2.0
"""Results of offline decoding: whole ones, and streams of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from speccompile.runtime.logprobs import TokenLogprobs
from speccompile.runtime.sequences import Step, TokenSequence


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


class Stream(Iterator[Step]):
    """Iterates over the steps of one sequence; `generation` is set after the last."""

    def __init__(
        self, sequence: TokenSequence, decoded: Iterator[list[Step]], finish: Callable[[TokenSequence, str], Generation]
    ) -> None:
        self._sequence, self._decoded, self._finish = sequence, decoded, finish
        self.generation: Generation | None = None  # set after the last step

    @property
    def prompt(self) -> list[int]:
        return self._sequence.tokens[: self._sequence.num_prompt]

    def __next__(self) -> Step:
        [step] = next(self._decoded)
        if step.finish_reason:
            self.generation = self._finish(self._sequence, step.finish_reason)
        return step
