# SPDX-License-Identifier: Apache-2.0
"""What `speccompile bench` prints of its report: a row a mode, in 80 columns, and what the rows mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from speccompile.benchmark.summary import Ratio

Row = Mapping[str, Any]
GROUPS = {"by_category": "category", "by_context": "context"}


def figure(value: float, spread: float | None) -> str:
    digits = max(0, 2 - len(str(int(abs(value)))) + (value < 100))
    return f"{value:.{digits}f}" + ("" if spread is None else f" ±{spread:.{digits}f}")


def ratio_text(value: float | None, spread: float | None) -> str:
    """Returns a ratio with its spread; empty where there is none."""
    return "" if value is None else f"x{value:.2f}" + ("" if spread is None else f" ±{spread:.2f}")


def equal_texts(row: Row) -> str:
    """Returns how many texts are the reference's, and where the others leave it."""
    if row["num_equal"] is None:
        return "not run"
    at = row["mean_first_difference"]
    return f"{row['num_equal']}/{row['num_texts']}" + ("" if at is None else f" ({at:.0f})")


def print_report(console: Console, report: Row) -> None:
    """Prints the tables of a report, and what is to be known of them."""
    console.print(_table(report["modes"], report["reference"].get("source")))
    for kind, title in GROUPS.items():
        if len(groups := report.get(kind, {})) > 1:
            console.print(_table_of_groups(title, groups))
    for line in _notes(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for line in [*(f"left out: {name}: {why}" for name, why in report["left_out"].items()), *report["warnings"]]:
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)


def new_table(name: str, *titles: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for title in (name, *titles):
        table.add_column(title, justify="left" if title in (name, "mode") else "right", no_wrap=True)
    return table


def _table(modes: Mapping[str, Row], reference: str | None) -> Table:
    table = new_table("mode", "tokens/s", "with\nprefill", "tokens\na step", "of plain", "texts")
    for name, row in modes.items():
        table.add_row(
            name,
            figure(row["tokens_per_s"], row["tokens_per_s_spread"]),
            figure(row["tokens_per_s_with_prefill"], row["tokens_per_s_with_prefill_spread"]),
            f"{row['mean_acceptance_length']:.2f}",
            ratio_text(row["of_plain"], row["of_plain_spread"]),
            "reference" if name == reference else equal_texts(row),
        )
    return table


def _table_of_groups(title: str, groups: Mapping[str, Row]) -> Table:
    table = new_table(f"{title}\n(prompts)", "mode", "tokens/s", "tokens\na step", "of plain", "texts")
    for group, figures in groups.items():
        for at, (name, row) in enumerate(figures["modes"].items()):
            speed = figure(row["tokens_per_s"], row["tokens_per_s_spread"])
            cells = [speed, f"{row['mean_acceptance_length']:.2f}", ratio_text(row["of_plain"], row["of_plain_spread"])]
            table.add_row("" if at else f"{group} ({figures['num_prompts']})", name, *cells, equal_texts(row))
    return table


def _notes(report: Row) -> Iterator[str]:
    repeats = report["environment"]["repeats"]
    if repeats > 1:
        yield f"Medians of {repeats} rounds; ±: half of the 95 % confidence interval."
    else:
        yield "One round: nothing is known of the noise. Ask for --repeats 5 or more."
    yield "of plain: the quotient of the medians, to plain decoding in the same engine; ± by the quotients of rounds."
    reference = report["reference"]
    if (why := reference.get("not_run")) is not None:
        yield f"texts: not run: {why}"
    else:
        engine = f"{reference['engine']} {reference['versions']['transformers']}"
        yield f"texts: equal to {engine}'s greedy ones in float32; in brackets the mean index of the first other token."
    for name, row in report["modes"].items():
        if (why := row.get("drafts")) is not None:
            yield f"{name}: {why}"
        spread, plain = row["of_plain_spread"], row["num_equal_to_plain"]
        if plain is not None and spread is not None and Ratio(row["of_plain"], spread).is_noise:
            yield f"{name}: no difference from plain decoding within the noise ({ratio_text(row['of_plain'], spread)})"
        if plain is not None and plain < row["num_texts"]:
            yield f"{name}: {row['num_texts'] - plain} of {row['num_texts']} texts differ from its own plain decoding's"
    for name, value in report["ratios"].items():
        if name != "speculative/plain":  # in the table
            yield f"{name}: {ratio_text(value, report['ratio_spreads'][name])}"
