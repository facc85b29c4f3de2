# SPDX-License-Identifier: Apache-2.0
"""speccompile plan: which method pays for a model on this machine, and the recipe of the one that does."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from speccompile.cli.forecast import print_forecast, read_batches, write_recipe
from speccompile.cli.options import MAX_THREADS, prepare_source, usable_threads, with_model_options
from speccompile.cli.output import errors_as_json, live_stages, print_json, print_warning, quiet_libraries
from speccompile.cli.prompts import check_results, read_requests

if TYPE_CHECKING:
    from speccompile.errors import SpecCompileError
    from speccompile.planner.candidates import Candidate
    from speccompile.planner.machine import Machine
    from speccompile.planner.traffic import Traffic
    from speccompile.recipe.model_recipe import ModelOptions


BATCHES, NUM_TOKENS, REPEATS = "1,8,32", 64, 3  # where the options say nothing


@with_model_options
def plan_command(
    source: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A checkpoint's folder, a GGUF file, an id of the hub or a recipe."),
    ] = None,
    *,
    model: Any,
    machine: Annotated[
        str, typer.Option(help="Predict for `this` machine, as measured, or a published one, e.g. H100-SXM.")
    ] = "this",
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine anew, in about a minute.")] = False,
    acceptance: Annotated[
        list[str] | None,
        typer.Option(help="[METHOD=]rates by position, 0.8,0.7, or results of generate, bench or replay --json."),
    ] = None,
    traffic: Annotated[
        str | None, typer.Option(help="Kind of text, e.g. chat or code, or a file of serve --record.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Of the texts; as recorded by default.")] = None,
    batches: Annotated[str, typer.Option(help="Comma-separated numbers of sequences at once.")] = BATCHES,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence, prompt included; as recorded, or 512.")
    ] = None,
    latency: Annotated[
        float | None, typer.Option(min=0.0, help="Most milliseconds between two tokens; then the highest throughput.")
    ] = None,
    throughput: Annotated[
        bool, typer.Option("--throughput", help="Choose the most tokens/s over all batches.")
    ] = False,
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
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to emit for each prompt.")] = NUM_TOKENS,
    repeats: Annotated[
        int, typer.Option(min=1, help="Rounds; figures are medians of them, with their spread.")
    ] = REPEATS,
    threads: Annotated[
        int | None, typer.Option(min=1, max=MAX_THREADS, help="Threads; as measured by default.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the recipe of the choice.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with the roofline and the break-even map.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Find the speculation method that pays.

    Candidates are plain decoding, the methods that need no other model, and each --speculator, alone and beside
    lookups. Their speed is predicted from sizes and a machine's rates, as a range; nothing is built. With --try they
    are built, and decode the same prompts in turn, greedily, at batch 1.
    """
    if source is None and not measure:
        raise typer.BadParameter("give a MODEL, or --measure")
    if model.speculative:
        raise typer.BadParameter("give drafters as --speculator, and methods as --methods")
    predicts = (acceptance, traffic, html, throughput, measure, machine != "this", batches != BATCHES)
    if tries and (any(predicts) or (temperature, context, latency) != (None, None, None)):
        todo = "leave the options of predictions out, --machine to --throughput and --html"
        raise typer.BadParameter(f"--try measures here; {todo}")
    if not tries and (prompts or limit or categories != "all" or max_new_tokens != NUM_TOKENS or repeats != REPEATS):
        todo = "leave --prompts, --categories, --limit, --max-new-tokens and --repeats out"
        raise typer.BadParameter(f"without --try nothing is decoded; {todo}")
    if measure and machine != "this":
        raise typer.BadParameter("--measure measures this machine; leave --machine out")
    if latency is not None and throughput:
        raise typer.BadParameter("give --latency or --throughput")
    check_results(out)
    check_results(html)
    quiet_libraries()
    from speccompile.planner.candidates import candidates_of_source, context_of_source

    left_out: dict[str, str] = {}
    chosen = (speculators or [], methods)
    with errors_as_json(as_json):
        if source is None:
            rates = _read_machine(machine, measure, threads)
            if as_json:
                print_json(asdict(rates))
                return
            typer.echo(f"this machine: {rates.source}, {rates.launch_s * 1e6:.1f} us a launch")
            return
        if not tries:
            known = _read_traffic(traffic, temperature, acceptance or [])
            num_tokens = context_of_source(source, model, context, known.context)
            wanted = (known, read_batches(batches), num_tokens, *chosen)
            if machine == "this" or measure:
                candidates_of_source(source, model, *chosen)  # raises before the machine is measured
            rates = _read_machine(machine, measure, threads)
            print_forecast(source, model, rates, wanted, (latency, throughput), left_out, (out, html), as_json)
            return
        if prompts is not None:
            read_requests(prompts, limit)  # raises before anything is built
        settings = {"max_new_tokens": max_new_tokens, "repeats": repeats, "threads": usable_threads(threads)}
        report, candidates = _try(source, model, *chosen, left_out, _samples(prompts, categories, limit), settings)
        best = next(one for one in candidates if one.name == report["choice"])
        if out is not None:
            write_recipe(out, source, best.options(model), f"plan --try: {report['reason']}")
    if as_json:
        print_json({**report, "left_out": left_out})
        return
    _print(report, left_out)
    typer.echo(f"recipe: {out}" if out is not None else "--out FILE writes the recipe of the choice.")


def _read_machine(name: str, is_anew: bool, threads: int | None) -> Machine:
    from speccompile.backends.machine import num_usable_cores
    from speccompile.planner.machine import THIS, find_machine
    from speccompile.planner.measuring import kept_machine, measure_machine

    if name != THIS and not is_anew:
        return find_machine(name)
    num = usable_threads(threads) or num_usable_cores()
    kept = None if is_anew else kept_machine(num)
    if kept is not None:
        return kept
    with live_stages() as progress:
        return measure_machine(num, lambda what: progress(f"measure this machine: {what}"))


def _read_traffic(text: str | None, temperature: float | None, given: list[str]) -> Traffic:
    from speccompile.planner.acceptance import read_acceptance
    from speccompile.planner.traffic import read_traffic

    found = {}
    for one in given:
        parts = one.split("=")
        splits = [("=".join(parts[:n]), "=".join(parts[n:])) for n in range(len(parts))]
        name, rates = next((split for split in splits if os.path.isfile(split[1])), splits[-1])
        found[name] = read_acceptance(rates, text, name)
    return read_traffic(text, temperature, found)


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
    from speccompile.cli.output import open_display
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


def _print(report: dict[str, Any], left_out: dict[str, str]) -> None:
    from speccompile.backends.machine import disturbance
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
    if waited := disturbance(report["wait_share"]):
        print_warning(waited)
