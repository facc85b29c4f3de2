# SPDX-License-Identifier: Apache-2.0
"""Figures of a benchmark: medians of rounds with their spread, quotients of them, and texts beside the right ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from speccompile.benchmark.rounds import Runs

Texts = Sequence[Sequence[int]]

# 97.5 % quantiles of Student's distribution, by degrees of freedom from 1 on; the last one serves for more.
QUANTILES = (
    *(12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26),
    *(2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10),
)
MEDIAN_ERROR = 1.2533  # times a mean's: the standard error of a median, sqrt(pi / 2), of numbers spread normally
ALONE = {"speculative": "plain", "transformers-assisted": "transformers"}
RATIOS = ("speculative", "plain", "transformers-assisted", "transformers")  # each over those after it


@dataclass(frozen=True)
class Ratio:
    """One mode's speed over another's.

    Args:
        spread: half the width of the 95 % confidence interval, by the quotients of rounds; None: a single round.
    """

    value: float
    spread: float | None

    @property
    def is_noise(self) -> bool:
        return self.spread is not None and abs(self.value - 1.0) <= self.spread


def spread_of(values: Sequence[float]) -> float | None:
    """Returns half the width of the 95 % confidence interval of a median; None for a single value."""
    if len(values) < 2:
        return None
    quantile = QUANTILES[min(len(values) - 2, len(QUANTILES) - 1)]
    return quantile * MEDIAN_ERROR * stdev(values) / math.sqrt(len(values))


def ratio_of_rounds(speeds: Sequence[float], others: Sequence[float]) -> Ratio | None:
    """Returns the ratio of two modes by their speeds in each round; None where the other one's median is 0."""
    if median(others) <= 0:
        return None
    return Ratio(median(speeds) / median(others), spread_of([a / b for a, b in zip(speeds, others, strict=True) if b]))


def plain_beside(name: str) -> str:
    return name.rpartition(" ")[0] + " plain" if " " in name else ALONE.get(name, name)


def summary_from_runs(runs: Runs, reference: Texts | None = None, eos_token_ids: Sequence[int] = ()) -> dict[str, Any]:
    """Returns the modes' figures and their ratios.

    `tokens_per_s` is decoding alone, without the prompt's time and tokens (`num_first_tokens`), the median over rounds;
    `tokens_per_s_with_prefill` has both. Their `_spread` is half the width of the median's 95 % confidence interval.
    `first_token_ms`: from the call to the first new token, the median over all texts. `of_plain`: the quotient of
    `tokens_per_s` and plain decoding's in the same engine, else None.

    Of `num_texts` prompts `num_equal` have the reference's text in every round; `mean_first_difference` is the mean
    index of the first other token of the rest. `num_equal_to_plain`: the same beside plain decoding. An end token of
    `eos_token_ids` does not count: some engines leave it out.

    Args:
        reference: the right text of each prompt; None: it was not run, and nothing is said about equality.
    """
    truth = None if reference is None else [_text(tokens, eos_token_ids) for tokens in reference]
    modes = {mode: {**_speeds(rounds), **_texts(rounds, truth, eos_token_ids)} for mode, rounds in runs.items()}
    for mode, row in modes.items():
        row |= dict.fromkeys(("of_plain", "of_plain_spread", "num_equal_to_plain"))
        plain = plain_beside(mode)
        if plain == mode or plain not in modes:
            continue
        own = [_text(result["tokens"], eos_token_ids) for result in runs[plain][0]]
        row["num_equal_to_plain"] = _texts(runs[mode], own, eos_token_ids)["num_equal"]
        if (ratio := ratio_of_rounds(row["tokens_per_s_all"], modes[plain]["tokens_per_s_all"])) is not None:
            row["of_plain"], row["of_plain_spread"] = ratio.value, ratio.spread
    ratios = {}
    order = [mode for mode in RATIOS if mode in modes]
    for at, mode in enumerate(order):
        for other in order[at + 1 :]:
            ratios[f"{mode}/{other}"] = ratio_of_rounds(*(modes[m]["tokens_per_s_all"] for m in (mode, other)))
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    return {
        "modes": modes,
        "ratios": {name: ratio.value for name, ratio in known.items()},
        "ratio_spreads": {name: ratio.spread for name, ratio in known.items()},
    }


def _text(tokens: Sequence[int], eos_token_ids: Sequence[int]) -> list[int]:
    return list(tokens[:-1] if tokens and tokens[-1] in eos_token_ids else tokens)


def _first_difference(text: Sequence[int], other: Sequence[int]) -> int | None:
    if list(text) == list(other):
        return None
    both = zip(text, other, strict=False)
    return next((i for i, (a, b) in enumerate(both) if a != b), min(len(text), len(other)))


def _texts(rounds: Sequence[Any], truth: Texts | None, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    if truth is None:
        return {"num_texts": len(rounds[0]), "num_equal": None, "mean_first_difference": None}
    first: list[int] = []
    for prompt, right in enumerate(truth):
        at = [_first_difference(_text(one[prompt]["tokens"], eos_token_ids), right) for one in rounds]
        first += [min(found)] if (found := [index for index in at if index is not None]) else []
    mean = fmean(first) if first else None
    return {"num_texts": len(truth), "num_equal": len(truth) - len(first), "mean_first_difference": mean}


def _speeds(rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    results = [result for results in rounds for result in results]
    speeds, speeds_with_prefill = [], []
    for one in rounds:
        num = sum(len(result["tokens"]) for result in one)
        total_s = sum(result["total_s"] for result in one)
        prefill_s = sum(result["prefill_s"] for result in one)
        num_first = sum(result.get("num_first_tokens", 0) for result in one)
        speeds.append((num - num_first) / max(total_s - prefill_s, 1e-9))
        speeds_with_prefill.append(num / max(total_s, 1e-9))
    steps = sum(result["num_steps"] for result in results)
    outside = [result["outside_s"] for result in results]
    decode_s = sum(result["total_s"] - result["prefill_s"] for result in results)
    return {
        "tokens_per_s": median(speeds),
        "tokens_per_s_spread": spread_of(speeds),
        "tokens_per_s_all": speeds,
        "tokens_per_s_with_prefill": median(speeds_with_prefill),
        "tokens_per_s_with_prefill_spread": spread_of(speeds_with_prefill),
        "first_token_ms": median(result["first_token_s"] for result in results) * 1e3,
        "mean_acceptance_length": 1 + sum(result["num_accepted"] for result in results) / max(steps, 1),
        "acceptance": [{"stats": result["stats"]} for result in rounds[-1] if "stats" in result],
        "outside_engine_share": None if None in outside else sum(outside) / max(decode_s, 1e-9),
        "num_tokens": sum(len(result["tokens"]) for result in rounds[0]),
        "peak_rss_bytes": results[-1]["peak_rss_bytes"],
        "drafts": results[-1].get("drafts"),
        "wait_share": results[-1].get("wait_share"),
    }
