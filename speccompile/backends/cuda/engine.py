# SPDX-License-Identifier: Apache-2.0
"""Shared base of engines on CUDA, whatever library runs their plans: caches bound in place, a runner, slots."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

import numpy as np

from speccompile.backends.base import EngineBase
from speccompile.backends.cuda.kv_caches import Caches, bind_caches
from speccompile.backends.cuda.runner import Executable, Runner
from speccompile.core import specs
from speccompile.core.specs import GraphSpec

CachesT = TypeVar("CachesT", bound=Caches)
PlanT = TypeVar("PlanT", bound=Executable)


class CudaEngine(EngineBase[Runner], Generic[PlanT, CachesT]):
    """See `speccompile.core.protocols.Engine`.

    `run` returns numpy arrays for small outputs and `DeviceArray`s for large ones.

    Args:
        plan: the executable.
        max_slots, max_rows: the usable part of the caches.
        settings: see `Runner`.
        allocate: allocates the `caches` of a spec.
        rollback: the plan that compacts caches of this spec, for trees.
        owners: engines by graph name, whose caches `spec.borrowed` names; caches without an owner are allocated here.

    Raises:
        BundleError: see `bind_caches`.
        RuntimeFault: there is not enough memory.
    """

    def __init__(
        self,
        plan: PlanT,
        max_slots: int,
        max_rows: int,
        settings: Mapping[str, Any],
        allocate: Callable[[GraphSpec], CachesT],
        rollback: PlanT | None = None,
        owners: Mapping[str, CudaEngine[PlanT, CachesT]] | None = None,
    ) -> None:
        super().__init__(plan.spec, max_slots, max_rows)
        self.plan, self.device = plan, plan.device
        own = self.spec.own_caches
        self.caches = allocate(replace(self.spec, caches=own)) if own else None
        shared = {name: engine.caches for name, engine in (owners or {}).items()}
        bound = bind_caches(self.spec, self.caches, shared, max_slots, allocate)
        self.written = () if bound is None else cast(tuple[CachesT, ...], bound.written(self.spec.caches))
        # Only the length of `kv_rows` is read; a graph without it gets no memory.
        reads_kv = any(tensor.name == specs.KV_ROWS for tensor in self.spec.inputs)
        self.kv_rows = self.written[0].rows if reads_kv and self.written else 0
        self._kv_memory = plan.device.allocate_zeroed(self.kv_rows)
        self.runner = Runner(plan, bound, self._kv_memory.address, settings)
        self.rollback = None if rollback is None else Runner(rollback, bound, 0, settings)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the caches."""
        return 0 if self.caches is None else self.caches.num_bytes

    def run(self, feeds: Mapping[str, Any], first_slot: int = 0) -> Mapping[str, np.ndarray]:
        """See `speccompile.core.protocols.Engine.run`."""
        sizes, rows = self.check_step(feeds, first_slot)
        self.make_view(sizes, rows)
        return cast(Mapping[str, np.ndarray], self.runner.run(feeds, sizes, first_slot))

    @abstractmethod
    def make_view(self, sizes: dict[str, int], rows: int) -> None:
        """Prepares the caches, or extends the sizes of a step, for a step that uses `rows` rows."""

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
