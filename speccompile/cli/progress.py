# SPDX-License-Identifier: Apache-2.0
"""What a long command shows while it works: a bar on a terminal, lines with the time that is left elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
