# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime sessions on CUDA, run by the same runner as TensorRT plans (`onnxruntime.cuda_session`)."""

from __future__ import annotations

from speccompile.backends.base import LoadJob
from speccompile.backends.cuda.device import Device, open_device, ordinal_from_name
from speccompile.backends.cuda.engine import CudaEngine
from speccompile.backends.cuda.kv_caches import Caches, rollback_spec_of
from speccompile.backends.feeds import bucket_rows
from speccompile.backends.onnxruntime.cuda_session import SessionPlan, open_plan
from speccompile.core.specs import GraphSpec


class GrowingCaches(Caches):
    """Caches whose view grows with the rows in use, once per bucket: ONNX Runtime's Attention reads every row of it."""

    alignment = 1  # ONNX Runtime accepts any address

    def __init__(self, device: Device, spec: GraphSpec, max_slots: int, max_rows: int) -> None:
        super().__init__(device, spec, max_slots, max_rows)
        self.max_rows = max_rows
        self.rows = bucket_rows(1, max_rows)

    def resize(self, rows: int) -> bool:
        """Resize the view to the bucket of `rows`, keeping that many rows of every slot; returns whether it changed."""
        new, old = bucket_rows(max(rows, 1), self.max_rows), self.rows
        if new == old:
            return False
        used = [self.max_slots * self.slot_bytes(index) for index in range(len(self.names))]
        scratch = self.device.allocate(max(used))
        for index, memory in enumerate(self._memories):  # one after another on the stream: they share the scratch
            heads, row_bytes = self.max_slots * self.sizes[index][0], self.row_bytes(index)
            self.device.copy(scratch.address, memory.address, used[index])
            # Rows that the view gains must be finite: other slots' rows were there, of which one may be NaN.
            self.device.clear(memory.address, heads * new * row_bytes)
            self.device.copy_rows(
                memory.address, new * row_bytes, scratch.address, old * row_bytes, min(new, old) * row_bytes, heads
            )
        self.device.synchronize()  # before the scratch memory is freed
        self.rows = new
        return True


class OrtCudaEngine(CudaEngine[SessionPlan, GrowingCaches]):
    """A `CudaEngine`; the caches' view grows with the rows in use."""

    alignment = 1  # ONNX Runtime accepts any address

    def __init__(self, job: LoadJob, plan: SessionPlan, rollback: SessionPlan | None = None) -> None:
        def allocate(spec: GraphSpec) -> GrowingCaches:
            return GrowingCaches(plan.device, spec, job.max_slots, job.max_rows)

        super().__init__(job, plan, allocate, rollback)

    def make_view(self, sizes: dict[str, int], rows: int) -> None:
        del sizes
        for caches in self.written:
            if rows > caches.rows:
                self._resize(caches, rows)

    def _resize(self, caches: GrowingCaches, rows: int) -> None:
        # No memory moves, and the rows are part of a step's key: steps of either view remain valid.
        self.device.activate()
        caches.resize(rows)

    @property
    def view_rows(self) -> int:
        return 0 if self.caches is None else self.caches.rows

    def shrink(self, rows: int) -> None:
        if self.caches is not None and bucket_rows(max(rows, 1), self.max_rows) < self.caches.rows:
            self._resize(self.caches, rows)


def load_cuda_engine(job: LoadJob) -> OrtCudaEngine:
    """Opens a graph that was lowered for CUDA, and allocates its caches on the device.

    Raises:
        BundleError: the graph cannot be opened, or ONNX Runtime has no CUDA provider.
        RuntimeFault: no GPU, no cuda-python, or not enough memory.
    """
    gpu = open_device(ordinal_from_name(job.device))
    gpu.activate()
    # A rollback overwrites rows that it reads: run several times, as in a capture, it would move them again.
    plain = {**job.tuning, "cuda_graphs": False}
    with gpu.watched():
        plan = open_plan(job.path, job.spec, gpu, job.tuning)
        compactor = None if job.rollback is None else open_plan(job.rollback, rollback_spec_of(job.spec), gpu, plain)
        return OrtCudaEngine(job, plan, compactor)
