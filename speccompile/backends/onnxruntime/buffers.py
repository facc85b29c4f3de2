# SPDX-License-Identifier: Apache-2.0
"""Cache memory of an engine: one flat buffer per cache, used as [slots, kv_heads, rows, head_dim] views.

ONNX Runtime's Attention computes over every row of its view, so the view grows with the context in
use (`bucket_rows`) instead of having `max_seq` rows from the start. Growing re-strides the rows in use; it happens
once per bucket, never per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from speccompile.backends.kv_rows import bucket_rows
from speccompile.core.specs import GraphSpec
from speccompile.graph_kinds.borrowed import find_owner


class CacheBuffers:
    """The caches of one engine in host memory.

    Args:
        names: cache inputs in order.
        kv_heads, head_dim: dims of each cache.
        max_slots, max_rows: capacity; memory is committed by the system when rows are first written.
    """

    def __init__(self, names: Sequence[str], kv_heads: int, head_dim: int, max_slots: int, max_rows: int) -> None:
        self.names, self.kv_heads, self.head_dim = tuple(names), kv_heads, head_dim
        self.max_slots, self.max_rows = max_slots, max_rows
        self.rows = min(bucket_rows(1, max_rows), max_rows)
        size = max_slots * kv_heads * max_rows * head_dim
        self._flat = [np.zeros(size, np.float32) for _ in names]
        self.addresses = [flat.ctypes.data for flat in self._flat]

    @property
    def slot_bytes(self) -> int:
        """Returns the bytes from one slot to the next in the present view."""
        return 4 * self.kv_heads * self.rows * self.head_dim

    @property
    def num_bytes(self) -> int:
        """Returns the bytes reserved, all caches together."""
        return sum(flat.nbytes for flat in self._flat)

    def _view(self, flat: np.ndarray, rows: int) -> np.ndarray:
        size = self.max_slots * self.kv_heads * rows * self.head_dim
        return flat[:size].reshape(self.max_slots, self.kv_heads, rows, self.head_dim)

    def view(self, index: int) -> np.ndarray:
        """Returns cache `index` as [max_slots, kv_heads, rows, head_dim] float32; shares memory."""
        return self._view(self._flat[index], self.rows)

    def grow(self, rows: int) -> bool:
        """Make the view hold at least `rows`; returns whether it changed."""
        if rows <= self.rows:
            return False
        new_rows = bucket_rows(rows, self.max_rows)
        for flat in self._flat:
            old = self._view(flat, self.rows).copy()
            new = self._view(flat, new_rows)
            new[:, :, : self.rows] = old
            new[:, :, self.rows :] = 0  # other slots' rows were there, of which one may be NaN
        self.rows = new_rows
        return True

    def shrink(self, rows: int) -> bool:
        """Drop to the smallest view that holds `rows`; keeps the first `rows` rows of every slot."""
        new_rows = bucket_rows(max(rows, 1), self.max_rows)
        if new_rows >= self.rows:
            return False
        for flat in self._flat:
            kept = self._view(flat, self.rows)[:, :, :new_rows].copy()
            self._view(flat, new_rows)[:] = kept
        self.rows = new_rows
        return True

    def move_slot(self, source: int, dest: int, rows: int | None = None) -> None:
        """Copy the first `rows` rows of slot `source`, or all, over those of slot `dest`."""
        for flat in self._flat:
            view = self._view(flat, self.rows)[:, :, :rows]
            view[dest] = view[source]

    def clear_slot(self, slot: int) -> None:
        """Zero all rows of a slot in the present view; rows that the view gains later are zeroed then."""
        for flat in self._flat:
            self._view(flat, self.rows)[slot] = 0

    def swap_slots(self, first: int, second: int, rows: int) -> None:
        """Exchange the first `rows` rows of two slots."""
        for flat in self._flat:
            view = self._view(flat, self.rows)[:, :, :rows]
            held = view[first].copy()
            view[first] = view[second]
            view[second] = held


@dataclass(frozen=True, eq=False)
class BoundCache:
    """A cache input and the memory it is bound to.

    Args:
        name: of the input.
        buffers: the engine's own, or another one's.
        index: of the cache in them.
    """

    name: str
    buffers: CacheBuffers
    index: int

    def shape(self, batch: int) -> tuple[int, int, int, int]:
        """Returns the shape of the present view with `batch` slots."""
        return batch, self.buffers.kv_heads, self.buffers.rows, self.buffers.head_dim

    def address(self, first_slot: int) -> int:
        """Returns the address of slot `first_slot` in the present view."""
        return self.buffers.addresses[self.index] + first_slot * self.buffers.slot_bytes


def bind_borrowed(
    spec: GraphSpec, owners: Mapping[str, CacheBuffers], max_slots: int, max_rows: int
) -> list[BoundCache]:
    """Binds the inputs that are caches of other engines to their addresses.

    Args:
        spec: of the borrower.
        owners: buffers by graph name; a cache without an owner gets its own buffer, for a graph that runs alone.
        max_slots: of the borrower.
        max_rows: of the borrower.

    Raises:
        BundleError: an owner has no such cache, one of another shape, or fewer slots.
    """
    bound, alone = [], {}
    for cache_ref in spec.borrowed:
        dims = spec.input(cache_ref.name).dims
        kv_heads, head_dim = dims[1], dims[3]
        assert isinstance(kv_heads, int) and isinstance(head_dim, int)
        buffers = owners.get(cache_ref.owner)
        if buffers is None:
            is_written = cache_ref.name in spec.caches
            names = tuple(n.name for n in spec.borrowed if (n.name in spec.caches) is is_written)
            if is_written not in alone:
                alone[is_written] = CacheBuffers(names, kv_heads, head_dim, max_slots, max_rows)
            bound.append(BoundCache(cache_ref.name, alone[is_written], names.index(cache_ref.name)))
            continue
        index = find_owner(
            spec, cache_ref, buffers.names, (buffers.kv_heads, buffers.head_dim), buffers.max_slots, max_slots
        )
        bound.append(BoundCache(cache_ref.name, buffers, index))
    return bound
