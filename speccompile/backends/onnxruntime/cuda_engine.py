# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime sessions on CUDA behind the same runner that TensorRT plans have.

Inputs cross in one copy, small outputs come back in another, large ones stay on the device, and caches are bound in
place (see `speccompile.backends.onnxruntime.cuda_session`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from speccompile.backends.base import EngineBase
from speccompile.backends.cuda.arrays import item_bytes
from speccompile.backends.cuda.device import Device, Memory, open_device, ordinal_from_name
from speccompile.backends.cuda.kv_caches import Caches, bind_caches, rollback_spec_of
from speccompile.backends.cuda.runner import Runner
from speccompile.backends.kv_rows import bucket_rows
from speccompile.backends.onnxruntime.cuda_session import SessionPlan, open_plan
from speccompile.core import specs
from speccompile.core.specs import GraphSpec


class GrowingCaches(Caches):
    """Caches whose view grows with the rows in use: ONNX Runtime's Attention reads every row it is given.

    Rows are laid out anew on the device, once a bucket.

    Args:
        device: where they lie.
        spec: of the graph, with a dynamic number of cache rows.
        max_slots, max_rows: capacity.
    """

    def __init__(self, device: Device, spec: GraphSpec, max_slots: int, max_rows: int) -> None:
        self.device, self.names, self.max_slots, self.max_rows = device, spec.caches, max_slots, max_rows
        first = spec.input(spec.caches[0])
        self.kv_heads, self.head_dim = cast(int, first.dims[1]), cast(int, first.dims[3])
        self.dtype = first.dtype
        self._memories = [device.allocate_zeroed(max_slots * self._slot_bytes(max_rows)) for _ in self.names]
        self._scratch: Memory | None = None
        self._lay_out(bucket_rows(1, max_rows))

    def _slot_bytes(self, rows: int) -> int:
        return self.kv_heads * rows * self.head_dim * item_bytes(self.dtype)

    def _lay_out(self, rows: int) -> None:
        self.rows = rows
        self.dims = (self.kv_heads, rows, self.head_dim)
        self.slot_bytes = self._slot_bytes(rows)

    def resize(self, rows: int) -> bool:
        """Make the view the bucket of `rows`, keeping as many rows of every slot; returns whether it changed."""
        new = bucket_rows(max(rows, 1), self.max_rows)
        if new == self.rows:
            return False
        row_bytes = self.head_dim * item_bytes(self.dtype)
        pitches = new * row_bytes, self.rows * row_bytes
        used = self.max_slots * self.slot_bytes
        if self._scratch is None or self._scratch.num_bytes < used:
            self._scratch = self.device.allocate(used)
        source = self._scratch.address
        for memory in self._memories:  # one after another on the stream, so they share the scratch memory
            self.device.copy(source, memory.address, used)
            # Rows that the view gains must be finite: other slots' rows lay there, of which one may be NaN.
            self.device.clear(memory.address, self.max_slots * self._slot_bytes(new))
            self.device.copy_rows(
                memory.address, pitches[0], source, pitches[1], min(pitches), self.max_slots * self.kv_heads
            )
        self.device.synchronize()
        self._scratch = None
        self._lay_out(new)
        return True


class OrtCudaEngine(EngineBase[Runner]):
    """See `speccompile.core.protocols.Engine`; small outputs are numpy arrays, large ones `DeviceArray`s.

    Args:
        plan: the session.
        max_slots, max_rows: capacity of the caches.
        settings: see `speccompile.backends.cuda.runner.Runner`.
        rollback: session of the rollback graph of the same model, for trees.
        lenders: engines by graph name, whose caches `spec.borrowed` names; what is not lent is memory of its own.
    """

    def __init__(
        self,
        plan: SessionPlan,
        max_slots: int,
        max_rows: int,
        settings: Mapping[str, Any],
        rollback: SessionPlan | None = None,
        lenders: Mapping[str, OrtCudaEngine] | None = None,
    ) -> None:
        super().__init__(plan.spec, max_slots, max_rows)
        self.plan, self.device = plan, plan.device

        def allocate(spec: GraphSpec) -> GrowingCaches:
            return GrowingCaches(plan.device, spec, max_slots, max_rows)

        own = self.spec.own_caches
        self.caches = allocate(replace(self.spec, caches=own)) if own else None
        lent = {name: engine.caches for name, engine in (lenders or {}).items()}
        bound = bind_caches(self.spec, self.caches, lent, max_slots, allocate)
        self._written = () if bound is None else cast(tuple[GrowingCaches, ...], bound.written(self.spec.caches))
        self.runner = Runner(plan, bound, 0, settings)
        self.rollback = None if rollback is None else Runner(rollback, bound, 0, settings)

    def run(self, feeds: Mapping[str, Any], first_slot: int = 0) -> Mapping[str, np.ndarray]:
        """See `speccompile.core.protocols.Engine.run`."""
        sizes, rows = self.check_step(feeds, first_slot)
        for caches in self._written:
            if rows > caches.rows:
                self._resize(caches, rows)
        return cast(Mapping[str, np.ndarray], self.runner.run(feeds, sizes, first_slot))

    def _resize(self, caches: GrowingCaches, rows: int) -> None:
        # No memory moves, and the rows are part of a step's key: steps of either view hold.
        self.device.activate()
        caches.resize(rows)

    @property
    def view_rows(self) -> int:
        """Rows of its own caches that every step works on."""
        return 0 if self.caches is None else self.caches.rows

    def shrink(self, rows: int) -> None:
        """See `speccompile.core.protocols.Engine.shrink`."""
        if self.caches is not None and bucket_rows(max(rows, 1), self.max_rows) < self.caches.rows:
            self._resize(self.caches, rows)

    def move_slot(self, source: int, dest: int, rows: int | None = None) -> None:
        """See `speccompile.core.protocols.Engine.move_slot`."""
        if source != dest and self.caches is not None:
            self.device.activate()
            self.caches.move_slot(source, dest, rows)
            self.device.synchronize()

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


def load_cuda_engine(
    path: Path,
    spec: GraphSpec,
    *,
    max_slots: int,
    max_rows: int,
    settings: Mapping[str, Any],
    rollback: Path | None = None,
    device: str = "cuda",
    lenders: Mapping[str, OrtCudaEngine] | None = None,
) -> OrtCudaEngine:
    """Open a graph that was lowered for CUDA, and allocate its caches on the device.

    Args:
        path: the ONNX file.
        spec: its inputs and outputs.
        max_slots: capacity of the caches.
        max_rows: capacity of the caches.
        settings: those of `Runner`.
        rollback: the graph that compacts trees.
        device: cuda or cuda:N.
        lenders: see `OrtCudaEngine`.

    Raises:
        BundleError: the graph cannot be opened, or ONNX Runtime has no CUDA provider.
        RuntimeFault: no GPU, no cuda-python, or not enough memory.
    """
    gpu = open_device(ordinal_from_name(device))
    gpu.activate()
    plan = open_plan(path, spec, gpu, settings)
    # A rollback overwrites rows that it reads: run several times, as a capture does, it would move them again.
    plain = {**settings, "cuda_graphs": False}
    compactor = None if rollback is None else open_plan(rollback, rollback_spec_of(spec), gpu, plain)
    return OrtCudaEngine(plan, max_slots, max_rows, settings, compactor, lenders)
