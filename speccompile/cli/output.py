# SPDX-License-Identifier: Apache-2.0
"""What the commands print: errors, JSON, the live list of stages, bars. Results go to stdout, all else to stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
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


_LINE_S = 20.0  # between two lines where there is no terminal
_NUM_FIRST = 10  # steps after which the first line appears, with the first estimate


class ProgressDisplay:
    """Shows stages, steps and checkpoints. `clock`: seconds."""

    def __init__(self, console: Console, bar: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._bar, self._clock = console, bar, clock
        self._task = bar.add_task("", total=None)
        self._head, self._first, self._start_s, self._line_s = "", 0, 0.0, 0.0
        self.checkpoint: str | None = None  # the last that a later run can go on from, as "STAGE STEP/STEPS"

    def stage(self, message: str) -> None:
        """Shows "STAGE: STEP" or "STAGE: STEP DONE/TOTAL"."""
        head, done, total = _parts(message)
        self._bar.update(self._task, description=message, completed=done or 0, total=total)
        self._show(head, message, done, total)

    def step(self, name: str, step: int, steps: int, row: dict[str, Any]) -> None:
        """Shows the measures of a step."""
        shown = text_from_measures(row["train"])
        self._bar.update(self._task, description=f"{name} {shown}", completed=step, total=steps)
        self._show(f"{name} steps", f"{name} {step}/{steps} {shown}", step, steps)
        if "held_out" in row:
            self._print(f"{name} {step}/{steps} held out: {text_from_measures(row['held_out'])}")

    def saved(self, name: str, step: int, steps: int) -> None:
        self.checkpoint = f"{name} {step}/{steps}"

    def _show(self, head: str, message: str, done: int | None, total: int | None) -> None:
        now = self._clock()
        if head != self._head:
            self._head, self._first, self._start_s, self._line_s = head, done or 0, now, now
            if not self._console.is_terminal:
                self._print(message)
            return
        if self._console.is_terminal or done is None or total is None:
            return
        num_seen = done - self._first
        if num_seen == _NUM_FIRST or done == total or now - self._line_s >= _LINE_S:
            self._line_s = now
            left_s = (now - self._start_s) / max(1, num_seen) * (total - done)
            self._print(f"{message}, about {text_from_seconds(left_s)} left" if done < total else message)

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)


@contextmanager
def open_display() -> Iterator[ProgressDisplay]:
    """Yields a display on stderr; its bar is gone afterwards."""
    console = Console(stderr=True, soft_wrap=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    settings: dict[str, Any] = {"transient": True, "disable": not console.is_terminal, "redirect_stdout": False}
    with Progress(*columns, console=console, **settings) as bar:
        yield ProgressDisplay(console, bar)


def text_from_measures(row: dict[str, Any]) -> str:
    losses, agreement = (" ".join(f"{value:.2f}" for value in row[key]) for key in ("loss", "agreement"))
    return f"loss {losses} | agreement {agreement} | length {row['acceptance_length']:.2f}"


def text_from_seconds(seconds: float) -> str:
    """Returns a duration as text: 90 -> "2 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _parts(message: str) -> tuple[str, int | None, int | None]:
    head, _, share = message.rpartition(" ")
    done, slash, total = share.partition("/")
    if not slash or not done.isdigit() or not total.isdigit():
        return message, None, None
    return head, int(done), int(total)
