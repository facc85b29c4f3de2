# SPDX-License-Identifier: Apache-2.0
"""speccompile verify: proof that a bundle decodes as its target does, written into the bundle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from speccompile.cli.output import errors_as_json, live_stages, print_json, quiet_libraries
from speccompile.errors import CertificateError, TooFewDraftsError

_STYLES = {"passed": "green", "failed": "bold red", "not run": "yellow", "incomplete": "yellow"}


def verify_command(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="A file with one JSON object a line; short texts by default.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first prompts of the file only.")] = None,
    num_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each greedy text.")] = 48,
    checkpoint: Annotated[
        Path | None, typer.Option(help="The target's checkpoint, where it is not where the build found it.")
    ] = None,
    use_checkpoint: Annotated[
        bool, typer.Option("--with-checkpoint/--without-checkpoint", help="Compare with transformers in float32.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate as JSON.")] = False,
) -> None:
    """Check that a bundle decodes as its target does, and write certificate.json and certificate.html into it.

    A check that cannot run here is named as not run, with the reason. Exit code 9 when one fails, 10 when one scored
    too few drafts.
    """
    from speccompile.bundle.bundle import read_bundle
    from speccompile.certificate.verify import Options
    from speccompile.cli.prompts import prompts_of_bundle, read_requests

    with errors_as_json(as_json):
        given = None
        if prompts is not None:
            given = prompts_of_bundle(read_bundle(bundle), read_requests(prompts, limit))
        options = Options(given, num_tokens, checkpoint=checkpoint, use_checkpoint=use_checkpoint)
        certificate = run_verify(bundle, options)
    if as_json:
        print_json(certificate)
    else:
        print_certificate(bundle, certificate)
    leave_unless_passed(certificate)


def run_verify(bundle: Path, options: Any = None) -> dict[str, Any]:
    """Returns the certificate of a bundle, which is written into it; shows the checks as they run."""
    quiet_libraries()
    from speccompile.certificate.verify import verify

    with live_stages() as progress:
        return verify(bundle, options, progress)


def print_certificate(bundle: Path, certificate: Mapping[str, Any]) -> None:
    """Prints the results of a certificate on stdout."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    table = Table("check", "result", "what was seen", box=None, header_style="dim")
    for check in certificate["checks"]:
        status = str(check["status"])
        table.add_row(check["name"], Text(status, _STYLES[status]), check["summary"])
    console.print(table)
    verdict = str(certificate["verdict"])
    head = Text.assemble((verdict, _STYLES[verdict]), f" in {certificate['seconds']:.0f} s: {bundle}/certificate.html")
    console.print(head)


def leave_unless_passed(certificate: Mapping[str, Any]) -> None:
    """Ends the command with a certificate's exit code. Raises typer.Exit: a check failed, or had too few drafts."""
    if certificate["verdict"] == "failed":
        raise typer.Exit(CertificateError.exit_code)
    if not all(check.get("has_enough_drafts", True) for check in certificate["checks"]):
        raise typer.Exit(TooFewDraftsError.exit_code)
