# SPDX-License-Identifier: Apache-2.0
"""Logarithms of the probabilities of emitted tokens, and of the likeliest ones beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from speccompile.core.tree import Floats


class TokenLogprobs(NamedTuple):
    """One emitted token; `top` has (token, logarithm) of the most probable ones, of ties the lower id first."""

    token: int
    logprob: float  # natural logarithm of its probability after the tokens before it; -inf where that is 0
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0  # 1 + the number of likelier tokens, of tokens of a prompt; 0: not told

    def json_from_logprobs(self) -> dict[str, Any]:
        """Returns a JSON-ready dict; what is -inf is -9999, as OpenAI's API writes a token of no probability."""
        top = [{"token": token, "logprob": finite(value)} for token, value in self.top]
        return {"token": self.token, "logprob": finite(self.logprob), "top": top}


def prompt_logprobs(logits: Floats, tokens: Sequence[int], num: int) -> list[TokenLogprobs]:
    """Returns the logprobs of tokens of a prompt. `logits`: [tokens, vocab] float32, the rows before each of them."""
    told = []
    for row, token in zip(logits, tokens, strict=True):  # one after another: the logarithms are of 8 bytes each
        logs = log_softmax(row)
        told.append(token_logprobs(logs, token, num)._replace(rank=1 + int((logs > logs[token]).sum())))
    return told


def finite(logprob: float) -> float:
    """Returns a logarithm that JSON can hold: at least -9999."""
    return max(logprob, -9999.0)


def log_softmax(logits: Floats) -> np.ndarray:
    """Returns the logarithms of softmax(logits), float64; logits: [..., vocab] float32."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    logs: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logs


def token_logprobs(logs: np.ndarray, token: int, num: int) -> TokenLogprobs:
    """Returns what is told of an emitted token. `logs`: [vocab] float64, of the row that the token was decided by."""
    num = min(num, len(logs))
    least = np.partition(logs, -num)[-num] if num else np.inf
    ids = np.flatnonzero(logs >= least)
    top = ids[np.argsort(-logs[ids], kind="stable")][:num]
    return TokenLogprobs(token, float(logs[token]), tuple((int(t), float(logs[t])) for t in top))
