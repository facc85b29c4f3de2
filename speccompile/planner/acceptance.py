# SPDX-License-Identifier: Apache-2.0
"""How many draft tokens are accepted, by position: stated, or counted in results of `generate`; always a range."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.errors import RecipeError

ASSUMED = (0.5, 0.8)  # where nothing is known: what trained drafters reach on most texts, not a forecast
_STATED = 0.05  # on both sides of a stated rate
_QUANTILE = 1.96  # of 95 %


@dataclass(frozen=True)
class Acceptance:
    """The share of drafts that is accepted at each position, if all before it were: its low and its high end."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    source: str

    def lengths(self, num: int) -> tuple[float, float]:
        """Returns the expected tokens of a step with a chain of `num` drafts, from and to."""
        return expected_length(self.low, num), expected_length(self.high, num)


def expected_length(rates: Sequence[float], num: int) -> float:
    """Returns 1 + sum over i of the product of the first i rates; beyond the last position its rate stays."""
    length, survives = 1.0, 1.0
    for position in range(num):
        survives *= rates[min(position, len(rates) - 1)]
        length += survives
    return length


def assumed() -> Acceptance:
    low, high = ASSUMED
    return Acceptance((low,), (high,), f"assumed: {low:.0%} to {high:.0%}")


def read_acceptance(text: str) -> Acceptance:
    """Returns what an option says.

    Args:
        text: rates from 0 to 1 by position, comma-separated; or the file of `generate --json`.

    Raises:
        RecipeError: neither.
    """
    path = Path(text)
    if path.is_file():
        return _from_results(path)
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        expected = "rates from 0 to 1 by position, as 0.8,0.7, or a file of generate --json"
        raise RecipeError("--acceptance", repr(text), expected, "Correct it.")
    low, high = (tuple(min(max(rate + side, 0.0), 1.0) for rate in rates) for side in (-_STATED, _STATED))
    return Acceptance(low, high, f"stated, within {_STATED:.0%}")


def _from_results(path: Path) -> Acceptance:
    """Returns the rates of all texts together, with their 95 % interval (normal approximation)."""
    try:
        results: list[Mapping[str, Any]] = [row["stats"] for row in json.loads(path.read_text(encoding="utf-8"))]
        by_text = [(stats["acceptance_by_position"], stats["num_steps"]) for stats in results]
    except (ValueError, KeyError, TypeError) as fault:
        expected = "the results of generate --json, with stats.acceptance_by_position"
        raise RecipeError(f"--acceptance {path}", f"another document ({fault})", expected, "Write it anew.") from fault
    low, high = [], []
    for position in range(max((len(rates) for rates, _ in by_text), default=0)):
        num_tried = num_accepted = 0.0
        for rates, steps in by_text:
            if position < len(rates) and rates[position] is not None:
                tried = steps * math.prod(rates[:position])
                num_tried, num_accepted = num_tried + tried, num_accepted + tried * rates[position]
        if num_tried < 1:
            break
        rate = num_accepted / num_tried
        error = _QUANTILE * math.sqrt(max(rate * (1 - rate), 0.25 / num_tried) / num_tried)
        low.append(max(rate - error, 0.0))
        high.append(min(rate + error, 1.0))
    if not low:
        raise RecipeError(f"--acceptance {path}", "no drafts in it", "texts decoded with drafts", "Decode more.")
    return Acceptance(tuple(low), tuple(high), f"counted in {path.name}")
