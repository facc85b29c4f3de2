# SPDX-License-Identifier: Apache-2.0
"""The oracle engine: the ONNX reference evaluator, with the numpy twins for our own ops. Slow on purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from onnx.reference import ReferenceEvaluator

from speccompile.backends.base import EngineBase, LoadJob
from speccompile.backends.feeds import neutral_value, shape_from_dims
from speccompile.backends.states import HostStates, host_states
from speccompile.core import specs
from speccompile.graph_kinds.borrowed import find_owner
from speccompile.ops.kv_rollback import kv_rollback
from speccompile.ops.registry import reference_ops
from speccompile.ops.row_products import row_ops


class ReferenceEngine(EngineBase[Callable[..., Any]]):
    """An `speccompile.core.protocols.Engine`. Borrowed caches without an owner are allocated here."""

    states: HostStates | None

    def __init__(self, job: LoadJob) -> None:
        spec, max_slots, max_rows = job.spec, job.max_slots, job.max_rows
        super().__init__(spec, max_slots, max_rows, host_states(spec, max_slots), job.owners)
        self.rollback = kv_rollback
        self.evaluator = ReferenceEvaluator(str(job.path), new_ops=[*reference_ops(), *row_ops()])
        self.plain_inputs = spec.plain_inputs
        self.plain_outputs = [t.name for t in spec.plain_outputs]
        sizes = {"batch": max_slots, "max_seq": max_rows, specs.SHARED_ROWS: max_rows}
        shapes = {n: shape_from_dims(spec.input(n), sizes) for n in spec.cache_inputs}
        self.caches = {n: np.zeros(shapes[n], spec.input(n).dtype) for n in spec.own_caches}
        self.bound = dict(self.caches)
        for cache_ref in spec.borrowed:
            owner = job.owners.get(cache_ref.owner)
            if owner is None:
                self.bound[cache_ref.name] = np.zeros(shapes[cache_ref.name], spec.input(cache_ref.name).dtype)
                continue
            held = {name: (cache.shape[1], cache.shape[3], str(cache.dtype)) for name, cache in owner.caches.items()}
            num_slots = min(len(cache) for cache in owner.caches.values())
            find_owner(spec, cache_ref, held, num_slots, max_slots)
            self.bound[cache_ref.name] = owner.caches[cache_ref.cache]
        self.bound |= self.states.arrays if self.states is not None else {}

    def run_graph(self, feeds: Mapping[str, np.ndarray], first_slot: int) -> Mapping[str, np.ndarray]:
        sizes, _ = self.check_step(feeds, first_slot)
        slots, step = first_slot + sizes["batch"], None
        if self.states is not None:
            step = self.states.begin(feeds, first_slot)
            feeds = {**feeds, specs.STATE_LENGTHS: step.state_lengths}
        given = {
            t.name: np.asarray(feeds[t.name], t.dtype)
            if t.name in feeds
            else neutral_value(t.name, shape_from_dims(t, sizes), t.dtype)
            for t in self.plain_inputs
        }
        views = {n: c[first_slot:slots] for n, c in self.bound.items()}
        written = (*self.spec.states, *self.spec.caches)
        names = [*self.plain_outputs, *map(specs.updated_cache_name, written)]
        results = dict(zip(names, self.evaluator.run(names, {**given, **views}), strict=True))
        for name in written:
            views[name][...] = results[specs.updated_cache_name(name)]
        if self.states is not None and step is not None:
            self.states.end(step)
        return {n: results[n] for n in self.plain_outputs}

    def read_caches(self, slot: int, rows: int) -> Mapping[str, np.ndarray]:
        return {name: cache[slot, :, :rows] for name, cache in self.caches.items()}

    def move_slot(self, source: int, dest: int, rows: int | None = None) -> None:
        if self.states is not None:
            self.states.move(source, dest, rows)
        for cache in self.caches.values():
            cache[dest, :, :rows] = cache[source, :, :rows]

    def swap_slots(self, first: int, second: int, rows: int) -> None:
        if self.states is not None:
            self.states.swap(first, second)
        for cache in self.caches.values():
            cache[[first, second], :, :rows] = cache[[second, first], :, :rows]

    def slide_slot(self, slot: int, first: int, num: int) -> None:
        for cache in self.caches.values():
            cache[slot, :, :num] = cache[slot, :, first : first + num].copy()

    def clear_slot(self, slot: int) -> None:
        if self.states is not None:
            self.states.clear(slot)
        for cache in self.caches.values():
            cache[slot] = 0

    def compact_with(self, rollback: Callable[..., Any], lengths: np.ndarray, path: np.ndarray) -> None:
        for cache in self.caches.values():
            (cache[: len(lengths)],) = rollback(cache[: len(lengths)], lengths, path)
