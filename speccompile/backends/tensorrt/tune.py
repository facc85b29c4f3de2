# SPDX-License-Identifier: Apache-2.0
"""Time of a step of n nodes on this GPU; measured at the build where there is one, else at the first load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from speccompile.backends.base import LoadJob
from speccompile.backends.measuring import digest_of, measure_steps, measured_once, measured_sizes
from speccompile.backends.tensorrt.records import plugins_to_register, read_record
from speccompile.core.specs import GraphSpec

_KERNELS = "eager"  # those of the shapes that were measured, see `loading.Plan`; other records are measured again


def measure_plan(job: LoadJob) -> dict[str, Any]:
    """Times the steps of a plan: {"measured": True, "gpu": name, "kernels", "step_ms": {nodes: ms at batch 1}}."""
    from speccompile.backends.tensorrt.engine import load_engine

    record = read_record(job.path)
    slots, rows = measured_sizes(job.spec)
    slots = min([slots, *(int(p["sizes"]["batch"][2]) for p in record["profiles"])])
    settings = {"variant": record["variant"], "plugins": plugins_to_register(record)}
    engine = load_engine(replace(job, max_slots=slots, max_rows=rows, tuning=settings))
    step_ms = measure_steps(engine, max_nodes=_max_nodes(job.spec, record))
    return {"measured": True, "gpu": engine.device.properties()["name"], "kernels": _KERNELS, "step_ms": step_ms}


def _max_nodes(spec: GraphSpec, record: Mapping[str, Any]) -> int:
    dims = ("nodes",) if spec.scores == "one" else ("nodes", "scored")
    return max(min(int(profile["sizes"][dim][2]) for dim in dims) for profile in record["profiles"])


def adapt_tuning(job: LoadJob) -> dict[str, Any]:
    """Returns the record for this GPU, from the user's cache folder; a plan of no or another GPU is measured once."""
    from speccompile.backends.cuda.device import open_device

    gpu = open_device(0).properties()["name"]
    if (job.tuning.get("gpu"), job.tuning.get("kernels")) == (gpu, _KERNELS):
        return dict(job.tuning)
    return {**job.tuning, **measured_once(partial(measure_plan, job), digest_of(job.path), gpu, _KERNELS)}
