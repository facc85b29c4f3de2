# SPDX-License-Identifier: Apache-2.0
"""The target's hidden state of the token before each slot's root, kept on the device until the next draft."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from speccompile.core.protocols import TokenSequence
from speccompile.core.specs import HIDDEN, START_NODES
from speccompile.core.tree import Floats, Ints


class TargetStates:
    """Hidden states of all sequences, for heads that read the target's `hidden`.

    The target's output stays on its device until the next draft. Where it would be lost before (another prompt is read,
    the batch changes) rows in use are copied to each sequence's `draft_state.hidden`, once per request.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._live: Any = None  # `hidden` of the last step, [batch, nodes, width]
        self._slots: list[TokenSequence] = []  # of that step
        self._nodes: Ints = np.zeros(0, dtype=np.int64)

    def read(self, sequence: TokenSequence, hidden: Any) -> None:
        """Keeps the state before the root: the last node of `hidden` [1, nodes, width] of the prompt's end."""
        sequence.draft_state.hidden = np.array(np.asarray(hidden)[0, -1], dtype=np.float32)

    def keep(self, sequences: Sequence[TokenSequence], hidden: Any, nodes: Ints) -> None:
        """Keeps [batch, nodes, width] hidden states of a step, not copied; `nodes` [batch] are the ends of paths."""
        self._live, self._slots, self._nodes = hidden, list(sequences), nodes.copy()

    def known(self, sequences: Sequence[TokenSequence], slots: Sequence[int]) -> list[int]:
        """Returns those of the slot indices that have a state; after a prompt of one token there is none yet."""
        if self._has_live(sequences):
            return list(slots)
        return [slot for slot in slots if sequences[slot].draft_state.hidden is not None]

    def _has_live(self, sequences: Sequence[TokenSequence]) -> bool:
        is_same = len(sequences) == len(self._slots) and all(map(operator.is_, sequences, self._slots))
        if self._live is not None and not is_same:
            self.flush()
        return self._live is not None

    def feeds(self, sequences: Sequence[TokenSequence]) -> dict[str, Any]:
        """Returns `hidden` [batch, nodes, width] and `start_nodes` [batch] int64; zeros where there is no state."""
        if self._has_live(sequences):
            return {HIDDEN: self._live, START_NODES: self._nodes}
        rows: Floats = np.zeros((len(sequences), 1, self._width), dtype=np.float32)
        for slot, sequence in enumerate(sequences):
            if sequence.draft_state.hidden is not None:
                rows[slot, 0] = sequence.draft_state.hidden
        return {HIDDEN: rows, START_NODES: np.zeros(len(sequences), dtype=np.int64)}

    def flush(self) -> None:
        """Copies the states in use from the target's output to the host: the target is about to run."""
        if self._live is None:
            return
        rows = np.asarray(self._live)[np.arange(len(self._nodes)), self._nodes].astype(np.float32)
        for sequence, row in zip(self._slots, rows, strict=True):
            sequence.draft_state.hidden = row
        self._live, self._slots = None, []
