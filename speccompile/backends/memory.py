# SPDX-License-Identifier: Apache-2.0
"""Memory: of this process, that is free on this machine, of its GPU."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # version 2; a container's own is mounted there


def reset_peak_rss() -> None:
    """Reset the peak where the kernel allows it (clear_refs); elsewhere it is that of the process's life."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def read_peak_rss() -> int:
    """Returns the highest resident set of this process since the last reset, in bytes."""
    peak = read_memory("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak


def available_memory() -> int:
    """Returns the bytes that processes can take without swapping, within a container's limit; 0 where nobody says."""
    free = 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max", no limit
        limit, used = (int((CGROUP / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        pages = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        free = min(free or limit, max(0, limit - used + int(pages.get("inactive_file", 0))))
    return free


def gpu_memory() -> int | None:
    """Returns the bytes of the first GPU, from the CUDA driver; None without a driver or a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    size = ctypes.c_size_t()
    if driver.cuInit(0) != 0 or driver.cuDeviceTotalMem_v2(ctypes.byref(size), 0) != 0:
        return None
    return size.value


def read_memory(key: str, pid: int | str = "self") -> int | None:
    """Returns a line of /proc/PID/status in bytes, e.g. VmRSS or RssAnon; None without such a process or line."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None
