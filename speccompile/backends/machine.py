# SPDX-License-Identifier: Apache-2.0
"""State of the machine: memory of this process, of the host and of its GPU; other work on the CPUs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


# Share of the time that threads were ready to run and did not, above which a measurement is not trusted. Chosen, not
# measured: threads with a CPU each hardly wait, and one that shares its CPU waits half of its time.
MAX_WAIT_SHARE = 0.1
WAIT_SHARE = "wait_share"
_TASKS, _STAT = Path("/proc/self/task"), Path("/proc/stat")
_STEAL = 8  # column of a cpu line of /proc/stat: time that a hypervisor gave to other guests


class WaitClock:
    """Measures how long the threads of this process waited for a CPU since its construction.

    Only Linux reports it (`/proc/self/task/*/schedstat`: nanoseconds run and waited); elsewhere the share is 0.
    """

    def __init__(self) -> None:
        self._before = _read_threads()
        self._all, self._stolen = _read_steal()

    def share(self) -> float:
        """Returns waited / (ran + waited) of all threads alive now, or the share that a hypervisor took, if larger."""
        ran = waited = 0
        for name, (here, there) in _read_threads().items():
            ran_before, waited_before = self._before.get(name, (0, 0))
            ran, waited = ran + here - ran_before, waited + there - waited_before
        every, stolen = _read_steal()
        held = waited / (ran + waited) if ran + waited > 0 else 0.0
        taken = (stolen - self._stolen) / (every - self._all) if every > self._all else 0.0
        return round(max(held, taken), 3)


def disturbance(wait_share: float) -> str:
    # Returns what to say of a measurement whose threads waited; nothing where they hardly did.
    if wait_share <= MAX_WAIT_SHARE:
        return ""
    return f"threads waited for a CPU in {wait_share:.0%} of their time: end other work and measure again"


def is_disturbed(record: Mapping[str, Any]) -> bool:
    return float(record.get(WAIT_SHARE, 0.0)) > MAX_WAIT_SHARE


def is_machine_busy() -> bool:
    """Whether other work runs now: the load average of the last minute is above half the CPUs."""
    return os.getloadavg()[0] > (os.cpu_count() or 1) / 2


def _read_threads() -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    try:
        tasks = list(_TASKS.iterdir())
    except OSError:  # no Linux
        return found
    for task in tasks:
        try:
            ran, waited, *_ = (task / "schedstat").read_text(encoding="ascii").split()
            found[task.name] = int(ran), int(waited)
        except (OSError, ValueError):  # a thread that ended meanwhile, or a kernel that does not count
            continue
    return found


def _read_steal() -> tuple[int, int]:
    try:
        fields = _STAT.read_text(encoding="ascii").splitlines()[0].split()
        return sum(map(int, fields[1:9])), int(fields[_STEAL])
    except (OSError, ValueError, IndexError):
        return 0, 0


def num_usable_cores() -> int:
    """Returns the cores that this process may run on, at least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def give_back_memory() -> None:
    """Gives memory that was freed back to the system, where it is glibc's, which keeps it otherwise."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
