# SPDX-License-Identifier: Apache-2.0
"""Names, seconds and peak memory of the stages of a build."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from speccompile.backends.memory import read_peak_rss, reset_peak_rss

Progress = Callable[[str], None]
_log = logging.getLogger(__name__)


@dataclass
class Stage:
    """A stage while it runs; all but its name are set inside its block.

    Args:
        joint_peak_bytes: the most memory of this process and one that it started together.
    """

    name: str
    cached: bool = False
    joint_peak_bytes: int = 0
    skipped: str | None = None
    note: str | None = None


@dataclass
class StageLog:
    """Collects time and memory of the stages.

    Args:
        progress: called with "STAGE" as a stage begins and "STAGE: STEP" for the steps inside it; "STAGE: cached" and
            "STAGE: not run: REASON" report how it ended.
        rows: {"name", "seconds", "peak_rss_bytes", "cached"} of the finished stages, in order; "skipped" is the
            reason where nothing was done, "note" a remark on the result. The peak includes a process that the
            stage started.
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
        peak = max(read_peak_rss(), stage.joint_peak_bytes)
        row = {"name": name, "seconds": seconds, "peak_rss_bytes": peak, "cached": stage.cached}
        if stage.skipped is not None:
            self.progress(f"{name}: not run: {stage.skipped}")
            row["skipped"] = stage.skipped
        row |= {} if stage.note is None else {"note": stage.note}
        self.rows.append(row)
        _log.info("%s: %.1f s%s", name, seconds, f", not run: {stage.skipped}" if stage.skipped else "")

    def skip(self, *names: str) -> None:
        for name in names:
            self.progress(f"{name}: cached")
            self.rows.append({"name": name, "seconds": 0.0, "peak_rss_bytes": read_peak_rss(), "cached": True})

    def step(self, name: str) -> None:
        self.progress(f"{self.current}: {name}")
