# SPDX-License-Identifier: Apache-2.0
"""The target's hidden state of the token before each slot's root, kept on the device until the next draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from speccompile.core.protocols import Slot
from speccompile.core.specs import HIDDEN, START_NODES
from speccompile.core.tree import Floats, Ints
from speccompile.drafting.state import same_sequences


class TargetStates:
    """Hidden states of all sequences, for heads that read the target's `hidden`.

    From a verdict to the next draft the target's output is passed on without a copy, on a GPU without leaving it. Only
    before it would be lost (another prompt is read, the batch has other sequences or another order) the rows in use are
    copied to the host, to each sequence's `draft_state.hidden`: once per request, not once per step.

    Args:
        width: of the hidden state.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._live: Any = None  # `hidden` of the last step, [batch, nodes, width]
        self._slots: list[Slot] = []  # of that step
        self._nodes: Ints = np.zeros(0, dtype=np.int64)

    def read(self, sequence: Slot, hidden: Any) -> None:
        """Keeps the state before the root: the last node of `hidden` [1, nodes, width] of the prompt's end."""
        sequence.draft_state.hidden = np.array(np.asarray(hidden)[0, -1], dtype=np.float32)

    def keep(self, slots: Sequence[Slot], hidden: Any, nodes: Ints) -> None:
        """Keeps the hidden states of a scored step.

        Args:
            slots: of the batch.
            hidden: its output, [batch, nodes, width]; not copied.
            nodes: [batch] int64, the last node of each slot's path.
        """
        self._live, self._slots, self._nodes = hidden, list(slots), nodes.copy()

    def known(self, slots: Sequence[Slot], places: Sequence[int]) -> list[int]:
        """Returns those of the slot indices that have a state; after a prompt of one token there is none yet."""
        if self._has_live(slots):
            return list(places)
        return [place for place in places if slots[place].draft_state.hidden is not None]

    def _has_live(self, slots: Sequence[Slot]) -> bool:
        """Returns whether the last step's output has the states of these sequences; if not, all go to the host."""
        if self._live is not None and not same_sequences(slots, self._slots):
            self.flush()
        return self._live is not None

    def feeds(self, slots: Sequence[Slot]) -> dict[str, Any]:
        """Returns `hidden` [batch, nodes, width] and `start_nodes` [batch] int64; zeros where there is no state."""
        if self._has_live(slots):
            return {HIDDEN: self._live, START_NODES: self._nodes}
        rows: Floats = np.zeros((len(slots), 1, self._width), dtype=np.float32)
        for place, slot in enumerate(slots):
            if slot.draft_state.hidden is not None:
                rows[place, 0] = slot.draft_state.hidden
        return {HIDDEN: rows, START_NODES: np.zeros(len(slots), dtype=np.int64)}

    def flush(self) -> None:
        """Copies the states in use from the target's output to the host: the target is about to run."""
        if self._live is None:
            return
        rows = np.asarray(self._live)[np.arange(len(self._nodes)), self._nodes].astype(np.float32)
        for slot, row in zip(self._slots, rows, strict=True):
            slot.draft_state.hidden = row
        self._live, self._slots = None, []
