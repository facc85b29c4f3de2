# SPDX-License-Identifier: Apache-2.0
"""Entry point of the command line. Importing it is light: a command imports what it needs when it runs."""

from __future__ import annotations

from collections.abc import Sequence

import typer

import speccompile
from speccompile.cli import bench, build, convert, doctor, generate, inspect, schema, serve, train, triton
from speccompile.cli.output import print_error
from speccompile.errors import SpecCompileError

_EPILOG = (
    "Exit codes: 0 done, 1 interrupted or a fault of speccompile itself, 2 wrong usage or recipe, 3 checkpoint, "
    "4 export, 5 pass, 6 build, 7 bundle, 8 decoding."
)

app = typer.Typer(
    name="speccompile",
    help="Compile a model and a speculator into one bundle, and decode with it. The output law is the model's own.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"speccompile {speccompile.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    del version


for _command in (build, generate, serve, triton, bench, train, inspect, doctor, convert, schema):
    _command.register(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; those of the process by default.

    Returns:
        The exit code, see `--help`. Usage errors and finished commands leave by SystemExit, as click does.
    """
    try:
        app(None if arguments is None else list(arguments))
    except SpecCompileError as error:
        print_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
