# SPDX-License-Identifier: Apache-2.0
"""Draws siblings of a tree without replacement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speccompile.core.tree import Floats

_LITTLE = 1e-3  # of a distribution's mass


def draw_siblings(probs: Floats, draws: Sequence[float], sibling_probs: Floats) -> list[int]:
    """Draws tokens one after another without replacement (Chen et al. 2024, "Sequoia"), one for each draw.

    Fewer where fewer tokens have a probability above 0.

    Args:
        probs: [vocab] float32, sums to 1.
        draws: one in [0, 1) for each sibling.
        sibling_probs: [len(draws), vocab] float32, output: `probs` without the siblings before, normalised.
    """
    sums, left, tokens = np.cumsum(probs, dtype=np.float64), 0.0, list[int]()
    for row, u in zip(sibling_probs, draws, strict=True):
        left = float(sums[-1]) if not tokens else left - float(probs[tokens[-1]])
        if left < _LITTLE:  # a difference of sums is too inexact here
            rest = probs.astype(np.float64)
            rest[tokens] = 0
            left = float(rest.sum())
            if left <= 0:
                break
            token = _token_at(np.cumsum(rest), u * left, rest)
            row[...] = rest / left
        else:
            bound = u * left
            for taken in sorted(tokens):  # their mass is skipped, from the first on
                if taken == 0 or bound >= sums[taken - 1]:
                    bound += float(probs[taken])
            token = _token_at(sums, bound, probs)
            if token in tokens:  # rounding at the upper end
                token = max(t for t in np.flatnonzero(probs).tolist() if t not in tokens)
            np.multiply(probs, np.float32(1 / left), out=row)
            row[tokens] = 0
        tokens.append(token)
    return tokens


def _token_at(sums: np.ndarray, bound: float, probs: np.ndarray) -> int:
    token = int(np.searchsorted(sums, bound, side="right"))
    return token if token < len(probs) else int(np.flatnonzero(probs)[-1])
