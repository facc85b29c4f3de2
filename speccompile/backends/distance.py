# SPDX-License-Identifier: Apache-2.0
"""Distance of two models over texts: KL divergence, agreement of the most likely tokens, change of the perplexity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_ROWS = 16  # compared at once: a few arrays of them beside each other take 400 MB with 262144 tokens


@dataclass(frozen=True)
class Distance:
    """Of a quantised model from the float32 model, over the positions of some texts.

    Args:
        perplexity_change: of the texts' own tokens, as a share: 0.01 is 1 % more than float32's; None: not measured.
    """

    kl: float  # mean of KL(float32 || quantised) of the next-token distributions at temperature 1, in nats
    top1: float  # share of positions with the same most likely token
    perplexity_change: float | None = None
    perplexity_error: float = 0.0
    num_positions: int = 0  # of the texts; 0: not recorded

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Distance:
        """Returns the distance that a manifest records; of earlier versions without the perplexity."""
        return cls(**{f.name: record[f.name] for f in fields(cls) if f.name in record})

    def summary(self) -> str:
        told = f"KL {self.kl:.1e} nats, the same likeliest token after {self.top1:.1%}"
        if self.perplexity_change is None:
            return told
        return f"{told}, perplexity {self.perplexity_change:+.1%} (standard error {self.perplexity_error:.1%})"


def compare(wanted: NDArray[np.floating], got: NDArray[np.floating], following: NDArray[np.integer]) -> Floats:
    """Compares two tables of logits [positions, vocab] of one text with the tokens that follow [positions].

    Returns:
        [positions, 3]: KL divergence from `wanted`, of float32, whether the most likely token is the same, and the
        difference of the negative log likelihood of the following token.
    """
    rows = np.empty((len(wanted), 3))
    for at in range(0, len(wanted), _ROWS):
        part = slice(at, at + _ROWS)
        (target, probs), (other, _) = _log_probs(wanted[part]), _log_probs(got[part])
        rows[part, 1] = target.argmax(axis=-1) == other.argmax(axis=-1)
        target -= other
        rows[part, 0] = np.einsum("nv,nv->n", probs, target)
        rows[part, 2] = np.take_along_axis(target, np.asarray(following[part])[:, None], axis=-1)[:, 0]
    return rows


def distance_from_rows(texts: Sequence[Floats]) -> Distance:
    """Returns the distance over the rows of `compare` of each text.

    Positions of a text are dependent, so the error of the perplexity is that of the texts' sums, if several.
    """
    rows = np.concatenate(texts)
    kl, top1, added = rows.mean(axis=0)
    rest = rows[:, 2] - added
    sums = np.array([part.sum() for part in np.split(rest, np.cumsum([len(text) for text in texts])[:-1])])
    parts = sums if len(sums) > 1 else rest
    error = np.sqrt(len(parts) / max(len(parts) - 1, 1) * np.square(parts).sum()) / len(rows)
    change = float(np.exp(added))
    return Distance(max(float(kl), 0.0), float(top1), change - 1, change * float(error), len(rows))


def _log_probs(logits: NDArray[np.floating]) -> tuple[Floats, Floats]:
    logs = logits.astype(np.float64)
    logs -= logs.max(axis=-1, keepdims=True)
    probs = np.exp(logs)
    total = probs.sum(axis=-1, keepdims=True)
    logs -= np.log(total)
    probs /= total
    return logs, probs
