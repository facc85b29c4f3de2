# SPDX-License-Identifier: Apache-2.0
"""The predicted half of `speccompile plan`: its table, and the recipe that it writes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from speccompile.cli.output import print_json

if TYPE_CHECKING:
    from speccompile.errors import SpecCompileError
    from speccompile.planner.acceptance import Acceptance
    from speccompile.planner.machine import Machine
    from speccompile.planner.outlook import Row
    from speccompile.recipe.model_recipe import ModelOptions

MAX_BATCH = 1024
NUM_SHOWN = 8  # rows of a batch


def read_batches(text: str) -> list[int]:
    """Returns the numbers of `--batches`, in rising order."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MAX_BATCH for part in parts):
        expected = f"whole numbers from 1 to {MAX_BATCH}"
        raise typer.BadParameter(f"got {text!r}; expected {expected}", param_hint="--batches")
    return sorted({int(part) for part in parts})


def print_forecast(
    source: str,
    model: ModelOptions,
    machine: Machine,
    wanted: tuple[dict[str, Acceptance], list[int], int, list[str], str | None],
    goal: tuple[float | None, bool],
    left_out: dict[str, str],
    out: Path | None,
    as_json: bool,
) -> None:
    """Predicts, prints a row a method and batch, and writes the recipe of the chosen one.

    Args:
        wanted: acceptance by method, batches, context, speculators and names of methods.
        goal: the most milliseconds between two tokens or None, and whether throughput decides.
    """
    from speccompile.planner.forecast import forecast
    from speccompile.planner.outlook import choose

    def leave_out(name: str, fault: SpecCompileError) -> None:
        left_out[name] = str(fault)

    acceptance, batches, context, speculators, names = wanted
    found = forecast(source, model, machine, acceptance, batches, context, speculators, names, leave_out)
    best = choose([row for row, _ in found], *goal)
    sources = {name or "every method": known.source for name, known in acceptance.items()}
    basis = f"{machine.name} ({machine.source}{'' if machine.measured else '; not measured by us'})"
    if out is not None:
        options = next(options for row, options in found if row is best)
        write_recipe(out, source, options, f"plan for {basis}: {_sentence(best)}")
    if as_json:
        rows = [asdict(row) for row, _ in found]
        print_json({"machine": basis, "acceptance": sources, "rows": rows, "best": asdict(best), "left_out": left_out})
        return
    console = Console(highlight=False)
    _print_rows(console, [row for row, _ in found])
    for line in (
        f"best: {_sentence(best)}",
        f"predicted for {basis}; {context} tokens a sequence; --json has all rows",
        "Predictions are rough (steps were off by up to twice): --try measures.",
        *(f"acceptance of {name}: {what}" for name, what in sources.items()),
        *(f"left out: {name}: {why}" for name, why in left_out.items()),
        f"recipe: {out}" if out is not None else "--out FILE writes the recipe of the best.",
    ):
        console.print(line, soft_wrap=True, markup=False)


def _sentence(row: Row) -> str:
    drafts = f", up to {row.num_drafts} drafts" if row.num_drafts else ""
    low, high = row.tokens_per_s
    return f"{row.method}{drafts}, {row.precision}, batch {row.batch}: {low:.0f} to {high:.0f} tokens/s"


def _print_rows(console: Console, rows: list[Row]) -> None:
    from speccompile.benchmark.tables import new_table
    from speccompile.bundle.report import text_from_bytes

    titles = ("K", "weights", "batch", "tokens/s", "of plain", "ms a\ntoken", "memory", "pays\nbelow")
    table = new_table("method", *titles)
    shown = [
        row for batch in {row.batch: None for row in rows} for row in [r for r in rows if r.batch == batch][:NUM_SHOWN]
    ]
    for row in shown:
        low, high = row.tokens_per_s
        speed = f"{low:.0f}-{high:.0f}" if round(low) != round(high) else f"{low:.0f}"
        ratio = f"x{row.of_plain[0]:.2f}-{row.of_plain[1]:.2f}" if row.num_drafts else ""
        even = "" if not row.num_drafts else f"{row.break_even_batch}" if row.break_even_batch else "> 512"
        cells = (f"{row.num_drafts or ''}", row.precision, f"{row.batch}", speed, ratio, f"{row.token_ms:.2f}")
        table.add_row(row.method, *cells, text_from_bytes(int(row.memory_bytes)), even)
    console.print(table)


def write_recipe(path: Path, source: str, options: Any, reason: str) -> None:
    """Writes the recipe of a choice with all defaults, and why it is the choice.

    Raises:
        BuildError: the file cannot be written.
    """
    import yaml

    from speccompile.bundle.files import write_file
    from speccompile.prepare import plan_from_source

    recipe = plan_from_source(source, options).recipe_from_plan()
    write_file(path, f"# {reason}\n{yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)}")
