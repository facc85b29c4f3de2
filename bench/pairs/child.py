# SPDX-License-Identifier: Apache-2.0
"""The command line, with each graph's steps timed twice, in this process: nobody reads the times of random pairs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from speccompile.backends import measuring
from speccompile.backends.base import LoadJob
from speccompile.backends.onnxruntime import tune
from speccompile.cli.main import main


def measure_graph(job: LoadJob, node_counts: Sequence[int] = measuring.NODE_COUNTS) -> dict[str, Any]:
    """See `speccompile.backends.onnxruntime.tune.measure_graph`."""
    found = {"threads": job.threads or 1, "spinning": "stop"}
    found |= {**tune._measure(replace(job, tuning=found), node_counts), tune.WAIT_SHARE: 0.0}
    return {"cpu": tune.cpu_name(), **found, "tried": [found]}


if __name__ == "__main__":
    measuring.SECONDS_PER_SETTING, measuring.MIN_REPEATS = 0.0, 2
    tune.measure_graph = measure_graph
    sys.exit(main())
