# SPDX-License-Identifier: Apache-2.0
"""The tuning record of a bundle on the machine that loads it: used unchanged, checked once, or measured again."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

from speccompile.backends.base import LoadJob
from speccompile.backends.contention import WAIT_SHARE, WaitClock, is_disturbed, is_machine_busy
from speccompile.backends.kept_records import digest_of, keep, read_kept, record_file
from speccompile.backends.measuring import typical_step_ms
from speccompile.backends.onnxruntime.tune import cpu_name, measure_graph, open_measured
from speccompile.core.jobs import StepCosts

_log = logging.getLogger(__name__)

# A step that now takes this many times longer or shorter than recorded: the record is of another state of the machine.
# Not less, as other work on the memory bandwidth, which is not detected here, was measured to make a step 1.86 times
# longer; a wrong number of threads costs a factor of about 2 or more.
MAX_DRIFT = 2.0


def adapt_tuning(job: LoadJob) -> dict[str, Any]:
    """Returns the tuning record for this machine.

    The result is kept in the user's cache folder by graph, record, CPU and version of ONNX Runtime; the bundle is not
    changed. The first load on a machine measures again

    - a record made on another CPU;
    - one made beside other work, as soon as the machine is quiet;
    - one whose steps take more than `MAX_DRIFT` times longer or shorter now, on a quiet machine.

    Threads and step times are measured; the kernel form was chosen by the build and is part of the graph.

    Raises:
        BuildError: see `measure_graph`.
        BundleError: the graph cannot be opened.
    """
    import onnxruntime

    path, tuning = job.path, job.tuning
    if not tuning:
        return {}
    cpu, built = cpu_name(), json.dumps(tuning, sort_keys=True)
    kept = record_file(digest_of(path), cpu, onnxruntime.__version__, job.threads, job.others_bytes, built)
    known = read_kept(kept)
    record = dict(tuning) if known is None and tuning.get("cpu") == cpu else known
    level, reason = logging.INFO, "was measured beside other work"
    if record is None:
        level, reason = logging.WARNING, f"was measured on another CPU ({tuning.get('cpu')})"
    elif known is not None and not is_disturbed(known):
        return known
    elif is_machine_busy():
        return record
    elif not is_disturbed(record):
        recorded_ms, ms = StepCosts.from_json(record).ms(1), _step_ms_now(replace(job, tuning=record))
        if ms is None or recorded_ms == 0:
            return record
        if 1 / MAX_DRIFT <= ms / recorded_ms <= MAX_DRIFT:
            keep(kept, record)
            return record
        reason = f"has {recorded_ms:.3f} ms for a step that takes {ms:.3f} ms now"
    _log.log(level, "%s %s: it is measured again, once", path.name, reason)
    fresh = measure_graph(job, tries=1)
    keep(kept, fresh)
    return fresh


def _step_ms_now(job: LoadJob) -> float | None:
    """Returns the milliseconds of a one-node step with the recorded threads; None where other work held the CPUs."""
    engine = open_measured(job)
    clock = WaitClock()
    ms = typical_step_ms(engine, job.others_bytes)
    return None if is_disturbed({WAIT_SHARE: clock.share()}) else ms
