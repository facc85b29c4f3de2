# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs of a session, bound once for every combination of shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from speccompile.backends.onnxruntime.buffers import BoundCache, CacheBuffers
from speccompile.core import specs
from speccompile.core.specs import updated_cache_name

# Shapes come from few node counts, batches and rows of the views; making a binding takes about as long as a short step.
MAX_BINDINGS = 512
MAX_BYTES = 1 << 28  # of their arrays
SHARED = (specs.LOGITS, specs.IMAGE_ROWS)  # large ones that all bindings of an engine share


class Binding:
    """Inputs and outputs of one combination of shapes.

    Args:
        first_slot: the slot of batch row 0.
        cost_size: by which the step's cost is recorded: its nodes, or slots where a graph has no caches.
        views: the memory of the caches, and how many rows of each were in view.
        max_length: the longest length of a step within these views; None: it writes no rows.
    """

    def __init__(
        self,
        io: ort.IOBinding,
        first_slot: int,
        cost_size: int,
        views: tuple[tuple[CacheBuffers, int], ...],
        max_length: int | None,
    ) -> None:
        self.io, self.first_slot, self.cost_size = io, first_slot, cost_size
        self.views, self.max_length = views, max_length
        self.arrays: dict[str, np.ndarray] = {}
        self.neutral: dict[str, np.ndarray] = {}
        self.changed: set[str] = set()
        self.outputs: dict[str, np.ndarray] = {}

    def bind_input(self, name: str, array: np.ndarray, neutral: np.ndarray) -> None:
        """Binds an input to an array that steps fill."""
        self.arrays[name], self.neutral[name] = array, neutral
        self.io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def bind_output(self, name: str, array: np.ndarray) -> None:
        """Binds an output to the array that steps write."""
        self.outputs[name] = array
        self.io.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    @property
    def num_bytes(self) -> int:
        """Bytes of its own arrays."""
        named = (*self.arrays.items(), *self.outputs.items())
        return sum(array.nbytes for name, array in named if name not in SHARED)

    def holds(self, feeds: Mapping[str, np.ndarray]) -> bool:
        """Returns whether the views are the present ones and the rows of a step of these shapes are within them."""
        for buffers, rows in self.views:
            if buffers.rows != rows:
                return False
        return self.max_length is None or max(feeds[specs.LENGTHS].tolist()) <= self.max_length

    def fill(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Copy `feeds` in; inputs that were set before and have no feed now become neutral again."""
        if self.changed:
            for name in self.changed.difference(feeds):
                self.arrays[name][...] = self.neutral[name]
            self.changed.clear()
        for name, value in feeds.items():
            self.arrays[name][...] = value
            if name != specs.TOKENS and name != specs.LENGTHS:
                self.changed.add(name)


class CacheValues:
    """Views of caches as ONNX Runtime's tensors, which bind in a tenth of the time of address and shape."""

    def __init__(self, bound: Sequence[BoundCache]) -> None:
        self._bound = tuple(bound)
        self._buffers = tuple(dict.fromkeys(cache.buffers for cache in bound))
        self._held: dict[tuple[int, ...], list[ort.OrtValue]] = {}

    def get(self, first_slot: int, batch: int) -> list[ort.OrtValue]:
        """Returns the present views of slots first_slot .. first_slot + batch - 1, in the order of the caches."""
        key = (first_slot, batch, *[buffers.rows for buffers in self._buffers])
        values = self._held.get(key)
        if values is None:
            if len(self._held) >= MAX_BINDINGS:
                self._held.clear()
            views = [cache.view(first_slot, batch) for cache in self._bound]
            values = self._held[key] = [ort.OrtValue.ortvalue_from_numpy(view) for view in views]
        return values


class Compaction:
    """Inputs and outputs of a rollback graph for one combination of shapes, bound once."""

    def __init__(
        self, session: ort.InferenceSession, shapes: Sequence[tuple[int, ...]], caches: Mapping[str, ort.OrtValue]
    ) -> None:
        self._session, self._io = session, session.io_binding()
        self._arrays = [np.zeros(shape, np.int64) for shape in shapes]
        for name, array in zip((specs.LENGTHS, specs.PATH), self._arrays, strict=True):
            self._io.bind_input(name, "cpu", 0, np.int64, array.shape, array.ctypes.data)
        for name, value in caches.items():
            self._io.bind_ortvalue_input(name, value)
            self._io.bind_ortvalue_output(updated_cache_name(name), value)

    def run(self, lengths: np.ndarray, path: np.ndarray) -> None:
        for array, value in zip(self._arrays, (lengths, path), strict=True):
            array[...] = value
        self._session.run_with_iobinding(self._io)


class Bindings:
    """Bindings by their shapes; where there would be too many, all are made anew.

    Attributes:
        latest: by the names and shapes of what was fed, the one that such a step used last.
    """

    def __init__(self) -> None:
        self.latest: dict[tuple[Any, ...], Binding] = {}
        self._held: dict[tuple[int, ...], Binding] = {}
        self._num_bytes = 0

    def __iter__(self) -> Iterator[Binding]:
        return iter(self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: tuple[int, ...]) -> Binding | None:
        """Returns the binding of these shapes; None: there is none."""
        return self._held.get(key)

    def add(self, key: tuple[int, ...], binding: Binding) -> Binding:
        """Keeps a new binding, and returns it."""
        if len(self._held) >= MAX_BINDINGS or self._num_bytes + binding.num_bytes > MAX_BYTES:
            self.clear()
        self._held[key] = binding
        self._num_bytes += binding.num_bytes
        return binding

    def clear(self) -> None:
        self._held.clear()
        self.latest.clear()
        self._num_bytes = 0
