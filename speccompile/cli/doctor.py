# SPDX-License-Identifier: Apache-2.0
"""speccompile doctor: which layout a speculator's checkpoint has, and what is wrong with it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from speccompile.cli.output import errors_as_json, print_json
from speccompile.errors import RecipeError

if TYPE_CHECKING:
    from speccompile.doctor.findings import Report


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(name="doctor")(doctor_command)


def doctor_command(
    speculator: Annotated[str, typer.Argument(help="A speculator's folder or hub id.")],
    target: Annotated[str | None, typer.Option("--target", help="The model that it is for: folder or hub id.")] = None,
    values: Annotated[
        bool | None, typer.Option("--values/--no-values", help="Read the weights, too; by default up to 1 GiB.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE instead of its config's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Name a checkpoint's layout, and check every key, shape, dtype, tie and vocabulary.

    One finding a line: severity, check, where, what was got, what was expected, what to do. Exit code 3 when one of
    them is an error.
    """
    from speccompile.doctor.doctor import examine

    with errors_as_json(as_json):
        report = examine(speculator, target, values=values, overrides=parse_overrides(overrides or []))
    if as_json:
        print_json(report.json_from_report())
    else:
        _print_report(report)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """Returns {"KEY": VALUE} of KEY=VALUE; a value is JSON, or text where it is none.

    Raises:
        RecipeError: no "=" in it.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, is_there, text = pair.partition("=")
        if not is_there or not key:
            raise RecipeError("--set", repr(pair), "KEY=VALUE", "Correct the option.")
        try:
            found[key] = json.loads(text)
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
    for finding in report.findings:
        style = "bold red" if finding.severity == "error" else "yellow"
        text = finding.text().removeprefix(finding.severity)
        console.print(Text.assemble((finding.severity, style), text))
    num_errors = len(report.errors)
    num_warnings = len(report.findings) - num_errors
    if report.findings:
        console.print(f"{_count(num_errors, 'error')}, {_count(num_warnings, 'warning')}")
    else:
        console.print(Text("nothing found", "green"))


def _count(num: int, noun: str) -> str:
    return f"{num} {noun}{'' if num == 1 else 's'}"
