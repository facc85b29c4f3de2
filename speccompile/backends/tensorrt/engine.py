# SPDX-License-Identifier: Apache-2.0
"""TensorRT plans as engines: caches in place, one copy in, one copy out, CUDA graphs for the steps of decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from speccompile.backends.base import EngineBase
from speccompile.backends.cuda.device import open_device, ordinal_from_name
from speccompile.backends.cuda.kv_caches import Caches, bind_caches, cache_bytes, rollback_spec_of
from speccompile.backends.cuda.runner import Runner
from speccompile.backends.kv_rows import bucket_rows
from speccompile.backends.tensorrt.flavours import Flavour
from speccompile.backends.tensorrt.loading import Plan
from speccompile.backends.tensorrt.shim import load_tensorrt
from speccompile.core import specs
from speccompile.core.specs import GraphSpec, compacted_cache_name
from speccompile.errors import BundleError

KV = "kv"  # the dim of `kv_rows`


class TrtEngine(EngineBase[Runner]):
    """See `speccompile.core.protocols.Engine`.

    `run` gives numpy arrays where outputs are small and `DeviceArray`s where they are not.

    Args:
        plan: the deserialised plan.
        max_slots, max_rows: what may be used of the caches.
        settings: see `Runner`.
        rollback: the plan that compacts caches of this spec, for trees.
        lenders: engines by graph name, whose caches `spec.borrowed` names; what is not lent is memory of its own.
    """

    def __init__(
        self,
        plan: Plan,
        max_slots: int,
        max_rows: int,
        settings: Mapping[str, Any],
        rollback: Plan | None = None,
        lenders: Mapping[str, TrtEngine] | None = None,
    ) -> None:
        super().__init__(plan.spec, max_slots, max_rows)
        self.plan, self.device = plan, plan.device

        def allocate(spec: GraphSpec) -> Caches:
            return Caches(plan.device, spec, max_slots)

        own = self.spec.own_caches
        self.caches = allocate(replace(self.spec, caches=own)) if own else None
        lent = {name: engine.caches for name, engine in (lenders or {}).items()}
        bound = bind_caches(self.spec, self.caches, lent, max_slots, allocate)
        written = () if bound is None else bound.written(self.spec.caches)
        self._num_rows = written[0].rows if written else 0
        self._kv_rows = plan.device.allocate_zeroed(self._num_rows)
        self.runner = Runner(plan, bound, self._kv_rows.address, settings)
        self.rollback = None if rollback is None else Runner(rollback, bound, 0, settings)
        names = {t.name for t in plan.spec.outputs}
        self.compacts_in_step = any(compacted_cache_name(c) in names for c in plan.spec.caches)
        self._reads_kv = any(t.name == specs.KV_ROWS for t in plan.spec.inputs)

    @property
    def num_bytes(self) -> int:
        """Bytes of the caches."""
        return 0 if self.caches is None else self.caches.num_bytes

    def run(self, feeds: Mapping[str, Any], first_slot: int = 0) -> Mapping[str, np.ndarray]:
        """See `speccompile.core.protocols.Engine.run`."""
        sizes, rows = self.check_step(feeds, first_slot)
        if self._num_rows and self._reads_kv:
            sizes[KV] = bucket_rows(rows, self._num_rows)
        return cast(Mapping[str, np.ndarray], self.runner.run(feeds, sizes, first_slot))

    def move_slot(self, source: int, dest: int, rows: int | None = None) -> None:
        """See `speccompile.core.protocols.Engine.move_slot`."""
        if source != dest and self.caches is not None:
            self.device.activate()
            self.caches.move_slot(source, dest, rows)

    def swap_slots(self, first: int, second: int, rows: int) -> None:
        """See `speccompile.core.protocols.Engine.swap_slots`."""
        if self.caches is not None:
            self.device.activate()
            self.caches.swap_slots(first, second, rows)

    def clear_slot(self, slot: int) -> None:
        """See `speccompile.core.protocols.Engine.clear_slot`."""
        if self.caches is not None:
            self.device.activate()
            self.caches.clear_slot(slot)

    def compact_with(self, rollback: Runner, lengths: np.ndarray, path: np.ndarray) -> None:
        """See `speccompile.backends.base.EngineBase.compact_with`."""
        sizes = {"batch": path.shape[0], "scored": path.shape[1]}
        rollback.run({specs.LENGTHS: lengths, specs.PATH: path}, sizes)


def load_engine(
    path: Path,
    spec: GraphSpec,
    *,
    max_slots: int,
    max_rows: int,
    settings: Mapping[str, Any],
    rollback: Path | None = None,
    device: str = "cuda",
    lenders: Mapping[str, TrtEngine] | None = None,
) -> TrtEngine:
    """Load a plan and allocate its caches. The plan's digest must have been checked: loading can run code in it.

    Args:
        path: the plan.
        spec: its inputs and outputs.
        max_slots: sequences decoded at once.
        max_rows: cache rows wanted of each; the plan has at least as many.
        settings: `flavour` (default auto), `plugins` (whether plans hold plugins that are registered from Python),
            and those of `Plan` and `Runner`.
        rollback: the plan that compacts trees.
        device: cuda or cuda:N.
        lenders: see `TrtEngine`.

    Raises:
        BundleError: the plan does not fit this machine, this TensorRT or its spec.
        BuildError: TensorRT is not installed.
        RuntimeFault: no GPU, or not enough memory.
    """
    gpu = open_device(ordinal_from_name(device))
    gpu.activate()
    flavour = load_tensorrt(str(settings.get("flavour", "auto")))
    if settings.get("plugins"):
        _register_plugins(flavour)
    if spec.caches:
        _check_rows(path, spec, max_rows)
    plan = Plan(flavour, path, spec, gpu, settings, cache_bytes(spec, max_slots))
    # A rollback overwrites rows that it reads: run again before a capture that TensorRT makes by itself, it would move
    # them twice. (Our own captures run nothing.)
    plain = {**settings, "cuda_graphs": False} if plan.captures_itself else settings
    compactor = None if rollback is None else Plan(flavour, rollback, rollback_spec_of(spec), gpu, plain)
    return TrtEngine(plan, max_slots, max_rows, settings, compactor, lenders)


def _register_plugins(flavour: Flavour) -> None:
    from speccompile.backends.tensorrt.plugins import register_plugins

    register_plugins(flavour.trt)


def _check_rows(path: Path, spec: GraphSpec, max_rows: int) -> None:
    rows = spec.input(spec.caches[0]).dims[2]
    if not isinstance(rows, int) or rows < max_rows:
        todo = "Build with this engine.max_seq_len and engine.max_draft_nodes."
        raise BundleError(str(path), f"caches of {rows} rows", f"at least {max_rows}", todo)


__all__ = ["TrtEngine", "load_engine"]
