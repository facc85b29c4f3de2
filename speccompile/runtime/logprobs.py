# SPDX-License-Identifier: Apache-2.0
"""Logarithms of the probabilities of emitted tokens, and of the likeliest ones beside them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from speccompile.core.tree import Floats


class TokenLogprobs(NamedTuple):
    """One emitted token.

    Args:
        token: its id.
        logprob: natural logarithm of its probability after the tokens before it; -inf where that is 0.
        top: (token, logarithm) of the likeliest tokens, the likeliest first, of equal ones the lower id first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def json_from_logprobs(self) -> dict[str, Any]:
        """Returns a JSON-ready dict; what is -inf is -9999, as OpenAI's API writes a token of no probability."""
        top = [{"token": token, "logprob": finite(value)} for token, value in self.top]
        return {"token": self.token, "logprob": finite(self.logprob), "top": top}


def finite(logprob: float) -> float:
    """Returns a logarithm that JSON can hold: at least -9999."""
    return max(logprob, -9999.0)


def log_softmax(logits: Floats) -> np.ndarray:
    """Returns the logarithms of softmax(logits), float64; logits: [..., vocab] float32."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    logs: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logs


def token_logprobs(logs: np.ndarray, token: int, num: int) -> TokenLogprobs:
    """Returns what is told of an emitted token.

    Args:
        logs: [vocab] float64, of the row that the token was decided by.
        token: the emitted token.
        num: likeliest tokens to name.
    """
    num = min(num, len(logs))
    least = np.partition(logs, -num)[-num] if num else np.inf
    ids = np.flatnonzero(logs >= least)
    top = ids[np.argsort(-logs[ids], kind="stable")][:num]
    return TokenLogprobs(token, float(logs[token]), tuple((int(t), float(logs[t])) for t in top))
