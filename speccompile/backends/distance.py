# SPDX-License-Identifier: Apache-2.0
"""Distance of two tables of logits: KL divergence, and agreement of the most likely tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Distance:
    """Of a quantised graph from the float32 graph of the same model.

    Args:
        kl: mean of KL(float32 || quantised) of the next-token distributions at temperature 1, in nats.
        top1: share of positions with the same most likely token.
    """

    kl: float
    top1: float


def distance(wanted: Floats, got: Floats) -> Distance:
    """Returns the distance between two tables of logits [positions, vocab]."""
    target, other = _log_probs(wanted), _log_probs(got)
    kl = float((np.exp(target) * (target - other)).sum(axis=-1).mean())
    return Distance(max(kl, 0.0), float((target.argmax(axis=-1) == other.argmax(axis=-1)).mean()))


def _log_probs(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
