# SPDX-License-Identifier: Apache-2.0
"""Counts the calls of the package's functions, by file: what one must read to follow a step, or a request."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import speccompile

PACKAGE = Path(speccompile.__file__).parent
TESTS = str(Path(__file__).parents[1])
ENGINE = ("run", "compact")  # methods of an engine: what a fake calls in them is not part of a step


class CallTrace:
    """Calls of functions by file, relative to the package."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._names: dict[CodeType, str] = {}  # empty: not of the package

    @property
    def num_calls(self) -> int:
        """Of all files."""
        return sum(self.calls.values())

    @property
    def num_files(self) -> int:
        """With at least one call."""
        return len(self.calls)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """See `sys.setprofile`."""
        if event != "call":
            return
        code = frame.f_code
        name = self._names.get(code)
        if name is None:
            path = Path(code.co_filename)
            is_ours = path.is_relative_to(PACKAGE) and code.co_name != "<module>"
            name = self._names[code] = str(path.relative_to(PACKAGE)) if is_ours else ""
        if name and not _is_in_fake(frame):
            self.calls[name] += 1

    def table(self) -> str:
        """Returns a line a file, the most called first."""
        return "\n".join(f"{num:6} {name}" for name, num in self.calls.most_common())


def _is_in_fake(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in ENGINE and frame.f_code.co_filename.startswith(TESTS):
            return True
        frame = frame.f_back
    return False


@contextmanager
def traced() -> Iterator[CallTrace]:
    """Traces this thread inside, and threads that start inside for as long as they run."""
    trace = CallTrace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
