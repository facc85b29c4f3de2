# SPDX-License-Identifier: Apache-2.0
"""The chi-square test of counts against exact probabilities, and its power."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEAST_EXPECTED = 8.0  # rarer cells count as one
ALPHA = 1e-5  # a right distribution fails by chance that often
POWER = 0.9  # with which a deviation of the stated size is noticed
_MOST_TERMS = 10_000
_TINY = 1e-300


@dataclass(frozen=True)
class Fit:
    """Result of a test.

    Args:
        p_value: probability of this statistic or a larger one where the distribution is right; 0: an impossible text.
        noticed_effect: w, the square root of the sum of (q - p)^2 / p over the cells, that a wrong distribution q needs
            to be noticed with probability `POWER`.
    """

    num_samples: int
    num_cells: int
    statistic: float
    p_value: float
    noticed_effect: float

    @property
    def is_right(self) -> bool:
        return self.p_value >= ALPHA

    @property
    def noticed_distance(self) -> float:
        """Total variation of such a q whose cells all deviate by the same share: w / 2."""
        return self.noticed_effect / 2

    def json_from_fit(self) -> dict[str, Any]:
        """Returns a JSON-ready dict."""
        return {
            "num_samples": self.num_samples,
            "num_cells": self.num_cells,
            "chi_square": round(self.statistic, 2),
            "p_value": self.p_value,
            "noticed_effect": round(self.noticed_effect, 4),
            "noticed_total_variation": round(self.noticed_distance, 4),
        }


def fit(counts: Mapping[tuple[int, ...], int], dist: Mapping[tuple[int, ...], float]) -> Fit:
    """Tests counts of texts against the exact probability of every text that may come, `dist`, with sum 1."""
    num = sum(counts.values())
    common = sorted((text for text, mass in dist.items() if mass * num >= LEAST_EXPECTED), key=lambda text: -dist[text])
    wanted = [num * dist[text] for text in common]
    got = [counts.get(text, 0) for text in common]
    rest, other = num - sum(wanted), num - sum(got)
    if rest >= LEAST_EXPECTED or not common:
        wanted, got = [*wanted, max(rest, _TINY)], [*got, other]
    else:
        wanted[-1], got[-1] = wanted[-1] + rest, got[-1] + other
    statistic = sum((a - b) ** 2 / b for a, b in zip(got, wanted, strict=True))
    freedom = max(len(wanted) - 1, 1)
    is_possible = set(counts) <= {text for text, mass in dist.items() if mass > 0}
    p_value = upper_tail(statistic, freedom) if is_possible else 0.0
    effect = math.sqrt(noncentrality(freedom) / num) if num else math.inf
    return Fit(num, len(wanted), statistic, p_value, effect)


def upper_tail(statistic: float, freedom: float) -> float:
    """Returns P(chi-square > statistic): the regularised upper incomplete gamma function Q(freedom / 2, statistic / 2).

    By its series below freedom + 1, by Lentz's continued fraction above (Abramowitz and Stegun 6.5.29 and 6.5.31).
    """
    a, x = freedom / 2, statistic / 2
    if x <= 0:
        return 1.0
    front = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        for n in range(1, _MOST_TERMS):
            term *= x / (a + n)
            total += term
            if term < total * 1e-16:
                break
        return min(1.0, max(0.0, 1 - front * total))
    b = x + 1 - a
    c, d = 1 / _TINY, 1 / b
    value = d
    for n in range(1, _MOST_TERMS):
        numerator = -n * (n - a)
        b += 2
        d = 1 / (numerator * d + b or _TINY)
        c = b + numerator / c or _TINY
        value *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return min(1.0, front * value)


def critical_value(freedom: float, alpha: float = ALPHA) -> float:
    return _bisect(lambda x: upper_tail(x, freedom) < alpha, 10.0 * freedom + 100)


def power_of(excess: float, freedom: float, critical: float) -> float:
    """Returns the probability that a noncentral chi-square exceeds a value: a Poisson mixture of central ones.

    Args:
        excess: its noncentrality, the number of samples times w^2.
    """
    half, total = excess / 2, 0.0
    spread = 12 * math.sqrt(half) + 30
    for j in range(max(0, int(half - spread)), int(half + spread) + 1):
        weight = math.exp(j * math.log(half) - half - math.lgamma(j + 1)) if half > 0 else float(j == 0)
        total += weight * upper_tail(critical, freedom + 2 * j)
    return min(1.0, total)


@functools.cache
def noncentrality(freedom: float, alpha: float = ALPHA, power: float = POWER) -> float:
    critical = critical_value(freedom, alpha)
    return _bisect(lambda excess: power_of(excess, freedom, critical) > power, 10.0 * freedom + 400)


def _bisect(is_beyond: Any, high: float) -> float:
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if is_beyond(middle) else (middle, high)
        if high - low < 1e-6 * high:
            break
    return high


def counts_of(texts: Sequence[Sequence[int]], num_tokens: int) -> dict[tuple[int, ...], int]:
    """Returns how often each beginning of `num_tokens` tokens came."""
    counts: dict[tuple[int, ...], int] = {}
    for text in texts:
        key = tuple(text[:num_tokens])
        counts[key] = counts.get(key, 0) + 1
    return counts
