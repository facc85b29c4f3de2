# SPDX-License-Identifier: Apache-2.0
"""How a command ends when it is interrupted, terminated, or cannot write its output."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import typer

from speccompile.errors import SpecCompileError

# Shells report a process that a signal ended as 128 + the signal's number; the commands keep to it.
_MESSAGES = {128 + signal.SIGINT: "interrupted", 128 + signal.SIGTERM: "terminated"}


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Lets SIGTERM raise SystemExit(143) for clean-up, in the main thread without a handler; a second one kills."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def print_ending(code: int) -> None:
    if code in _MESSAGES:
        typer.echo(("\n" if sys.stderr.isatty() else "") + _MESSAGES[code], err=True)


def is_stdout_broken() -> bool:
    """Returns whether standard output takes no more, e.g. on a full disk."""
    try:
        # What could not be written is still pending; an unbuffered stream has nothing pending, so write something.
        sys.stdout.write("\n")
        sys.stdout.flush()
    except (OSError, ValueError):
        return True
    return False


def stdout_error(fault: OSError) -> SpecCompileError:
    """Returns the error for an output that cannot be written; what is still pending is dropped."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    todo = "Free space, or send the output elsewhere."
    return SpecCompileError("standard output", fault.strerror or str(fault), "room for what is printed", todo)
