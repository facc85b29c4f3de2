# SPDX-License-Identifier: Apache-2.0
"""TensorRT plans as engines: caches in place, one copy in, one copy out, CUDA graphs for the steps of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speccompile.backends.base import LoadJob
from speccompile.backends.cuda.device import Device, open_device, ordinal_from_name
from speccompile.backends.cuda.engine import CudaEngine
from speccompile.backends.cuda.kv_caches import Caches, cache_bytes, rollback_spec_of
from speccompile.backends.feeds import bucket_rows
from speccompile.backends.tensorrt.import_helper import load_tensorrt
from speccompile.backends.tensorrt.loading import Plan
from speccompile.backends.tensorrt.variants import Variant
from speccompile.core.specs import SCORED_NODES, GraphSpec, compacted_cache_name
from speccompile.errors import BundleError

KV = "kv"  # the dim of `kv_rows`


class TrtEngine(CudaEngine[Plan, Caches]):
    """A `CudaEngine`; caches keep their layout, and `kv_rows` gives the rows to which a step attends."""

    def __init__(self, job: LoadJob, plan: Plan, rollback: Plan | None = None) -> None:
        def allocate(spec: GraphSpec) -> Caches:
            return Caches(plan.device, spec, job.max_slots)

        super().__init__(job, plan, allocate, rollback)
        scored = [p.bounds[SCORED_NODES][1][1] for p in plan.profiles if SCORED_NODES in p.bounds]
        self.max_scored = min(scored, default=None)
        names = {t.name for t in plan.spec.outputs}
        self.compacts_in_step = any(compacted_cache_name(c) in names for c in plan.spec.caches)

    def make_view(self, sizes: dict[str, int], rows: int) -> None:
        if self.kv_rows:
            sizes[KV] = bucket_rows(rows, self.kv_rows)


def load_engine(job: LoadJob) -> TrtEngine:
    """Loads a plan, whose digest was checked, and allocates its caches: loading can run code in it.

    Args:
        job: the plan has at least its `max_rows`; in `tuning` are `variant` (default auto), `plugins` (of the plans, to
            register from Python), and settings of `Plan` and `Runner`.

    Raises:
        BundleError: the plan does not fit this machine, this TensorRT or its spec.
        BuildError: TensorRT is not installed, or the plugins' kernels cannot be compiled.
    """
    gpu = open_device(ordinal_from_name(job.device))
    gpu.activate()
    with gpu.watched():
        return _load(gpu, job)


def _load(gpu: Device, job: LoadJob) -> TrtEngine:
    path, spec, settings = job.path, job.spec, job.tuning
    variant = load_tensorrt(str(settings.get("variant", "auto")))
    if plugins := settings.get("plugins"):
        _prepare_plugins(variant, plugins, gpu)
    if spec.caches:
        _check_rows(path, spec, job.max_rows)
    plan = Plan(variant, path, spec, gpu, settings, cache_bytes(spec, job.max_slots))
    # A rollback overwrites rows that it reads: run again before a capture that TensorRT makes by itself, it would move
    # them twice. (Our own captures run nothing.)
    plain = {**settings, "cuda_graphs": False} if plan.captures_itself else settings
    compactor = None if job.rollback is None else Plan(variant, job.rollback, rollback_spec_of(spec), gpu, plain)
    return TrtEngine(job, plan, compactor)


def _prepare_plugins(variant: Variant, plugins: Sequence[str], gpu: Device) -> None:
    from speccompile.backends.tensorrt.kernels import load_module
    from speccompile.backends.tensorrt.plugins import register_plugins

    register_plugins(variant.trt)
    major, minor = gpu.properties()["compute_capability"]
    for op in plugins:
        load_module(op, (major, minor))


def _check_rows(path: Path, spec: GraphSpec, max_rows: int) -> None:
    rows = spec.input(spec.caches[0]).dims[2]
    if not isinstance(rows, int) or rows < max_rows:
        todo = "Build with this engine.max_seq_len and engine.max_draft_nodes."
        raise BundleError(str(path), f"caches of {rows} rows", f"at least {max_rows}", todo)


__all__ = ["TrtEngine", "load_engine"]
