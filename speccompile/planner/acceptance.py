# SPDX-License-Identifier: Apache-2.0
"""How many draft tokens are accepted, by position: counted, published or stated; a range, with its source."""

from __future__ import annotations

import itertools
import json
import math
import operator
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from speccompile.errors import RecipeError

LENGTHS = Path(__file__).with_name("lengths.toml")
MIXED = "mixed"  # the kind of text of averages over several
POSITIONS = 16  # of a published chain, at most
ASSUMED = (0.5, 0.8)  # where nothing is known: what trained drafters reach on most texts, not a forecast
_STATED = 0.05  # on both sides of a stated rate, and of one that a single drafter has published
QUANTILE = 1.96  # of 95 %


@dataclass(frozen=True)
class Acceptance:
    """The share of drafts that is accepted at each position, if all before it were: its low and its high end."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    source: str
    of_lookups: Acceptance | None = None  # a draft that was not made counts as refused, as lookups have none to make
    drafted: float = 1.0  # share of the steps that have drafts; the others cost what plain ones do

    def lengths(self, num: int) -> tuple[float, float]:
        """Returns the expected tokens of a step with a chain of `num` drafts, from and to."""
        return expected_length(self.low, num), expected_length(self.high, num)


NOTHING = Acceptance((0.0,), (0.0,), "")  # of plain decoding


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


def read_acceptance(text: str, kind: str | None = None, name: str = "") -> Acceptance:
    """Returns what an option says.

    Args:
        text: rates from 0 to 1 by position, comma-separated; or a file of `generate`, `bench` or `replay --json`.
        kind, name: of `bench` that category alone, None: all; and the method of `--also`, "": the bundle's own.

    Raises:
        RecipeError: neither.
    """
    if os.path.isfile(text):
        return _from_results(Path(text), kind, name)
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        expected = "rates from 0 to 1 by position, as 0.8,0.7, or results of generate, bench or replay --json"
        raise RecipeError("--acceptance", repr(text), expected, "Correct it.")
    return _around(rates, f"stated, within {_STATED:.0%}")


def _around(rates: Sequence[float], source: str) -> Acceptance:
    low, high = (tuple(min(max(rate + side, 0.0), 1.0) for rate in rates) for side in (-_STATED, _STATED))
    return Acceptance(low, high, source)


def _from_results(path: Path, kind: str | None, name: str) -> Acceptance:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = document if isinstance(document, list) else document.get("results") or _texts(document, kind, name)
        counted = [_counts(row["stats"]) for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as fault:
        expected = "results of generate, bench or replay --json, with acceptance_by_position"
        raise RecipeError(f"--acceptance {path}", f"another document ({fault})", expected, "Write it anew.") from fault
    source = f"counted in {path.name}"
    found = from_counts([counts for _, counts in counted], source)
    if found is None:
        raise RecipeError(f"--acceptance {path}", "no drafts in it", "texts decoded with drafts", "Decode more.")
    steps = [
        [num, *_at_least(row["stats"]["acceptance_histogram"])] for (num, _), row in zip(counted, rows, strict=True)
    ]
    of_lookups = from_counts([list(itertools.pairwise(text)) for text in steps], source)
    tried = sum(sum(row["stats"]["acceptance_histogram"]) for row in rows)
    drafted = tried / max(sum(num for num, _ in counted), 1)
    return replace(found, of_lookups=of_lookups and replace(of_lookups, drafted=drafted))


def _at_least(histogram: Sequence[int]) -> list[int]:
    # Returns how many steps had 1, 2, ... accepted drafts and more.
    return list(itertools.accumulate(reversed(histogram)))[-2::-1]


def _texts(report: Mapping[str, Any], kind: str | None, name: str) -> list[Mapping[str, Any]]:
    modes: Mapping[str, Any] = report.get("by_category", {}).get(kind, report)["modes"]
    named = (f"{name} speculative", *modes)
    chosen = next(mode for mode in named if mode in modes and mode.endswith("speculative"))
    found: list[Mapping[str, Any]] = modes[chosen]["acceptance"]
    return found


def _counts(stats: Mapping[str, Any]) -> tuple[int, list[tuple[float, float]]]:
    """Returns the steps, and by position how many drafts were tried and kept."""
    tried, counts = float(sum(stats["acceptance_histogram"])), []
    for rate in stats["acceptance_by_position"]:
        counts.append((tried, tried * rate))
        tried *= rate
    return stats["num_steps"], counts


def from_counts(texts: Sequence[Sequence[tuple[float, float]]], source: str) -> Acceptance | None:
    """Returns rates with their 95 % interval from (tried, kept) by position of each text; None: nothing was tried."""
    # Drafts of a text are alike: the error is that of a ratio of sums over texts, and at least that of single drafts.
    low, high = [], []
    for counts in itertools.zip_longest(*texts, fillvalue=(0.0, 0.0)):
        tried, kept = (sum(numbers) for numbers in zip(*counts, strict=True))
        if tried < 1:
            break
        rate, num = kept / tried, sum(1 for n, _ in counts if n)
        variance = max(rate * (1 - rate), 0.25 / tried) / tried
        if num > 1:
            variance = max(variance, num / (num - 1) * sum((k - rate * n) ** 2 for n, k in counts) / tried**2)
        low.append(max(rate - QUANTILE * math.sqrt(variance), 0.0))
        high.append(min(rate + QUANTILE * math.sqrt(variance), 1.0))
    return Acceptance(tuple(low), tuple(high), source) if low else None


def published_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = tomllib.loads(LENGTHS.read_text(encoding="utf-8"))["lengths"]
    return rows


def published_kinds() -> set[tuple[str, str]]:
    """Returns the methods and kinds of text of which lengths are published."""
    return {(row["method"], row["kind"]) for row in published_rows()}


def published(method: str, kind: str | None, temperature: float | None) -> Acceptance | None:
    """Returns where one more drafter of a method is expected, by those that are published; None: none is.

    Args:
        kind: of text; rows of other kinds serve where there are none of it, and the source says so.
        temperature: 0 prefers greedy rows, above it sampled ones; None: all.
    """
    rows = [row for row in published_rows() if row["method"] == method]
    if not rows:
        return None
    of_kind = [row for row in rows if row["kind"] == kind] or rows
    alike = [row for row in of_kind if temperature is None or (row["temperature"] > 0) == (temperature > 0)] or of_kind
    kinds = "/".join(sorted({row["kind"] for row in alike}))
    warmth = "/".join(sorted({"sampled" if row["temperature"] > 0 else "greedy" for row in alike}))
    by = "measured by us" if all(row["source"].startswith("measured") for row in alike) else "published"
    source = f"{by}, {len(alike)} of {kinds}, {warmth}"
    curves = [_survival(rates_from_lengths(row["drafts"], row["tokens"])) for row in alike]
    if len(curves) < 2:
        return _around(_rates(curves[0]), source)
    # One more drafter may lie outside of the range of the others: by its width, as for a few draws of one distribution.
    ends = [(min(column), max(column)) for column in zip(*curves, strict=True)]
    low = itertools.accumulate((max(2 * least - most, 0.0) for least, most in ends), min)
    high = itertools.accumulate((min(2 * most - least, 1.0) for least, most in ends), min)
    return Acceptance(tuple(_rates(list(low))), tuple(_rates(list(high))), source)


def rates_from_lengths(drafts: Sequence[int], tokens: Sequence[float]) -> list[float]:
    """Returns rates by position that give these tokens a step; between two chains the rate is constant.

    Points that are no longer than a shorter chain's are noise of the measurement, and left out.
    """
    rates: list[float] = []
    survives = length = 1.0
    for num, tokens_of_step in zip(drafts, tokens, strict=True):
        gained, positions = tokens_of_step - length, num - len(rates)
        if gained <= 0:
            continue
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            is_short = survives * sum(middle**i for i in range(1, positions + 1)) < gained
            low, high = (middle, high) if is_short else (low, middle)
        rates += [high] * positions
        survives, length = survives * high**positions, tokens_of_step
    return rates


def _survival(rates: Sequence[float]) -> list[float]:
    padded = itertools.islice(itertools.chain(rates, itertools.repeat(rates[-1])), POSITIONS)
    return list(itertools.accumulate(padded, operator.mul))


def _rates(survival: Sequence[float]) -> list[float]:
    return [now / before if before else 0.0 for before, now in itertools.pairwise([1.0, *survival])]
