# SPDX-License-Identifier: Apache-2.0
"""Detects other work on the CPUs during a measurement.

A measurement beside other work misleads: with both cores of a machine half occupied, one thread looks faster than
two, and the bundle would keep one thread forever.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def is_disturbed(record: Mapping[str, Any]) -> bool:
    return float(record.get(WAIT_SHARE, 0.0)) > MAX_WAIT_SHARE


def is_machine_busy() -> bool:
    """Whether other work runs now: the load average of the last minute is above half the CPUs."""
    return os.getloadavg()[0] > (os.cpu_count() or 1) / 2


def _read_threads() -> dict[str, tuple[int, int]]:
    """Returns the nanoseconds that each thread ran and waited, by its id."""
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
