# SPDX-License-Identifier: Apache-2.0
"""Features of the target that a draft has not read yet, kept where the engine left them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from speccompile.core.acceptance import Verdict
from speccompile.core.protocols import Outputs
from speccompile.core.tree import Floats, Ints, TokenTree


class PendingFeatures:
    """A row for each position that the target has read and the draft has not, by slot.

    From a verdict to the next draft the target's outputs are handed on as they came, on a GPU without leaving it.
    What would lose them (a prompt is read, a slot moves, nothing is drafted) brings the rows in use to the host.

    Args:
        max_slots: places.
        width: of a feature.
        make: features [batch, nodes, width] of the target's outputs, valid as long as they are.
    """

    def __init__(self, max_slots: int, width: int, make: Callable[[Outputs], Any]) -> None:
        self._none: Floats = np.zeros((0, width), dtype=np.float32)
        # On the host, as they came: a slot that is decoded plainly for long has many, and joins them but once.
        self._parts: list[list[Floats]] = [[] for _ in range(max_slots)]
        self._make, self._width = make, width
        self._live: Outputs | None = None  # of the target's last step
        self._path: Ints = np.zeros((0, 1), dtype=np.int64)
        self._counts: list[int] = []

    def start(self, slot: int) -> None:
        """A new sequence takes a place; the target is about to read its prompt."""
        self.settle()
        self._parts[slot] = []

    def add(self, slot: int, features: Any) -> None:
        """Rows [num, width] of the positions behind those that the slot has."""
        self._parts[slot].append(np.array(features, dtype=np.float32))

    def keep(self, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        """The target has scored a step: the features of the paths' nodes are new, those of the root among them.

        Args:
            tree: what was scored.
            verdict: what was kept.
            outputs: the target's; not copied.
        """
        self._live, self._path = outputs, np.maximum(verdict.path, 0)
        self._counts = [1 + num for num in verdict.num_accepted.tolist()]

    def count(self, slot: int) -> int:
        """Rows that a slot has."""
        is_live = self._live is not None and slot < len(self._counts)
        return sum(map(len, self._parts[slot])) + (self._counts[slot] if is_live else 0)

    def _take_all(self, slot: int) -> Floats:
        parts, self._parts[slot] = self._parts[slot], []
        return np.concatenate((self._none, *parts)) if len(parts) != 1 else parts[0]

    def take(self, batch: int, width: int) -> tuple[Any, Ints]:
        """All rows of the first `batch` slots, at most `width` each; they are no longer pending.

        Returns:
            Features [batch, states, width of a feature], and the row of each position [batch, width].
        """
        if self._live is not None and batch == len(self._counts) and not any(self._parts[:batch]):
            live, self._live = self._make(self._live), None
            return live, np.ascontiguousarray(self._path[:, :width])
        self.settle()
        held = np.zeros((batch, width, self._width), dtype=np.float32)
        for slot in range(batch):
            rows = self._take_all(slot)
            held[slot, : len(rows)] = rows
        return held, np.ascontiguousarray(np.broadcast_to(np.arange(width), (batch, width)))

    def take_rows(self, slot: int, num: int) -> Floats:
        """The first `num` rows [num, width] of a slot."""
        self.settle()
        rows = self._take_all(slot)
        if num < len(rows):
            self._parts[slot] = [rows[num:]]
        return rows[:num]

    def move(self, source: int, dest: int) -> None:
        """A sequence goes on at another place."""
        self.settle()
        self._parts[dest] = list(self._parts[source])

    def swap(self, first: int, second: int) -> None:
        """Two places exchange what they hold."""
        self.settle()
        self._parts[first], self._parts[second] = self._parts[second], self._parts[first]

    def settle(self) -> None:
        """Bring what lies in the target's outputs to the host: the target is about to run."""
        if self._live is None:
            return
        live, self._live = np.asarray(self._make(self._live)), None
        for slot, num in enumerate(self._counts):
            self.add(slot, live[slot, self._path[slot, :num]])
