# SPDX-License-Identifier: Apache-2.0
"""The K and V caches of an engine in device memory: allocated once, never moved, viewed by slot."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from speccompile.backends.cuda.arrays import item_bytes
from speccompile.backends.cuda.device import ALIGNMENT, Device, Memory
from speccompile.core import specs
from speccompile.core.specs import GraphSpec, TensorSpec, compacted_cache_name, updated_cache_name
from speccompile.errors import BuildError, BundleError
from speccompile.graph_kinds.borrowed import find_owner


def cache_bytes(spec: GraphSpec, max_slots: int) -> int:
    """Returns the bytes of the caches and states that an engine of this spec owns, snapshots included."""
    states = 3 * sum(4 * math.prod(shape) for shape in spec.state_shapes(1).values())
    return max_slots * (sum(_slot_bytes(spec.input(name)) for name in spec.own_caches) + states)


def refuse_states_alone(spec: GraphSpec) -> None:
    """Refuses a graph with recurrent states and no cache."""
    if spec.states and not spec.caches:
        got, expected = (
            "recurrent states and no K/V cache",
            "at least one attention layer: a GPU's rows are its caches'",
        )
        raise BuildError(f"graph {spec.name}", got, expected, "Build with engine.backend: onnxruntime on a CPU.")


def _slot_bytes(cache: TensorSpec) -> int:
    return math.prod(cast(tuple[int, ...], cache.dims[1:])) * item_bytes(cache.dtype)


class Caches:
    """One [max_slots, kv_heads, rows, head_dim] buffer per cache; kv_heads and head_dim are each cache's own.

    Unused rows are always finite: a masked row has weight zero, and zero times NaN is NaN. `rows` are of each slot in
    the present layout, `sizes` (kv_heads, head_dim) of each cache.

    Args:
        spec: of the graph; its cache inputs have static dims except the first, and the rows where `max_rows` is given.

    Raises:
        BundleError: addresses of slots would not be aligned as TensorRT needs them.
    """

    alignment: int = ALIGNMENT  # bytes to whose multiples the slots' addresses are aligned

    def __init__(self, device: Device, spec: GraphSpec, max_slots: int, max_rows: int | None = None) -> None:
        self.device, self.names, self.max_slots = device, spec.caches, max_slots
        held = [spec.input(name) for name in spec.caches]
        self.sizes = [cast(tuple[int, int], (cache.dims[1], cache.dims[3])) for cache in held]
        self.rows = cast(int, held[0].dims[2]) if max_rows is None else max_rows
        self.dtype = held[0].dtype
        for name, num_bytes in zip(self.names, map(self.slot_bytes, range(len(held))), strict=True):
            if max_slots > 1 and num_bytes % self.alignment:
                got, expected = f"{num_bytes} bytes a slot of {name}", f"a multiple of {self.alignment}"
                todo = "Build with a number of cache rows divisible by 8."
                raise BundleError(f"engine {spec.name}", got, expected, todo)
        self._spare: Memory | None = None  # of one slot, for swaps
        self._memories = [device.allocate_zeroed(max_slots * self.slot_bytes(i)) for i in range(len(held))]

    def row_bytes(self, index: int) -> int:
        """Returns the bytes of a row of one KV head of a cache."""
        return self.sizes[index][1] * item_bytes(self.dtype)

    def slot_bytes(self, index: int) -> int:
        """Returns the bytes of a slot of a cache in the present layout."""
        return self.sizes[index][0] * self.rows * self.row_bytes(index)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes reserved, all caches together."""
        return sum(memory.num_bytes for memory in self._memories)

    def shape(self, index: int, batch: int) -> tuple[int, ...]:
        kv_heads, head_dim = self.sizes[index]
        return (batch, kv_heads, self.rows, head_dim)

    def address(self, index: int, slot: int) -> int:
        return self._memories[index].address + slot * self.slot_bytes(index)

    def move_slot(self, source: int, dest: int, rows: int | None = None) -> None:
        """Copy the first `rows` rows of slot `source`, or all, over those of slot `dest`, on the device."""
        for index in range(len(self.names)):
            self._copy_slot(index, self.address(index, dest), self.address(index, source), rows)

    def swap_slots(self, first: int, second: int, rows: int) -> None:
        """Exchange the first `rows` rows of two slots, on the device."""
        wanted, spare = max(map(self.slot_bytes, range(len(self.names)))), self._spare
        if spare is None or spare.num_bytes < wanted:  # kept, as allocating and freeing wait for the device
            self._spare = spare = self.device.allocate(wanted)
        for index in range(len(self.names)):  # one after another on the stream, so they share the spare memory
            one, other = (self.address(index, slot) for slot in (first, second))
            for dest, source in ((spare.address, one), (one, other), (other, spare.address)):
                self._copy_slot(index, dest, source, rows)

    def clear_slot(self, slot: int) -> None:
        for index in range(len(self.names)):
            self.device.clear(self.address(index, slot), self.slot_bytes(index))

    def _copy_slot(self, index: int, dest: int, source: int, rows: int | None) -> None:
        if rows is None or rows >= self.rows:
            self.device.copy(dest, source, self.slot_bytes(index))
        elif rows > 0:
            kv_heads, row_bytes = self.sizes[index][0], self.row_bytes(index)
            pitch = self.rows * row_bytes
            self.device.copy_rows(dest, pitch, source, pitch, rows * row_bytes, kv_heads)


@dataclass(frozen=True, eq=False)
class BoundCache:
    """A cache input and the memory it is bound to."""

    name: str
    caches: Caches  # the engine's own, or another one's
    index: int


class BoundCaches:
    """All cache inputs of an engine: its own and those of other engines."""

    def __init__(self, bound: Sequence[BoundCache]) -> None:
        self._bound = tuple(bound)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(cache.name for cache in self._bound)

    @property
    def layout(self) -> tuple[int, ...]:
        return tuple(cache.caches.rows for cache in self._bound)

    def shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        return {cache.name: cache.caches.shape(cache.index, batch) for cache in self._bound}

    def addresses(self, first_slot: int, names: frozenset[str]) -> dict[str, int]:
        """Returns addresses by tensor name, of `names` only; a cache and its updated and compacted forms share one."""
        found = {}
        for cache in self._bound:
            address = cache.caches.address(cache.index, first_slot)
            for name in (cache.name, updated_cache_name(cache.name), compacted_cache_name(cache.name)):
                if name in names:
                    found[name] = address
        return found

    def written(self, names: Sequence[str]) -> tuple[Caches, ...]:
        wanted = set(names)
        return tuple(dict.fromkeys(cache.caches for cache in self._bound if cache.name in wanted))


def bind_caches(
    spec: GraphSpec,
    own: Caches | None,
    owners: Mapping[str, Caches | None],
    max_slots: int,
    allocate: Callable[[GraphSpec], Caches],
) -> BoundCaches | None:
    """Returns the cache inputs of an engine; None where it has none.

    Args:
        owners: caches of other engines by graph name.
        allocate: allocates the `caches` of a spec, for a graph that runs alone.
    """
    bound = [] if own is None else [BoundCache(name, own, index) for index, name in enumerate(own.names)]
    alone: dict[bool, Caches] = {}
    for cache_ref in spec.borrowed:
        held = owners.get(cache_ref.owner)
        if held is None:
            is_written = cache_ref.name in spec.caches
            names = tuple(n.name for n in spec.borrowed if (n.name in spec.caches) is is_written)
            if is_written not in alone:
                alone[is_written] = allocate(replace(spec, caches=names))
            bound.append(BoundCache(cache_ref.name, alone[is_written], names.index(cache_ref.name)))
            continue
        sizes = dict(zip(held.names, held.sizes, strict=True))
        index = find_owner(spec, cache_ref, sizes, held.max_slots, max_slots)
        wanted = spec.input(cache_ref.name)
        if held.dtype != wanted.dtype or (isinstance(wanted.dims[2], int) and wanted.dims[2] != held.rows):
            got, expected = f"{held.dtype} with {held.rows} rows", f"{wanted.dtype} with {wanted.dims[2]} rows"
            raise BundleError(f"engine {spec.name} ({cache_ref.name})", got, expected, "Build the bundle again.")
        bound.append(BoundCache(cache_ref.name, held, index))
    return BoundCaches(bound) if bound else None


def rollback_spec_of(spec: GraphSpec) -> GraphSpec:
    """Returns the spec of the plan or graph that compacts the caches of `spec`."""
    caches = tuple(spec.input(name) for name in spec.caches)
    inputs = (
        TensorSpec(specs.LENGTHS, ("batch",), "int64"),
        TensorSpec(specs.PATH, ("batch", "scored"), "int64"),
        *caches,
    )
    outputs = tuple(TensorSpec(updated_cache_name(c.name), c.dims, c.dtype) for c in caches)
    return GraphSpec("rollback", inputs, outputs, spec.caches)
