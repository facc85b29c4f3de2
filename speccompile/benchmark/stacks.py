# SPDX-License-Identifier: Apache-2.0
"""Samples the Python stack of a thread: where its time goes by file, and as a flame graph."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Self

PACKAGE = Path(__file__).parents[1]
INTERVAL_S = 5e-4
_SWITCH_S = 1e-4  # so soon a thread that runs Python code hands over to the one that samples


class StackSampler:
    """Samples the calling thread inside `with`. Engines count as the function that runs them.

    `stacks` are numbers of samples by stack, outermost first; entries are "FILE:FUNCTION" from the package's folder on.
    """

    def __init__(self) -> None:
        self.stacks: Counter[tuple[str, ...]] = Counter()
        self._is_done = threading.Event()

    def __enter__(self) -> Self:
        self._switch_s, self._thread_id = sys.getswitchinterval(), threading.get_ident()
        sys.setswitchinterval(_SWITCH_S)
        self._thread = threading.Thread(target=self._sample, name="speccompile-sampler", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *fault: object) -> None:
        self._is_done.set()
        self._thread.join()
        sys.setswitchinterval(self._switch_s)

    def _sample(self) -> None:
        while not self._is_done.wait(INTERVAL_S):
            frame = sys._current_frames().get(self._thread_id)
            stack = []
            while frame is not None:
                stack.append(_name(frame))
                frame = frame.f_back
            self.stacks[tuple(reversed(stack))] += 1

    def shares(self) -> dict[str, float]:
        """Returns the share of the samples by file of the package, the largest first: of each the innermost one."""
        files: Counter[str] = Counter()
        for stack, num in self.stacks.items():
            own = [entry.rpartition(":")[0] for entry in stack if not entry.startswith("/")]
            files[own[-1] if own else "elsewhere"] += num
        total = max(files.total(), 1)
        return {name: num / total for name, num in files.most_common()}

    def write(self, file: Path) -> None:
        """Writes a line "ENTRY;ENTRY COUNT" for each stack, as flamegraph.pl and speedscope read them."""
        from speccompile.bundle.files import write_file

        lines = [f"{';'.join(stack)} {num}" for stack, num in sorted(self.stacks.items())]
        write_file(file, "\n".join(lines) + "\n")


def _name(frame: FrameType) -> str:
    code = frame.f_code
    path = Path(code.co_filename)
    name = path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else f"/{path.name}"
    return f"{name}:{code.co_name}"
