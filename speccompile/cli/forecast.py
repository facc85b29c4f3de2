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
    from speccompile.planner.machine import Machine
    from speccompile.planner.outlook import Row
    from speccompile.planner.traffic import Traffic
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
    wanted: tuple[Traffic, list[int], int, list[str], str | None],
    goal: tuple[float | None, bool],
    left_out: dict[str, str],
    files: tuple[Path | None, Path | None],
    as_json: bool,
) -> None:
    """Predicts, prints a row a method and batch, and writes the recipe of the chosen one.

    Args:
        wanted: traffic, batches, context, speculators and names of methods.
        goal: the most milliseconds between two tokens or None, and whether throughput decides.
        files: of the best one's recipe and of the page, or None.
    """
    from speccompile.planner.forecast import forecast
    from speccompile.planner.outlook import BREAK_EVEN_BATCHES, choose

    def leave_out(name: str, fault: SpecCompileError) -> None:
        left_out[name] = str(fault)

    traffic, batches, context, speculators, names = wanted
    out, html = files
    looked_at = sorted({*batches, *(BREAK_EVEN_BATCHES if html else ())})
    every = forecast(source, model, machine, traffic, looked_at, context, speculators, names, leave_out)
    found = [pair for pair in every if pair[0].batch in batches]
    best = choose([row for row, _ in found], *goal)
    sources = {row.method: row.acceptance for row, _ in found if row.acceptance}
    basis = f"{machine.name} ({machine.source}{'' if machine.measured else '; not measured by us'})"
    if out is not None:
        options = next(options for row, options in found if row is best)
        write_recipe(out, source, options, f"plan for {basis}: {best.sentence}")
    if html is not None:
        from speccompile.bundle.files import write_file
        from speccompile.planner.page import page_of_plan

        write_file(html, page_of_plan(source, machine, basis, [row for row, _ in every], best))
    if as_json:
        rows = [asdict(row) for row, _ in found]
        print_json({"machine": basis, "acceptance": sources, "rows": rows, "best": asdict(best), "left_out": left_out})
        return
    console = Console(highlight=False)
    _print_rows(console, [row for row, _ in found])
    for line in (
        f"best: {best.sentence}",
        f"predicted for {basis}; {context} tokens a sequence; --json has all rows",
        "Steps on three CPUs were off by 4 to 14 % (median), 94 % at worst: --try measures.",
        *(f"acceptance of {name}: {what}" for name, what in sources.items()),
        *(f"left out: {name}: {why}" for name, why in left_out.items()),
        *([f"page: {html}"] if html is not None else []),
        f"recipe: {out}" if out is not None else "--out FILE writes the recipe of the best.",
    ):
        console.print(line, soft_wrap=True, markup=False)


def _print_rows(console: Console, rows: list[Row]) -> None:
    from speccompile.benchmark.tables import new_table
    from speccompile.planner.outlook import TITLES

    table = new_table(*TITLES)
    for batch in dict.fromkeys(row.batch for row in rows):
        for row in [row for row in rows if row.batch == batch][:NUM_SHOWN]:
            table.add_row(*row.cells)
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
