# SPDX-License-Identifier: Apache-2.0
"""Result of decoding a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from speccompile.runtime.logprobs import TokenLogprobs
from speccompile.runtime.requests import StepOutput


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
