# SPDX-License-Identifier: Apache-2.0
"""Recurrent states of an engine's slots: what each holds, and copies to begin again from.

A state holds the first `lengths[slot]` tokens of its sequence. Rows of the last step that may be refused are pending:
the next step applies those that its own `lengths` accept. So a sequence can go on at any length from `lengths[slot]` to
`lengths[slot] + num_pending[slot]`, and at none before: a state cannot be cut. Pending rows are in the order of nodes;
of a tree `compact` moves those of the accepted path to the front.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from speccompile.core.specs import CONV_ROWS, LENGTHS, PENDING, STATE_LENGTHS, SURE_NODES, TOKENS, GraphSpec
from speccompile.core.tree import Ints
from speccompile.errors import RuntimeFault

KeptT = TypeVar("KeptT")  # a copy of the states of one slot
_CHAIN = "Write speculator.tree: chain."
_AGAIN = "Send the request again; if that fails too, report it: the states were not kept by this engine's steps."


@dataclass(frozen=True)
class Snapshot(Generic[KeptT]):
    """A copy of the states of one slot."""

    length: int
    num_pending: int
    arrays: KeptT  # the states of the slot, which are never written again


class StateStep(NamedTuple):
    """What a step makes of the states."""

    slots: slice
    state_lengths: Ints  # [batch] int64: tokens that the states hold before it
    after: Ints  # [batch] int64: tokens that they hold after it
    num_pending: Ints  # [batch] int64: rows that are pending after it


class SlotStates(ABC, Generic[KeptT]):
    """What the recurrent states of all slots of an engine hold, and a snapshot for each; the subclass has the memory.

    `lengths` [max_slots] int64 are the tokens that states hold, `num_pending` [max_slots] int64 the pending rows. A
    snapshot may stand for several slots, as it is never written again.
    """

    scores_trees: bool = False  # whether steps may be trees
    owner: Self | None = None  # the states of another engine that these follow, of the same sizes; None: there are none

    def __init__(self, spec: GraphSpec, max_slots: int) -> None:
        self.where, self.max_pending = f"engine {spec.name}", spec.max_pending
        self.lengths: Ints = np.zeros(max_slots, np.int64)
        self.num_pending: Ints = np.zeros(max_slots, np.int64)
        self.snapshots: list[Snapshot[KeptT] | None] = [None] * max_slots

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Returns the bytes of the states, and of as many snapshots as there are slots."""

    @abstractmethod
    def copy_arrays(self, source: int, dest: int) -> None:
        """Copies the states of slot `source` over those of slot `dest`, another one."""

    @abstractmethod
    def swap_arrays(self, first: int, second: int) -> None: ...

    @abstractmethod
    def zero_arrays(self, slot: int) -> None: ...

    @abstractmethod
    def save_arrays(self, slot: int) -> KeptT:
        """Returns a copy of the states of a slot; it may use the memory of a copy that no snapshot has any more."""

    @abstractmethod
    def restore_arrays(self, slot: int, kept: KeptT) -> None: ...

    @abstractmethod
    def follow_arrays(self, owner: Self, num_slots: int) -> None:
        """Copies another engine's states of the first slots over its own."""

    def follow(self, num_slots: int) -> None:
        """See `speccompile.core.protocols.States.follow`; without an owner nothing is copied."""
        if (owner := self.owner) is not None:
            self.follow_arrays(owner, num_slots)
            self.lengths[:num_slots] = owner.lengths[:num_slots]
            self.num_pending[:num_slots] = owner.num_pending[:num_slots]

    def begin(self, feeds: Mapping[str, Any], first_slot: int) -> StateStep:
        """Returns what a step makes of the states; until `end` the states of its slots count as lost.

        Args:
            feeds: of the step. A probe may give `state_lengths` itself: the states are then as they are.
            first_slot: the slot of batch row 0.

        Raises:
            RuntimeFault: a slot's states do not hold its first `lengths` tokens, or too many nodes would be pending.
        """
        lengths: Ints = np.asarray(feeds[LENGTHS])
        batch, nodes = feeds[TOKENS].shape
        slots = slice(first_slot, first_slot + batch)
        sure: Ints = np.asarray(feeds[SURE_NODES]) if SURE_NODES in feeds else np.zeros(batch, np.int64)
        if STATE_LENGTHS in feeds:
            held, most = np.asarray(feeds[STATE_LENGTHS]), np.full(batch, self.max_pending)
        else:
            held, most = np.where(lengths > 0, self.lengths[slots], 0), self.num_pending[slots]
        num_owed, num_pending = lengths - held, nodes - sure
        if (num_owed < 0).any() or (num_owed > np.where(lengths > 0, most, 0)).any():
            raise self._lost(first_slot, lengths, held, most)
        if (sure < 0).any() or (num_pending < 0).any() or (num_pending > self.max_pending).any():
            expected = f"at most {self.max_pending} nodes that are not sure, and no more sure ones than nodes"
            got = f"{nodes} nodes, of which {sure.tolist()} are sure"
            raise RuntimeFault(self.where, got, expected, "Build with a larger engine.max_draft_nodes.")
        self.lengths[slots], self.num_pending[slots] = 0, 0
        return StateStep(slots, held, lengths + sure, num_pending)

    def _lost(self, first_slot: int, lengths: Ints, held: Ints, most: Ints) -> RuntimeFault:
        row = next(i for i in range(len(lengths)) if not 0 <= lengths[i] - held[i] <= (most[i] if lengths[i] else 0))
        got = f"a step of slot {first_slot + row} after {int(lengths[row])} tokens"
        expected = f"{int(held[row])} to {int(held[row] + most[row])} tokens, those that its recurrent states hold"
        return RuntimeFault(self.where, got, expected, _AGAIN)

    def end(self, step: StateStep) -> None:
        self.lengths[step.slots], self.num_pending[step.slots] = step.after, step.num_pending

    def compact(self, lengths: Ints, path: Ints) -> None:
        """Moves the pending rows of accepted paths to the front; the states of the first slots are changed in place.

        Args:
            lengths: [batch] int64, tokens of each slot before the step that left the rows.
            path: [batch, depth] int64, accepted nodes from the root on, -1 after the end.
        """
        del lengths, path
        raise RuntimeFault(self.where, "a tree to roll back", "chains: its states do not move rows", _CHAIN)

    def reusable(self, slot: int, rows: int) -> int:
        """Returns how many of a slot's first `rows` tokens a sequence can reuse, by the states or the snapshot."""
        held = [(int(self.lengths[slot]), int(self.num_pending[slot]))]
        if (snapshot := self.snapshots[slot]) is not None:
            held.append((snapshot.length, snapshot.num_pending))
        return max((min(rows, length + num) for length, num in held if length <= rows), default=0)

    def resume(self, slot: int, rows: int) -> None:
        """Makes a slot's states ready for a step after its first `rows` tokens, a length from `reusable`, or 0."""
        snapshot = self.snapshots[slot]
        if snapshot is not None:
            num_pending = min(snapshot.num_pending, rows - snapshot.length)
            snapshot = replace(snapshot, num_pending=num_pending) if rows > 0 and num_pending >= 0 else None
            self.snapshots[slot] = snapshot
        if rows == 0:
            self.lengths[slot] = self.num_pending[slot] = 0
        elif self._holds(slot, rows):
            self.num_pending[slot] = rows - self.lengths[slot]
        elif snapshot is not None:
            self.restore_arrays(slot, snapshot.arrays)
            self.lengths[slot], self.num_pending[slot] = snapshot.length, snapshot.num_pending

    def _holds(self, slot: int, rows: int) -> bool:
        return 0 <= rows - int(self.lengths[slot]) <= int(self.num_pending[slot])

    def take_snapshot(self, slot: int) -> None:
        length, num_pending = int(self.lengths[slot]), int(self.num_pending[slot])
        self.snapshots[slot] = None
        if length + num_pending:
            self.snapshots[slot] = Snapshot(length, num_pending, self.save_arrays(slot))

    def move(self, source: int, dest: int, rows: int | None = None) -> None:
        """Copies states and snapshot of slot `source` to slot `dest`; states that hold more than `rows` are left."""
        self.snapshots[dest] = self.snapshots[source]
        self.lengths[dest] = self.num_pending[dest] = 0
        if rows is None or self._holds(source, rows):
            self.copy_arrays(source, dest)
            self.lengths[dest], self.num_pending[dest] = self.lengths[source], self.num_pending[source]

    def swap(self, first: int, second: int) -> None:
        """Exchanges states and snapshots of two slots."""
        if first == second:
            return
        self.swap_arrays(first, second)
        for counts in (self.lengths, self.num_pending):
            counts[[first, second]] = counts[[second, first]]
        snapshots = self.snapshots
        snapshots[first], snapshots[second] = snapshots[second], snapshots[first]

    def clear(self, slot: int) -> None:
        self.zero_arrays(slot)
        self.lengths[slot] = self.num_pending[slot] = 0
        self.snapshots[slot] = None

    def reset(self) -> None:
        """Marks the states of all slots as unused, and drops all snapshots."""
        self.lengths[:] = self.num_pending[:] = 0
        self.snapshots = [None] * len(self.snapshots)


class HostStates(SlotStates[tuple[NDArray[np.float32], ...]]):
    """Recurrent states in host memory. `arrays`: by name, [max_slots, ...] float32; they never move."""

    def __init__(self, spec: GraphSpec, max_slots: int) -> None:
        super().__init__(spec, max_slots)
        self.arrays = {name: np.zeros(shape, np.float32) for name, shape in spec.state_shapes(max_slots).items()}
        self.scores_trees = spec.state_trees
        begins = {PENDING: 0, CONV_ROWS: spec.conv_history}
        kinds = {name: spec.input(name).dims[1] for name in spec.states}
        self._pending = [(self.arrays[name], begins[str(kind)]) for name, kind in kinds.items() if kind in begins]

    def compact(self, lengths: Ints, path: Ints) -> None:
        for slot, (length, nodes) in enumerate(zip(lengths.tolist(), path.tolist(), strict=True)):
            num_sure = int(self.lengths[slot]) - length  # the first nodes of the path have no pending rows
            rows = [node - num_sure for node in nodes[num_sure:] if node >= 0]
            if rows == [*range(len(rows))]:
                continue
            for array, begin in self._pending:
                array[slot, begin : begin + len(rows)] = array[slot, [begin + row for row in rows]]

    @property
    def num_bytes(self) -> int:
        return 2 * sum(array.nbytes for array in self.arrays.values())

    def follow_arrays(self, owner: Self, num_slots: int) -> None:
        for array, theirs in zip(self.arrays.values(), owner.arrays.values(), strict=True):
            array[:num_slots] = theirs[:num_slots]

    def copy_arrays(self, source: int, dest: int) -> None:
        for array in self.arrays.values():
            array[dest] = array[source]

    def swap_arrays(self, first: int, second: int) -> None:
        for array in self.arrays.values():
            array[[first, second]] = array[[second, first]]

    def zero_arrays(self, slot: int) -> None:
        for array in self.arrays.values():
            array[slot] = 0

    def save_arrays(self, slot: int) -> tuple[NDArray[np.float32], ...]:
        return tuple(array[slot].copy() for array in self.arrays.values())

    def restore_arrays(self, slot: int, kept: tuple[NDArray[np.float32], ...]) -> None:
        for array, saved in zip(self.arrays.values(), kept, strict=True):
            array[slot] = saved


def host_states(spec: GraphSpec, max_slots: int) -> HostStates | None:
    """Returns states in host memory; None for a graph without any."""
    return HostStates(spec, max_slots) if spec.states else None
