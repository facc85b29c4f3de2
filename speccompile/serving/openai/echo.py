# SPDX-License-Identifier: Apache-2.0
"""What an answer says of its prompt: `echo` of completions, and `prompt_logprobs` as vLLM has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from speccompile.runtime.logprobs import TokenLogprobs, finite
from speccompile.runtime.requests import StepOutput
from speccompile.serving.openai.logprobs import TokenTexts

Told = Sequence[TokenLogprobs | None]


@dataclass(frozen=True)
class Echo:
    """What is told of the prompts of a request.

    Args:
        prompts: text and token ids of the prompt of each choice.
        has_text: the prompt's text begins a choice's own, and its tokens begin the choice's logprobs.
        is_all: nothing is told of what follows the prompt: `max_tokens` was 0.
    """

    prompts: Sequence[tuple[str, Sequence[int]]]
    texts: TokenTexts
    has_text: bool = False
    has_logprobs: bool = False
    is_all: bool = False

    def text(self, index: int) -> str:
        return self.prompts[index][0] if self.has_text else ""

    def step_output(self, index: int, step_output: StepOutput, is_first: bool) -> StepOutput:
        """Returns a choice's step output as it is told, its first one with the prompt's text in front."""
        if self.is_all:
            step_output = step_output._replace(text="", tokens=[], logprobs=())
        return step_output._replace(text=self.text(index) + step_output.text) if is_first else step_output

    def logprobs(self, index: int, told: Told) -> dict[str, list[Any]]:
        """Returns the part of a completion's `logprobs` that is about the prompt: of its first token it tells null."""
        text, tokens = self.prompts[index]
        found = [entry for entry in told if entry is not None]
        part = self.texts.completion(found, 0)
        return {
            "tokens": [self.texts.text(token) for token in tokens],
            "token_logprobs": [None, *part["token_logprobs"]],
            "top_logprobs": [None, *part["top_logprobs"]],
            "text_offset": self.texts.offsets(tokens, text),
        }

    def field(self, told: Told) -> dict[str, Any]:
        """Returns the field `prompt_logprobs`, by token ids; empty where it is not asked for."""
        if not self.has_logprobs:
            return {}
        return {"prompt_logprobs": [None if entry is None else self._by_id(entry) for entry in told]}

    def _by_id(self, entry: TokenLogprobs) -> dict[str, Any]:
        ranked = {token: (logprob, at) for at, (token, logprob) in enumerate(entry.top, 1)}
        ranked[entry.token] = (entry.logprob, entry.rank)
        return {
            str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": self.texts.text(token)}
            for token, (logprob, rank) in ranked.items()
        }
