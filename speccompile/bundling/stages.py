# SPDX-License-Identifier: Apache-2.0
"""Names, seconds and peak memory of the stages of a build."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Progress = Callable[[str], None]


@dataclass
class Stage:
    """A stage while it runs; set `cached` inside its block.

    Args:
        name: e.g. "compile target".
        cached: the result came from the cache.
    """

    name: str
    cached: bool = False


@dataclass
class StageLog:
    """Collects what the stages took.

    Args:
        progress: called with "STAGE" as a stage begins and "STAGE: STEP" for the steps inside it.
        rows: {"name", "seconds", "peak_rss_bytes", "cached"} of the finished stages, in order.
    """

    progress: Progress
    rows: list[dict[str, Any]] = field(default_factory=list)
    current: str = ""

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Measure a block."""
        stage, self.current = Stage(name), name
        self.progress(name)
        reset_peak_rss()
        start = time.perf_counter()
        yield stage
        seconds = round(time.perf_counter() - start, 3)
        self.rows.append({"name": name, "seconds": seconds, "peak_rss_bytes": read_peak_rss(), "cached": stage.cached})

    def skip(self, *names: str) -> None:
        """Note stages whose result came from the cache."""
        for name in names:
            self.progress(f"{name}: cached")
            self.rows.append({"name": name, "seconds": 0.0, "peak_rss_bytes": read_peak_rss(), "cached": True})

    def step(self, name: str) -> None:
        """Report a step of the current stage."""
        self.progress(f"{self.current}: {name}")


def reset_peak_rss() -> None:
    """Start the peak anew where the kernel allows it (proc(5), clear_refs); elsewhere it is that of the process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def read_peak_rss() -> int:
    """Highest resident set of this process since the last reset, in bytes."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
