# SPDX-License-Identifier: Apache-2.0
"""Recurrent states of an engine's slots in device memory: two buffers of each, which a step reads and writes in turn.

So a step's inputs stay as they were, even if the library runs it again or writes outputs before it has read all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from speccompile.backends.cuda.device import ALIGNMENT, Device, Memory, aligned
from speccompile.backends.states import SlotStates, StateStep
from speccompile.core.specs import GraphSpec, updated_cache_name
from speccompile.errors import BundleError

_FLOAT_BYTES = 4


class DeviceStates(SlotStates[Memory]):
    """The recurrent states of all slots, and snapshots of them; `sides` are the buffers in use, by slot."""

    def __init__(self, device: Device, spec: GraphSpec, max_slots: int, alignment: int = ALIGNMENT) -> None:
        super().__init__(spec, max_slots)
        self.device, self.names = device, spec.states
        self._dims = {name: shape[1:] for name, shape in spec.state_shapes(1).items()}
        self._sizes = [_FLOAT_BYTES * math.prod(self._dims[name]) for name in self.names]  # bytes of a slot
        for name, size in zip(self.names, self._sizes, strict=True):
            if max_slots > 1 and size % alignment:
                got, expected = f"{size} bytes a slot of {name}", f"a multiple of {alignment}"
                todo = "Build with engine.max_batch_size: 1, or with another engine.max_draft_nodes."
                raise BundleError(self.where, got, expected, todo)
        self._memories = [[device.allocate_zeroed(max_slots * size) for _ in range(2)] for size in self._sizes]
        self.sides = [0] * max_slots
        self._side = 0  # of the buffers that the present step reads
        self._rooms: list[Memory] = []  # of snapshots; each has the states of a slot one after another

    @property
    def num_bytes(self) -> int:
        return 3 * len(self.lengths) * sum(self._sizes)

    @property
    def layout(self) -> tuple[int, ...]:
        return (self._side,)

    def shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        return {name: (batch, *dims) for name, dims in self._dims.items()}

    def addresses(self, first_slot: int, names: frozenset[str]) -> dict[str, int]:
        """Returns addresses for the present step by tensor name, of `names` only: of the states and their updates."""
        found = {}
        for index, name in enumerate(self.names):
            found[name] = self.address(index, self._side, first_slot)
            found[updated_cache_name(name)] = self.address(index, 1 - self._side, first_slot)
        return {name: address for name, address in found.items() if name in names}

    def address(self, index: int, side: int, slot: int) -> int:
        """Returns the address of a slot of state number `index` in one of its two buffers."""
        return self._memories[index][side].address + slot * self._sizes[index]

    def begin(self, feeds: Mapping[str, Any], first_slot: int) -> StateStep:
        step = super().begin(feeds, first_slot)
        sides = self.sides[step.slots]
        self._side = max(set(sides), key=sides.count)
        for slot in range(step.slots.start, step.slots.stop):
            if self.sides[slot] != self._side:
                self._copy(slot, self.sides[slot], slot, self._side)
        self.sides[step.slots] = [self._side] * len(sides)
        return step

    def end(self, step: StateStep) -> None:
        super().end(step)
        self.sides[step.slots] = [1 - self._side] * (step.slots.stop - step.slots.start)

    def follow_arrays(self, owner: Self, num_slots: int) -> None:
        self.device.activate()
        for slot in range(num_slots):
            for index, size in enumerate(self._sizes):
                source = owner.address(index, owner.sides[slot], slot)
                self.device.copy(self.address(index, self.sides[slot], slot), source, size)

    def copy_arrays(self, source: int, dest: int) -> None:
        self._copy(source, self.sides[source], dest, self.sides[source])
        self.sides[dest] = self.sides[source]

    def swap_arrays(self, first: int, second: int) -> None:
        sides = self.sides[first], self.sides[second]
        self._copy(first, sides[0], second, 1 - sides[1])
        self._copy(second, sides[1], first, 1 - sides[0])
        self.sides[first], self.sides[second] = 1 - sides[0], 1 - sides[1]

    def zero_arrays(self, slot: int) -> None:
        self.device.activate()
        for index, size in enumerate(self._sizes):
            self.device.clear(self.address(index, self.sides[slot], slot), size)

    def _copy(self, source: int, source_side: int, dest: int, dest_side: int) -> None:
        self.device.activate()
        for index, size in enumerate(self._sizes):
            self.device.copy(self.address(index, dest_side, dest), self.address(index, source_side, source), size)

    def save_arrays(self, slot: int) -> Memory:
        self.device.activate()
        used = {id(snapshot.arrays) for snapshot in self.snapshots if snapshot is not None}
        room = next((room for room in self._rooms if id(room) not in used), None)
        if room is None:
            room = self.device.allocate(sum(map(aligned, self._sizes)))
            self._rooms.append(room)
        for index, (start, size) in enumerate(self._parts()):
            self.device.copy(room.address + start, self.address(index, self.sides[slot], slot), size)
        return room

    def restore_arrays(self, slot: int, kept: Memory) -> None:
        self.device.activate()
        for index, (start, size) in enumerate(self._parts()):
            self.device.copy(self.address(index, self.sides[slot], slot), kept.address + start, size)

    def _parts(self) -> list[tuple[int, int]]:
        starts = [sum(map(aligned, self._sizes[:index])) for index in range(len(self._sizes))]
        return list(zip(starts, self._sizes, strict=True))
