# SPDX-License-Identifier: Apache-2.0
"""Cache memory of an engine: flat buffers, used as [slots, kv_heads, rows, head_dim] views that grow by buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from speccompile.backends.feeds import bucket_rows
from speccompile.core.specs import GraphSpec
from speccompile.graph_kinds.borrowed import find_owner

_LINE_BYTES = 64


def _aligned_zeros(count: int, dtype: str) -> np.ndarray:
    # Where numpy begins an array, each 64 bytes that a kernel loads would lie in two lines of the CPU's caches.
    room = np.zeros(count * np.dtype(dtype).itemsize + _LINE_BYTES, np.uint8)
    start = -room.ctypes.data % _LINE_BYTES
    return room[start : start + count * np.dtype(dtype).itemsize].view(dtype)


class CacheBuffers:
    """The caches of one engine in host memory. `rows` are of the present view; slots from `num_used` on may hold NaN.

    Args:
        sizes: (kv_heads, head_dim, dtype) of each cache input by name, in order.
        max_slots, max_rows: capacity; memory is committed by the system when rows are first written.
    """

    def __init__(self, sizes: Mapping[str, tuple[int, int, str]], max_slots: int, max_rows: int) -> None:
        self.sizes, self.names = dict(sizes), tuple(sizes)
        self.max_slots, self.max_rows = max_slots, max_rows
        self.rows, self.num_used = min(bucket_rows(1, max_rows), max_rows), 0
        self._of = tuple(sizes.values())
        self._flat = [_aligned_zeros(max_slots * heads * max_rows * width, dtype) for heads, width, dtype in self._of]

    @property
    def num_bytes(self) -> int:
        """Returns the bytes reserved, all caches together."""
        return sum(flat.nbytes for flat in self._flat)

    def _view(self, index: int, rows: int) -> np.ndarray:
        heads, width, _ = self._of[index]
        size = self.max_slots * heads * rows * width
        return self._flat[index][:size].reshape(self.max_slots, heads, rows, width)

    def slot_rows(self, slot: int, rows: int) -> dict[str, np.ndarray]:
        """Returns the first rows of a slot, [kv_heads, rows, head_dim] by name; they share memory."""
        return {name: self.view(index)[slot, :, :rows] for index, name in enumerate(self.names)}

    def view(self, index: int) -> np.ndarray:
        """Returns cache `index` as [max_slots, kv_heads, rows, head_dim]; shares memory."""
        return self._view(index, self.rows)

    def _views(self, rows: int | None = None) -> Iterator[np.ndarray]:
        for index in range(len(self._flat)):
            yield self.view(index)[:, :, :rows]

    def use(self, num_slots: int) -> None:
        """Zero the rows of those of the first `num_slots` slots that were not used: one may be NaN."""
        if num_slots > self.num_used:
            for view in self._views():
                view[self.num_used : num_slots] = 0
            self.num_used = num_slots

    def grow(self, rows: int) -> bool:
        """Make the view hold at least `rows`; returns whether it changed."""
        if rows <= self.rows:
            return False
        new_rows, used = bucket_rows(rows, self.max_rows), self.num_used
        for index in range(len(self._flat)):
            old = self.view(index)[:used].copy()
            new = self._view(index, new_rows)[:used]
            new[:, :, : self.rows] = old
            new[:, :, self.rows :] = 0  # other slots' rows were there, of which one may be NaN
        self.rows = new_rows
        return True

    def shrink(self, rows: int) -> bool:
        """Drop to the smallest view that holds `rows`; keeps the first `rows` rows of every slot in use."""
        new_rows, used = bucket_rows(max(rows, 1), self.max_rows), self.num_used
        if new_rows >= self.rows:
            return False
        for index in range(len(self._flat)):
            kept = self.view(index)[:used, :, :new_rows].copy()
            self._view(index, new_rows)[:used] = kept
        self.rows = new_rows
        return True

    def move_slot(self, source: int, dest: int, rows: int | None = None) -> None:
        """Copy the first `rows` rows of slot `source`, or all, over those of slot `dest`."""
        self.use(max(source, dest) + 1)
        for view in self._views(rows):
            view[dest] = view[source]

    def clear_slot(self, slot: int) -> None:
        """Zero all rows of a slot in the present view; rows that the view gains later are zeroed then."""
        for view in self._views():
            view[slot] = 0

    def slide_slot(self, slot: int, first: int, num: int) -> None:
        for view in self._views():
            view[slot, :, :num] = view[slot, :, first : first + num].copy()

    def swap_slots(self, first: int, second: int, rows: int) -> None:
        """Exchange the first `rows` rows of two slots."""
        self.use(max(first, second) + 1)
        for view in self._views(rows):
            held = view[first].copy()
            view[first] = view[second]
            view[second] = held


def cache_sizes(spec: GraphSpec, names: Sequence[str]) -> dict[str, tuple[int, int, str]]:
    """Returns (kv_heads, head_dim, dtype) of cache inputs of a graph by name."""
    sizes = {}
    for name in names:
        _, heads, _, width = spec.input(name).dims
        assert isinstance(heads, int) and isinstance(width, int)
        sizes[name] = (heads, width, spec.input(name).dtype)
    return sizes


@dataclass(frozen=True, eq=False)
class BoundCache:
    """A cache input and the memory it is bound to."""

    name: str
    buffers: CacheBuffers  # the engine's own, or another one's
    index: int

    def view(self, first_slot: int, batch: int) -> np.ndarray:
        """Returns `batch` slots of the present view, [batch, kv_heads, rows, head_dim]; shares memory."""
        return self.buffers.view(self.index)[first_slot : first_slot + batch]


def bind_borrowed(
    spec: GraphSpec, owners: Mapping[str, CacheBuffers], max_slots: int, max_rows: int
) -> list[BoundCache]:
    """Binds the inputs that are caches of other engines to their memory.

    Args:
        owners: buffers by graph name; a cache without an owner gets its own buffer, for a graph that runs alone.

    Raises:
        BundleError: an owner has no such cache, one of another shape, or fewer slots.
    """
    bound, alone = [], {}
    for cache_ref in spec.borrowed:
        buffers = owners.get(cache_ref.owner)
        if buffers is None:
            is_written = cache_ref.name in spec.caches
            names = tuple(n.name for n in spec.borrowed if (n.name in spec.caches) is is_written)
            if is_written not in alone:
                alone[is_written] = CacheBuffers(cache_sizes(spec, names), max_slots, max_rows)
            bound.append(BoundCache(cache_ref.name, alone[is_written], names.index(cache_ref.name)))
            continue
        index = find_owner(spec, cache_ref, buffers.sizes, buffers.max_slots, max_slots)
        bound.append(BoundCache(cache_ref.name, buffers, index))
    return bound
