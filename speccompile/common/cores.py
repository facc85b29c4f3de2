# SPDX-License-Identifier: Apache-2.0
"""How many cores a process may use."""

from __future__ import annotations

import os


def num_usable_cores() -> int:
    """Returns the cores that this process may run on, at least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
