# SPDX-License-Identifier: Apache-2.0
"""The target's hidden state behind each slot's root, kept where the engine left it until it is drafted from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from speccompile.core.specs import HIDDEN, START_NODES
from speccompile.core.tree import Floats, Ints


class TargetStates:
    """States of all slots for heads that read the target's `hidden`.

    From a verdict to the next draft the target's output is handed on as it came, on a GPU without leaving it. Only
    what would lose it (another prompt is read, a slot moves or ends) brings the rows in use to the host: once a
    request, not once a step.

    Args:
        max_slots: places.
        width: of the hidden state.
    """

    def __init__(self, max_slots: int, width: int) -> None:
        self._rows: Floats = np.zeros((max_slots, 1, width), dtype=np.float32)
        self._start = np.zeros(max_slots, dtype=np.int64)
        self._known = [False] * max_slots
        self._live: Any = None  # `hidden` of the last step, [batch, nodes, width]
        self._nodes = self._start

    def start(self, slot: int) -> None:
        """A new sequence takes a place; the target is about to read its prompt."""
        self.settle()
        self._known[slot] = False

    def read(self, slot: int, hidden: Any) -> None:
        """The target has read the prompt's last part: [1, nodes, width]; the last node is the one before the root."""
        self._rows[slot, 0] = np.asarray(hidden)[0, -1]
        self._known[slot] = True

    def keep(self, hidden: Any, nodes: Ints) -> None:
        """The target has scored a step.

        Args:
            hidden: its output, [batch, nodes, width]; not copied.
            nodes: [batch] int64, the last node of each slot's path.
        """
        self._live, self._nodes = hidden, nodes.copy()
        self._known[: len(nodes)] = [True] * len(nodes)

    def move(self, source: int, dest: int) -> None:
        """A sequence goes on at another place."""
        self.settle()
        self._rows[dest] = self._rows[source]
        self._known[dest] = self._known[source]

    def swap(self, first: int, second: int) -> None:
        """Two places exchange what they hold."""
        self.settle()
        self._rows[[first, second]] = self._rows[[second, first]]
        self._known[first], self._known[second] = self._known[second], self._known[first]

    def known(self, places: Sequence[int]) -> list[int]:
        """Those of the places that have a state; after a prompt of one token there is none yet."""
        return [place for place in places if self._known[place]]

    def feeds(self, batch: int) -> dict[str, Any]:
        """`hidden` [batch, nodes, width] and `start_nodes` [batch] for the first `batch` places."""
        if self._live is not None and self._live.shape[0] != batch:
            self.settle()
        if self._live is not None:
            return {HIDDEN: self._live, START_NODES: self._nodes}
        return {HIDDEN: self._rows[:batch], START_NODES: self._start[:batch]}

    def settle(self) -> None:
        """Bring what lies in the target's output to the host: the target is about to run."""
        if self._live is not None:
            batch = len(self._nodes)
            self._rows[:batch, 0] = np.asarray(self._live)[np.arange(batch), self._nodes]
            self._live = None
