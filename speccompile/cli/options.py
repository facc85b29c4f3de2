# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from speccompile.cli.output import print_warning
from speccompile.core.cores import num_usable_cores
from speccompile.errors import RuntimeFault

MAX_THREADS = 1024  # as engine.threads of a recipe


def usable_threads(threads: int | None) -> int | None:
    """Returns `--threads`, cut with a warning to the cores that there are: engines that spin take turns else."""
    cores = num_usable_cores()
    if threads is None or threads <= cores:
        return threads
    print_warning(f"--threads {threads}: this machine has {cores} cores, and so many threads are used")
    return cores


def check_sampling(given: Mapping[str, Any]) -> None:
    """Refuse sampling options that are out of range, by the names they have on the command line.

    Args:
        given: fields of `SamplingParams` that were set.

    Raises:
        typer.BadParameter: one of them is out of range.
    """
    from speccompile.core.sampling import SamplingParams

    try:
        SamplingParams(**given)
    except RuntimeFault as fault:
        option = "--" + fault.where.rpartition(".")[2].replace("_", "-")
        raise typer.BadParameter(f"got {fault.got}; expected {fault.expected}", param_hint=option) from fault
