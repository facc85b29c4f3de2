# SPDX-License-Identifier: Apache-2.0
"""What the commands print: errors, JSON, the live list of stages. Results go to stdout, all else to stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from speccompile.common.waiting import LOGGER
from speccompile.errors import SpecCompileError

_BAR_CELLS = 24
_NOT_RUN = "not run: "
LOG_LEVELS = ("error", "warning", "info", "debug")


def print_error(error: SpecCompileError) -> None:
    console = Console(stderr=True, soft_wrap=True)
    console.print(Text.assemble((type(error).__name__, "bold red"), "  ", (error.where, "bold")))
    for label, value in (("got", error.got), ("expected", error.expected), ("to do", error.todo)):
        console.print(Text.assemble((f"  {label:<10}", "dim"), value))


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1))


def json_from_error(error: SpecCompileError) -> dict[str, Any]:
    parts = {name: getattr(error, name) for name in ("where", "got", "expected", "todo", "exit_code")}
    return {"kind": type(error).__name__, **parts}


@contextlib.contextmanager
def errors_as_json(wanted: bool) -> Iterator[None]:
    """With `--json` an error is a document {"error": {...}} on stdout; the exit code stays."""
    try:
        yield
    except SpecCompileError as error:
        if not wanted:
            raise
        print_json({"error": json_from_error(error)})
        raise typer.Exit(error.exit_code) from error


def text_from_step(message: str) -> Text:
    """Returns a step such as "PHASE 3/12" with a bar for the share that is done; any other message as it is."""
    phase, _, share = message.rpartition(" ")
    done, slash, total = share.partition("/")
    if not slash or not done.isdigit() or not total.isdigit() or int(total) == 0:
        return Text(message)
    filled = round(_BAR_CELLS * min(int(done) / int(total), 1.0))
    bar = ("━" * filled, "green"), ("━" * (_BAR_CELLS - filled), "dim")
    return Text.assemble(f"{phase} ", *bar, f" {share}")


@contextlib.contextmanager
def live_stages() -> Iterator[Callable[[str], None]]:
    """Yields a callback for "STAGE" and "STAGE: STEP": a spinner on a terminal, a line for each stage elsewhere."""
    console = Console(stderr=True, soft_wrap=True)
    current, start, is_own = "", time.perf_counter(), True  # whether a stage was reported, or is waited for

    def finish(outcome: str = "") -> None:
        nonlocal current
        if current:
            outcome = outcome or f"{time.perf_counter() - start:.1f} s"
            is_done = not outcome.startswith(_NOT_RUN)
            head = ("done ", "green") if is_done else ("skip ", "yellow")
            console.print(Text.assemble(head, f"{current:<24}", (f"{outcome:>9}", "dim")))
        current = ""

    with console.status("starting") as status:

        def report(message: str) -> None:
            nonlocal current, start, is_own
            stage, _, step = message.partition(": ")
            if stage != current:
                finish()
                current, start, is_own = stage, time.perf_counter(), True
            if step == "cached" or step.startswith(_NOT_RUN):
                finish(step)
            else:
                status.update(text_from_step(message))

        def wait(message: str) -> None:
            nonlocal is_own
            is_inside = bool(current) and is_own
            report(f"{current}: {message}" if is_inside else message)
            is_own = is_inside

        with _listening(wait):
            yield report
        finish()


def print_warning(message: str) -> None:
    typer.echo(f"warning: {message}", err=True)


class _Waiting(logging.Handler):
    """Hands on what is told by `common.waiting`, from any thread."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record.getMessage())


@contextlib.contextmanager
def _listening(show: Callable[[str], None]) -> Iterator[None]:
    logger, handler = logging.getLogger(LOGGER), _Waiting(show)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Logs(logging.Handler):
    """Writes records to the stderr of the moment: warnings as `print_warning` does, details with their module."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            print_warning(record.getMessage())
        else:
            module = record.name.removeprefix("speccompile.")
            typer.echo(f"{record.levelname.lower()}: {module}: {record.getMessage()}", err=True)


def show_logs(level: str = "warning") -> None:
    """Print what the package's modules log at this level of `LOG_LEVELS`, or above it."""
    logger = logging.getLogger("speccompile")
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Logs)]:
        logger.removeHandler(handler)
    logger.addHandler(_Logs(level=level.upper()))
    logger.setLevel(level.upper())


def quiet_libraries() -> None:
    """Keep the progress bars and advice of the export libraries out of our output."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
