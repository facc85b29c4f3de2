# SPDX-License-Identifier: Apache-2.0
"""What takes long below the commands and is no stage of a build: told to a logger that the commands listen to."""

from __future__ import annotations

import logging
import threading
from typing import Any

LOGGER = "speccompile.waiting"
_MB = 10**6


def tell(message: str) -> None:
    """Tells what begins, or how far it is, as "WHAT" or "WHAT: STEP DONE/TOTAL"."""
    logging.getLogger(LOGGER).info("%s", message)


def download_bar(name: str) -> type[Any]:
    """Returns a class in the place of tqdm's for `snapshot_download`, which logs the megabytes of a download.

    Several bars count files or bytes: the largest count of bytes is logged, and nothing where all files are there.
    """
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    lock = threading.RLock()
    bars: list[Any] = []
    told: list[tuple[int, int]] = []

    def show() -> None:
        done, total = (round(max(getattr(bar, key) or 0 for bar in bars) / _MB) for key in ("n", "total"))
        if total and told[-1:] != [(min(done, total), total)]:
            told[:] = [(min(done, total), total)]
            tell(f"download {name}: MB {min(done, total)}/{total}")

    class Bar(tqdm):  # type: ignore[misc]
        """Counts, and shows nothing itself."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            self.n, self.counts_bytes = options.get("initial", 0), options.get("unit") == "B"
            if self.counts_bytes:
                bars.append(self)

        def update(self, n: float | None = 1) -> None:
            with lock:  # files are downloaded by several threads
                self.n += n or 0
                if self.counts_bytes:
                    show()

        def refresh(self, *args: Any, **options: Any) -> None:
            with lock:
                if self.counts_bytes:
                    show()

    return Bar
