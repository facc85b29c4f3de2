# SPDX-License-Identifier: Apache-2.0
"""Runs a plan with any shapes: finds or makes the step, assigns it a context, replays its graph."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from speccompile.backends.cuda.arrays import DeviceArray
from speccompile.backends.cuda.steps import Bound, Executable, Profile, Step, StepMemory
from speccompile.core.protocols import DeviceLost
from speccompile.errors import RuntimeFault

_log = logging.getLogger(__name__)
MAX_STEPS = 512  # shapes seen come from few node counts, batches and buckets
MAX_CONTEXTS = 32  # each keeps some memory of its own
MAX_GRAPH_NODES = 64  # chunks of a prompt take milliseconds: a graph would save nothing


class Runner(StepMemory):
    """Runs the steps of one plan. `settings`: `cuda_graphs` (default true), `max_contexts`."""

    def __init__(self, plan: Executable, bound: Sequence[Bound], kv_address: int, settings: Mapping[str, Any]) -> None:
        super().__init__(plan, bound, kv_address)
        self.max_contexts = int(settings.get("max_contexts", MAX_CONTEXTS))
        self.uses_graphs = bool(settings.get("cuda_graphs", True)) and not plan.captures_itself
        self.graph_fault: str | None = None  # why graphs were disabled
        self.last_step: Step | None = None
        self._num_runs = 0
        self._shared: dict[int, tuple[Any, Step | None]] = {}  # by profile: the context, and the step bound to it
        self._steps: OrderedDict[tuple[Any, ...], Step] = OrderedDict()
        self._owners: OrderedDict[Step, None] = (
            OrderedDict()
        )  # steps with a context of their own, in the order of their last runs

    def run(self, feeds: Mapping[str, Any], sizes: Mapping[str, int], first_slot: int = 0) -> Mapping[str, Any]:
        """Runs once; returns when the small outputs are on the host.

        Raises RuntimeFault: no profile fits, or it failed.

        Args:
            feeds: inputs by name, numpy arrays or device arrays; missing ones are neutral.
            first_slot: the slot of batch row 0.
        """
        self.device.activate()
        with self.device.watched():
            return self._run(feeds, sizes, first_slot)

    def _run(self, feeds: Mapping[str, Any], sizes: Mapping[str, int], first_slot: int) -> Mapping[str, Any]:
        shared, copied = self._split(feeds)
        layouts = [part.layout for part in self.bound]
        key = (*sizes.values(), first_slot, *layouts, *((n, a.address) for n, a in (*shared.items(), *copied.items())))
        step = self._steps.get(key)
        if step is None:
            step = Step(self, sizes, first_slot, shared, copied)
            if len(self._steps) >= MAX_STEPS:
                self._drop(*self._steps.popitem(last=False))
            self._steps[key] = step
        self._steps.move_to_end(key)
        staged = {name: value for name, value in feeds.items() if name not in shared and name not in copied}
        ran_last, self.last_step = self.last_step is step, None  # the buffer is no step's while it is filled
        step.fill(staged, ran_last)
        self.last_step = step
        self._launch(step)
        self.device.synchronize()
        return step.results

    def _split(self, feeds: Mapping[str, Any]) -> tuple[dict[str, DeviceArray], dict[str, DeviceArray]]:
        shared: dict[str, DeviceArray] = {}
        copied: dict[str, DeviceArray] = {}
        for tensor in self.plain_inputs:
            value = feeds.get(tensor.name)
            if isinstance(value, DeviceArray) and value.device is self.device and value.dtype == tensor.dtype:
                (copied if self.outputs.memory.holds(value.address) else shared)[tensor.name] = value
        return shared, copied

    def _launch(self, step: Step) -> None:
        self._num_runs += 1
        step.num_runs, step.last_run = step.num_runs + 1, self._num_runs
        if step.context is not None:
            self._owners.move_to_end(step)
        if step.graph is not None:
            step.graph.launch()
            return
        if step.context is not None and self.uses_graphs and self._capture(step):
            return
        if step.context is None and step.num_runs > 1 and step.nodes <= MAX_GRAPH_NODES and self._has_room():
            self._own_context(step)
        context = step.context
        if context is None:
            context, bound = self._shared[step.profile.index]
            if bound is not step:
                step.bind(context)
                self._shared[step.profile.index] = (context, step)
        step.enqueue(context)

    def _capture(self, step: Step) -> bool:
        try:
            step.graph = self.device.capture(lambda: step.enqueue(step.context))
        except RuntimeFault as fault:
            self.device.api.cudaGetLastError()  # otherwise the next launch would report it again
            self.graph_fault, self.uses_graphs = str(fault), False
            _log.warning("steps of %s run without CUDA graphs from now on: %s", self.plan.spec.name, fault)
            return False
        step.graph.launch()
        return True

    def _has_room(self) -> bool:
        if len(self._owners) < self.max_contexts:
            return True
        oldest = next(iter(self._owners), None)
        return oldest is not None and self._num_runs - oldest.last_run > self.plan.idle_runs

    def _own_context(self, step: Step) -> None:
        if len(self._owners) >= self.max_contexts:
            oldest, _ = self._owners.popitem(last=False)
            oldest.graph, oldest.context, oldest.num_runs = None, None, 0
        try:
            context = self.plan.make_context(step.profile, is_kept=True)
            step.bind(context)
        except DeviceLost:
            raise
        except RuntimeFault as fault:  # most likely there is no memory for one more
            self.max_contexts, self.graph_fault = len(self._owners), str(fault)
            _log.warning("no more steps of %s get a context of their own: %s", self.plan.spec.name, fault)
            return
        step.context = context
        self._owners[step] = None

    def shared_context(self, profile: Profile) -> Any:
        if profile.index not in self._shared:
            self._shared[profile.index] = (self.plan.make_context(profile), None)
        context, _ = self._shared[profile.index]
        self._shared[profile.index] = (context, None)
        return context

    def _drop(self, key: tuple[Any, ...], step: Step) -> None:
        del key
        self._owners.pop(step, None)
        step.graph, step.context = None, None

    @property
    def num_graphs(self) -> int:
        return sum(step.graph is not None for step in self._owners)

    def forget_steps(self) -> None:
        self.device.synchronize()
        for step in self._owners:
            step.graph, step.context = None, None
        self._steps.clear()
        self._owners.clear()
        self._shared = {index: (context, None) for index, (context, _) in self._shared.items()}
        self.last_step = None
