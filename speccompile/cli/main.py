# SPDX-License-Identifier: Apache-2.0
"""Entry point of the command line. Importing it is light: a command imports what it needs when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

import speccompile
from speccompile.cli import (
    bench,
    build,
    cache,
    chat,
    convert,
    doctor,
    generate,
    inspect,
    plan,
    profile,
    replay,
    schema,
    serve,
    train,
    triton,
    vectors,
    verify,
)
from speccompile.cli.endings import is_stdout_broken, print_ending, sigterm_unwinds, stdout_error
from speccompile.cli.help_pages import WIDTH, TidyCommand, TidyGroup
from speccompile.cli.options import with_log_level
from speccompile.cli.output import print_error, show_logs
from speccompile.errors import SpecCompileError

_EPILOG = (
    "Exit codes: 0 done, 1 no room on stdout or a fault of speccompile itself, 2 wrong usage or recipe, 3 checkpoint, "
    "4 export, 5 pass, 6 build, 7 bundle, 8 decoding, 9 certificate, 10 certificate with too few drafts, "
    "130 interrupted (Ctrl-C), 143 terminated (SIGTERM)."
)

app = typer.Typer(
    name="speccompile",
    cls=TidyGroup,
    help="Compile a model and a speculator into one bundle, and decode with it. "
    "The output distribution is the model's own.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
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
    show_logs()


_COMMANDS = (
    *(build, verify, generate, chat, serve, replay, triton, bench, profile, plan),
    *(train, inspect, doctor, convert, cache, schema, vectors),
)
for _command in _COMMANDS:
    _command.register(app)
for _info in app.registered_commands:
    _info.cls = TidyCommand
    assert _info.callback is not None
    _info.callback = with_log_level(_info.callback)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code, see `--help`. `arguments` are by default the process's."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except OSError as fault:
        if not is_stdout_broken():
            raise
        error = stdout_error(fault)
        print_error(error)
        return error.exit_code
    return code


def _run(arguments: Sequence[str] | None) -> int:
    try:
        with sigterm_unwinds():
            app(None if arguments is None else list(arguments))
    except SpecCompileError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print_ending(130)
        return 130
    except SystemExit as leave:  # as click ends every command
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        print_ending(code)
        return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
