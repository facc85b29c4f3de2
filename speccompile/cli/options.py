# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, checked before anything is loaded."""

from __future__ import annotations

from speccompile.cli.output import print_warning
from speccompile.common.cores import num_usable_cores

MAX_THREADS = 1024  # as engine.threads of a recipe


def usable_threads(threads: int | None) -> int | None:
    """Returns `--threads`, cut with a warning to the cores that there are: engines that spin take turns else."""
    cores = num_usable_cores()
    if threads is None or threads <= cores:
        return threads
    print_warning(f"--threads {threads}: this machine has {cores} cores, and so many threads are used")
    return cores
