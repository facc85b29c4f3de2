# SPDX-License-Identifier: Apache-2.0
"""speccompile plan: which method pays for a model on this machine, and the recipe of the one that does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from speccompile.cli.model_options import prepare_source, with_model_options
from speccompile.cli.options import MAX_THREADS, usable_threads
from speccompile.cli.output import errors_as_json, print_json, print_warning, quiet_libraries
from speccompile.cli.prompts import check_results

if TYPE_CHECKING:
    from speccompile.errors import SpecCompileError
    from speccompile.planner.candidates import Candidate
    from speccompile.recipe.model_recipe import ModelOptions


def register(app: typer.Typer) -> None:
    app.command(name="plan")(with_model_options(plan_command))


def plan_command(
    source: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, a GGUF file, an id of the hub or a recipe.")
    ],
    model: Any,
    *,
    tries: Annotated[
        bool, typer.Option("--try", help="Build every candidate (kept in the cache) and decode prompts with it.")
    ] = False,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="A file with one JSON object a line; `category` groups them.")
    ] = None,
    categories: Annotated[
        str, typer.Option(help="Without --prompts: our own chats, texts where there is no template: `all`, or some.")
    ] = "all",
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of the file, or of each category (2).")] = None,
    speculators: Annotated[
        list[str] | None, typer.Option("--speculator", help="A drafter for this model, folder or hub id; repeatable.")
    ] = None,
    methods: Annotated[str | None, typer.Option(help="Comma-separated candidates; all by default.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to emit for each prompt.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians of them, with their spread.")] = 3,
    threads: Annotated[
        int | None, typer.Option(min=1, max=MAX_THREADS, help="Threads; as measured by default.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the recipe of the fastest one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Find the speculation method that pays.

    With --try: plain decoding, the methods that need no other model, and each --speculator, alone and beside lookups,
    are built and decode the same prompts in turn, greedily, at batch 1.
    """
    if not tries:
        raise typer.BadParameter("give --try, which measures on prompts")
    if model.speculative:
        raise typer.BadParameter("give drafters as --speculator, and methods as --methods")
    check_results(out)
    quiet_libraries()
    left_out: dict[str, str] = {}
    with errors_as_json(as_json):
        report, candidates = _try(
            source, model, speculators or [], methods, left_out, _samples(prompts, categories, limit),
            {"max_new_tokens": max_new_tokens, "repeats": repeats, "threads": usable_threads(threads)},
        )  # fmt: skip
        best = next(one for one in candidates if one.name == report["rows"][0]["name"])
        if out is not None:
            _write_recipe(out, source, best.options(model), report["reason"])
    if as_json:
        print_json({**report, "left_out": left_out})
        return
    _print(report, left_out)
    typer.echo(f"recipe: {out}" if out is not None else "--out FILE writes the recipe of the first row.")


def _samples(prompts: Path | None, categories: str, limit: int | None) -> Callable[[Any], Any]:
    from speccompile.cli.bench import read_samples

    chosen = categories if prompts is None else None
    return lambda bundle: read_samples(bundle, prompts, chosen, limit if prompts else limit or 2)


def _try(
    source: str,
    model: ModelOptions,
    speculators: list[str],
    methods: str | None,
    left_out: dict[str, str],
    read: Callable[[Any], Any],
    settings: dict[str, Any],
) -> tuple[dict[str, Any], list[Candidate]]:
    from speccompile.benchmark.measure import Settings
    from speccompile.cli.progress import open_display
    from speccompile.planner.candidates import candidates_of_source
    from speccompile.planner.trial import build_candidates, try_candidates

    def leave_out(name: str, fault: SpecCompileError) -> None:
        left_out[name] = str(fault)

    def build(one: Candidate) -> Path:
        typer.echo(f"candidate {one.name}", err=True)
        return prepare_source(source, one.options(model)).path

    candidates = candidates_of_source(source, model, speculators, methods)
    built = build_candidates(candidates, build, leave_out)
    samples = read(built[0].bundle)
    with open_display() as display:
        display.stage("measure: load")
        report = try_candidates(
            built, samples, Settings(**settings), leave_out, lambda n, all_: display.stage(f"measure: texts {n}/{all_}")
        )
    return report, candidates


def _write_recipe(path: Path, source: str, options: ModelOptions, reason: str) -> None:
    import yaml

    from speccompile.bundle.files import write_file
    from speccompile.prepare import plan_from_source

    recipe = plan_from_source(source, options).recipe_from_plan()
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    write_file(path, f"# Chosen by speccompile plan --try: {reason}\n{text}")


def _print(report: dict[str, Any], left_out: dict[str, str]) -> None:
    from speccompile.backends.machine import MAX_WAIT_SHARE
    from speccompile.benchmark.tables import figure, new_table, ratio_text
    from speccompile.bundle.report import text_from_bytes

    console, rows = Console(highlight=False), report["rows"]
    table = new_table("method", "tokens\na step", "ms\na step", "tokens/s", "of plain", "memory", "bundle")
    for row in rows:
        sizes = (text_from_bytes(row[key]) if row[key] else "" for key in ("memory_bytes", "bundle_bytes"))
        speed = figure(row["tokens_per_s"], row["tokens_per_s_spread"])
        ratio = ratio_text(row["of_plain"], row["of_plain_spread"])
        table.add_row(row["name"], f"{row['tokens_per_step']:.2f}", f"{row['step_ms']:.2f}", speed, ratio, *sizes)
    console.print(table)
    if kinds := list(rows[0]["by_category"]):
        table = new_table("of plain", *kinds)
        for row in rows:
            table.add_row(row["name"], *(ratio_text(row["by_category"][kind], None) for kind in kinds))
        console.print(table)
    console.print(report["reason"], soft_wrap=True, markup=False)
    for row in rows:
        if row["num_different"]:
            print_warning(f"{row['name']}: {row['num_different']} texts differ from its own plain decoding's")
    for name, why in left_out.items():
        console.print(f"left out: {name}: {why}", style="yellow", soft_wrap=True, markup=False)
    if report["wait_share"] > MAX_WAIT_SHARE:
        waited = f"threads waited for a CPU in {report['wait_share']:.0%} of their time"
        print_warning(f"{waited}: end other work and measure again")
