# SPDX-License-Identifier: Apache-2.0
"""speccompile doctor: which layout a speculator's checkpoint has, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from speccompile.cli.build import check_class
from speccompile.cli.output import errors_as_json, live_stages, print_json, quiet_libraries
from speccompile.cli.prompts import prompts_of_requests, read_requests
from speccompile.common.json_reader import parse_json
from speccompile.errors import RecipeError

if TYPE_CHECKING:
    from speccompile.doctor.findings import Finding, Report
    from speccompile.doctor.probe import ProbeReport


def doctor_command(
    speculator: Annotated[str, typer.Argument(help="A speculator's folder or hub id.")],
    target: Annotated[str | None, typer.Option("--target", help="The model that it is for: folder or hub id.")] = None,
    values: Annotated[
        bool | None, typer.Option("--values/--no-values", help="Read the weights, too; by default up to 1 GiB.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE instead of its config's.")] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Draft on the target, to find what the file means.")] = False,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="For --probe: a JSON object a line.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Name a checkpoint's layout, and check every key, shape, dtype, tie and vocabulary.

    One finding a line: severity, check, where, what was got, what was expected, what to do. Exit code 3 when one of
    them is an error. With --probe its drafter runs on the target for about a minute, under every convention that the
    file could mean, and the one that the weights were trained for is named.
    """
    from speccompile.doctor.doctor import examine, find_target

    quiet_libraries()
    with errors_as_json(as_json):
        if target is None and probe:
            raise RecipeError("--target", "nothing", "the model on which --probe drafts", "Give it with --target.")
        if prompts is not None and not probe:
            raise RecipeError("--prompts", str(prompts), "--probe, which reads them", "Add --probe.")
        texts = None if prompts is None else _texts(prompts, str(target))
        given = parse_overrides(overrides or [])
        if target is not None and (folder := find_target(target).folder) is not None:
            check_class(folder)
        report = examine(speculator, target, values=values, overrides=given)
        if not as_json:
            _print_report(report)
        probed = _probe(speculator, target, texts, given) if probe and target is not None else None
    if probed is not None:
        report = replace(report, findings=(*report.findings, *probed.findings))
    if as_json:
        print_json(report.json_from_report() | ({} if probed is None else {"probe": probed.json_from_report()}))
    elif probed is not None:
        _print_probe(probed)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def _texts(prompts: Path, target: str) -> list[str | list[int]]:
    requests = read_requests(prompts)
    if not any(request.messages for request in requests):
        return [request.prompt for request in requests]
    from speccompile.checkpoints.folders import resolve_checkpoint
    from speccompile.training.text import read_tokenizer

    folder = resolve_checkpoint(target)
    return prompts_of_requests(requests, read_tokenizer(folder)[0], folder)


def _probe(
    speculator: str, target: str, prompts: list[str | list[int]] | None, overrides: dict[str, Any]
) -> ProbeReport:
    from speccompile.certificate.probe import probe_checkpoint

    with live_stages() as progress:
        return probe_checkpoint(speculator, target, prompts=prompts, overrides=overrides, progress=progress)


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """Returns {"KEY": VALUE} of KEY=VALUE, JSON or text. Raises RecipeError: no "=" in it."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, is_there, text = pair.partition("=")
        if not is_there or not key:
            raise RecipeError("--set", repr(pair), "KEY=VALUE", "Correct the option.")
        try:
            found[key] = parse_json(text)
        except ValueError:
            found[key] = text
    return found


def _print_report(report: Report) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(Text.assemble((report.label, "bold"), f"  {report.folder}"))
    if report.num_tensors:
        read = "weights read" if report.has_read_values else "headers alone read"
        against = f"; against {report.target}" if report.target else "; no target given"
        console.print(f"{report.num_tensors} tensors, {report.num_params:,} parameters, {read}{against}")
    _print_findings(console, report.findings)
    num_errors = len(report.errors)
    num_warnings = len(report.findings) - num_errors
    if report.findings:
        console.print(f"{_count(num_errors, 'error')}, {_count(num_warnings, 'warning')}")
    else:
        console.print(Text("nothing found", "green"))


def _print_findings(console: Console, findings: Sequence[Finding]) -> None:
    for finding in findings:
        style = "bold red" if finding.severity == "error" else "yellow"
        text = finding.text().removeprefix(finding.severity)
        console.print(Text.assemble((finding.severity, style), text))


def _print_probe(probed: ProbeReport) -> None:
    from speccompile.doctor.probe import text_of

    console = Console(soft_wrap=True, highlight=False, markup=False)
    rows = [("reading", "length", "beside stated", "accepted / tried by position")]
    for held in probed.readings:
        name = ", ".join(f"{name} {text_of(value)}" for name, value in held.changed.items())
        error = "?" if held.standard_error is None else f"{held.standard_error:.2f}"
        gain = f"{held.gain:+.2f} ± {error}" if held.changed else ""
        shares = " ".join(f"{share:.2f}" for share in held.by_position)
        rows.append((name or "as stated", f"{held.mean_acceptance_length:.2f}", gain, shares))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        console.print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    num = probed.readings[0].num_starts
    console.print(f"{_count(probed.num_prompts, 'text')} of the target, {num} chains of {probed.num_drafts} drafts")
    if probed.alike and probed.verdict != "undecided":
        values = [f"{name} {' or '.join(map(text_of, held))}" for name, held in probed.alike.items()]
        console.print(f"not worse on these texts: {'; '.join(values)}")
    _print_findings(console, probed.findings)
    meant = ", ".join(f"{name} {text_of(value)}" for name, value in probed.meant.items())
    verdict = f"the weights mean {meant}" if meant else probed.verdict
    console.print(Text(f"probe: {verdict}", "green" if probed.verdict == "as stated" else "bold"))


def _count(num: int, noun: str) -> str:
    return f"{num} {noun}{'' if num == 1 else 's'}"
