# SPDX-License-Identifier: Apache-2.0
"""Resident memory of this process, from proc(5)."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path


def reset_peak_rss() -> None:
    """Reset the peak where the kernel allows it (clear_refs); elsewhere it is that of the process's life."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def read_peak_rss() -> int:
    """Returns the highest resident set of this process since the last reset, in bytes."""
    peak = read_memory("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak


def available_memory() -> int:
    """Returns the bytes that processes can take without swapping; 0 where the kernel does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def read_memory(key: str, pid: int | str = "self") -> int | None:
    """Returns a line of /proc/PID/status in bytes, e.g. VmRSS or RssAnon; None without such a process or line."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None
