# SPDX-License-Identifier: Apache-2.0
"""Shared base of engines on CUDA, whatever library runs their plans: caches and states bound, a runner, slots."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

import numpy as np

from speccompile.backends.base import EngineBase, LoadJob
from speccompile.backends.cuda.device import ALIGNMENT
from speccompile.backends.cuda.kv_caches import Caches, bind_caches
from speccompile.backends.cuda.runner import Runner
from speccompile.backends.cuda.states import DeviceStates
from speccompile.backends.cuda.steps import Bound, Executable
from speccompile.core import specs
from speccompile.core.specs import GraphSpec

CachesT = TypeVar("CachesT", bound=Caches)
PlanT = TypeVar("PlanT", bound=Executable)


class CudaEngine(EngineBase[Runner], Generic[PlanT, CachesT]):
    """An `Engine` whose `run` returns numpy arrays for small outputs and `DeviceArray`s for large ones.

    Args:
        job: borrowed caches without an owner are allocated here; its spec is that of the plan.
        rollback: the plan that compacts caches of this spec, for trees.
    """

    alignment: int = ALIGNMENT  # bytes to whose multiples the addresses of slots are aligned
    states: DeviceStates | None

    def __init__(
        self, job: LoadJob, plan: PlanT, allocate: Callable[[GraphSpec], CachesT], rollback: PlanT | None = None
    ) -> None:
        spec, max_slots, settings = plan.spec, job.max_slots, job.tuning
        states = DeviceStates(plan.device, spec, max_slots, self.alignment) if spec.states else None
        super().__init__(spec, max_slots, job.max_rows, states, job.owners)
        self.plan, self.device = plan, plan.device
        own = self.spec.own_caches
        self.caches = allocate(replace(self.spec, caches=own)) if own else None
        shared = {name: engine.caches for name, engine in job.owners.items()}
        bound = bind_caches(self.spec, self.caches, shared, max_slots, allocate)
        self.written = () if bound is None else cast(tuple[CachesT, ...], bound.written(self.spec.caches))
        # Only the length of `kv_rows` is read; a graph without it gets no memory.
        reads_kv = any(tensor.name == specs.KV_ROWS for tensor in self.spec.inputs)
        self.kv_rows = self.written[0].rows if reads_kv and self.written else 0
        self._kv_memory = plan.device.allocate_zeroed(self.kv_rows)
        caches: list[Bound] = [] if bound is None else [bound]
        kept = caches if states is None else [*caches, states]
        self.runner = Runner(plan, kept, self._kv_memory.address, settings)
        self.rollback = None if rollback is None else Runner(rollback, caches, 0, settings)

    @property
    def graph_fault(self) -> str | None:
        return self.runner.graph_fault or self.plan.graph_fault

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of caches and states."""
        caches = 0 if self.caches is None else self.caches.num_bytes
        return caches if self.states is None else caches + self.states.num_bytes

    def run_graph(self, feeds: Mapping[str, Any], first_slot: int) -> Mapping[str, np.ndarray]:
        sizes, rows = self.check_step(feeds, first_slot)
        self.make_view(sizes, rows)
        if self.states is None:
            return cast(Mapping[str, np.ndarray], self.runner.run(feeds, sizes, first_slot))
        step = self.states.begin(feeds, first_slot)
        outputs = self.runner.run({**feeds, specs.STATE_LENGTHS: step.state_lengths}, sizes, first_slot)
        self.states.end(step)
        return cast(Mapping[str, np.ndarray], outputs)

    @abstractmethod
    def make_view(self, sizes: dict[str, int], rows: int) -> None:
        """Prepares the caches, or extends the sizes of a step, for a step that uses `rows` rows."""

    def move_slot(self, source: int, dest: int, rows: int | None = None) -> None:
        if source == dest:
            return
        if self.caches is not None:
            self.device.activate()
            self.caches.move_slot(source, dest, rows)
        if self.states is not None:
            self.states.move(source, dest, rows)

    def swap_slots(self, first: int, second: int, rows: int) -> None:
        if self.caches is not None:
            self.device.activate()
            self.caches.swap_slots(first, second, rows)
        if self.states is not None:
            self.states.swap(first, second)

    def clear_slot(self, slot: int) -> None:
        if self.caches is not None:
            self.device.activate()
            self.caches.clear_slot(slot)
        if self.states is not None:
            self.states.clear(slot)

    def compact_with(self, rollback: Runner, lengths: np.ndarray, path: np.ndarray) -> None:
        sizes = {"batch": path.shape[0], "scored": path.shape[1]}
        rollback.run({specs.LENGTHS: lengths, specs.PATH: path}, sizes)
