# SPDX-License-Identifier: Apache-2.0
"""The K and V caches of an engine in device memory: allocated once, never moved, lent out by slot."""

from __future__ import annotations

import math
from typing import cast

from speccompile.backends.tensorrt.arrays import item_bytes
from speccompile.backends.tensorrt.device import ALIGNMENT, Device
from speccompile.core import specs
from speccompile.core.specs import GraphSpec, TensorSpec, compacted_cache_name, updated_cache_name
from speccompile.errors import BundleError


class Caches:
    """One [max_slots, kv_heads, rows, head_dim] buffer a cache.

    Unused rows are finite numbers from the start: a masked row has weight zero, and zero times NaN is NaN.

    Args:
        device: where they lie.
        spec: of the graph; its cache inputs have static dims but the first.
        max_slots: sequences.

    Raises:
        BundleError: addresses of slots would not be aligned as TensorRT needs them.
        RuntimeFault: there is not so much memory.
    """

    def __init__(self, device: Device, spec: GraphSpec, max_slots: int) -> None:
        self.device, self.names, self.max_slots = device, spec.caches, max_slots
        first = spec.input(spec.caches[0])
        self.dims = cast(tuple[int, ...], first.dims[1:])
        self.dtype = first.dtype
        self.rows = self.dims[1]
        self.slot_bytes = math.prod(self.dims) * item_bytes(self.dtype)
        if max_slots > 1 and self.slot_bytes % ALIGNMENT:
            got, expected = f"{self.slot_bytes} bytes a slot", f"a multiple of {ALIGNMENT}"
            raise BundleError(f"engine {spec.name}", got, expected, "Build with a number of cache rows divisible by 8.")
        self._memories = [device.allocate_zeroed(max_slots * self.slot_bytes) for _ in self.names]

    @property
    def num_bytes(self) -> int:
        """Bytes reserved, all caches together."""
        return sum(memory.num_bytes for memory in self._memories)

    def shape(self, batch: int) -> tuple[int, ...]:
        """Of a cache lent to `batch` slots."""
        return (batch, *self.dims)

    def addresses(self, first_slot: int, names: frozenset[str]) -> dict[str, int]:
        """By tensor name: each cache with its updated and compacted form has one address; only those in `names`."""
        found = {}
        for cache, memory in zip(self.names, self._memories, strict=True):
            for name in (cache, updated_cache_name(cache), compacted_cache_name(cache)):
                if name in names:
                    found[name] = memory.address + first_slot * self.slot_bytes
        return found

    def move_slot(self, source: int, dest: int) -> None:
        """Copy slot `source` over slot `dest`, on the device."""
        for memory in self._memories:
            start = memory.address
            self.device.copy(start + dest * self.slot_bytes, start + source * self.slot_bytes, self.slot_bytes)


def rollback_spec_of(spec: GraphSpec) -> GraphSpec:
    """The spec of the plan or graph that compacts the caches of `spec`."""
    caches = tuple(spec.input(name) for name in spec.caches)
    inputs = (
        TensorSpec(specs.LENGTHS, ("batch",), "int64"),
        TensorSpec(specs.PATH, ("batch", "scored"), "int64"),
        *caches,
    )
    outputs = tuple(TensorSpec(updated_cache_name(c.name), c.dims, c.dtype) for c in caches)
    return GraphSpec("rollback", inputs, outputs, spec.caches)
