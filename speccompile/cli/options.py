# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, checked before anything is loaded."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from speccompile.backends.machine import num_usable_cores
from speccompile.cli.output import LOG_LEVELS, print_warning, show_logs

MAX_THREADS = 1024  # as engine.threads of a recipe
LogLevel = Annotated[
    str | None,
    typer.Option(envvar="SPECCOMPILE_LOG", help="What is logged on stderr: error, warning, info or debug."),
]


def usable_threads(threads: int | None) -> int | None:
    """Returns `--threads`, cut with a warning to the cores that there are: engines that spin take turns else."""
    cores = num_usable_cores()
    if threads is None or threads <= cores:
        return threads
    print_warning(f"--threads {threads}: this machine has {cores} cores, and so many threads are used")
    return cores


def with_log_level(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command with `--log-level`, which applies before it runs. One that has `log_level` gets it, too."""
    parameters = inspect.signature(command, eval_str=True).parameters
    takes_level = "log_level" in parameters
    own = inspect.Parameter("log_level", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=LogLevel)

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        level = arguments["log_level"] if takes_level else arguments.pop("log_level")
        if level is not None and level not in LOG_LEVELS:
            raise typer.BadParameter(f"one of {', '.join(LOG_LEVELS)}", param_hint="--log-level")
        show_logs(level or "warning")
        command(**arguments)

    every = [*parameters.values(), *([] if takes_level else [own])]
    run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    return run
