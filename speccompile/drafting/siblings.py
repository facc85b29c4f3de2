# SPDX-License-Identifier: Apache-2.0
"""Draws siblings of a tree without replacement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speccompile.core.tree import Floats

_LITTLE = 1e-3  # of a distribution's mass


def draw_siblings(dist: Floats, draws: Sequence[float], dists: Floats) -> list[int]:
    """Tokens drawn one after another without replacement (Chen et al. 2024, "Sequoia").

    Args:
        dist: [vocab] float32, sums to 1.
        draws: one in [0, 1) for each sibling.
        dists: [len(draws), vocab] float32, filled: the distribution that each was drawn from, which for sibling i is
            `dist`
            without the tokens before it, normalised.

    Returns:
        At most len(draws) tokens: fewer where the distribution has fewer with mass.
    """
    sums, left, tokens = np.cumsum(dist, dtype=np.float64), 0.0, list[int]()
    for row, u in zip(dists, draws, strict=True):
        left = float(sums[-1]) if not tokens else left - float(dist[tokens[-1]])
        if left < _LITTLE:  # what is left over is not told by a difference any more
            rest = dist.astype(np.float64)
            rest[tokens] = 0
            left = float(rest.sum())
            if left <= 0:
                break
            token = _place(np.cumsum(rest), u * left, rest)
            row[...] = rest / left
        else:
            bound = u * left
            for taken in sorted(tokens):  # their mass is skipped, from the first on
                if taken == 0 or bound >= sums[taken - 1]:
                    bound += float(dist[taken])
            token = _place(sums, bound, dist)
            if token in tokens:  # rounding at the upper end
                token = max(t for t in np.flatnonzero(dist).tolist() if t not in tokens)
            np.multiply(dist, np.float32(1 / left), out=row)
            row[tokens] = 0
        tokens.append(token)
    return tokens


def _place(sums: np.ndarray, bound: float, dist: np.ndarray) -> int:
    """First index whose running sum exceeds the bound; the last with mass where rounding leaves none."""
    token = int(np.searchsorted(sums, bound, side="right"))
    return token if token < len(dist) else int(np.flatnonzero(dist)[-1])
