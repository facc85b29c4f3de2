# SPDX-License-Identifier: Apache-2.0
"""Features of the target that a draft has not read yet, kept on the device where the engine left them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from speccompile.core.acceptance import Verdict
from speccompile.core.protocols import Outputs, TokenSequence
from speccompile.core.tree import Floats, Ints
from speccompile.drafting.state import DraftState, same_sequences

MAX_STATES = 128  # rows per sequence that are kept as states before features are made of them


class PendingFeatures:
    """Feature rows, by sequence, of the positions that the target has read and the draft has not.

    From a verdict to the next draft the target's outputs are passed on without a copy, on a GPU without leaving it.
    Before they would be lost (a prompt is read, the next batch is another one, nothing is drafted), the rows in use are
    copied to the host, to each sequence's `draft_state.states`. Features are made of them before the next draft, or of
    `MAX_STATES` rows at once: a sequence that is decoded plainly for long has many.

    Args:
        make: makes features [batch, nodes, width] of the target's outputs, valid as long as these are.
        names: of the target's outputs that `make` reads, [batch, nodes, ..] each.
    """

    def __init__(self, width: int, make: Callable[[Outputs], Any], names: Sequence[str]) -> None:
        self._none: Floats = np.zeros((0, width), dtype=np.float32)
        self._make, self._width, self._names = make, width, tuple(names)
        self._live: Outputs | None = None  # of the target's last step
        self._path: Ints = np.zeros((0, 1), dtype=np.int64)
        self._sequences: list[TokenSequence] = []  # of that step

    def add(self, sequence: TokenSequence, outputs: Outputs, slot: int, nodes: Ints) -> None:
        """Copies the target's states of the positions after those that the sequence has.

        Args:
            nodes: [num] int64, nodes to copy, in order.
        """
        state: DraftState = sequence.draft_state
        if not len(nodes):
            return
        state.states.append(tuple(np.asarray(outputs[name])[slot, nodes] for name in self._names))
        state.num_states += len(nodes)
        if state.num_states >= MAX_STATES:
            self._make_features(state)

    def _make_features(self, state: DraftState) -> None:
        if not state.states:
            return
        columns = zip(*state.states, strict=True)
        outputs = {name: np.concatenate(parts)[None] for name, parts in zip(self._names, columns, strict=True)}
        state.features.append(np.array(np.asarray(self._make(outputs))[0], dtype=np.float32))
        state.states, state.num_states = [], 0

    def keep(self, sequences: Sequence[TokenSequence], verdict: Verdict, outputs: Outputs) -> None:
        """Adds the features of the accepted paths of a step, the roots included; none of sequences without a draft."""
        self._live, self._sequences, self._path = outputs, list(sequences), np.maximum(verdict.path, 0)
        for sequence, num in zip(sequences, verdict.num_accepted.tolist(), strict=True):
            sequence.draft_state.num_live = 1 + num if sequence.has_draft else 0

    def count(self, sequence: TokenSequence) -> int:
        state: DraftState = sequence.draft_state
        return sum(map(len, state.features)) + state.num_states + state.num_live

    def _take_all(self, sequence: TokenSequence) -> Floats:
        state: DraftState = sequence.draft_state
        self._make_features(state)
        parts, state.features = state.features, []
        return np.concatenate((self._none, *parts)) if len(parts) != 1 else parts[0]

    def take(self, sequences: Sequence[TokenSequence], width: int) -> tuple[Any, Ints]:
        """Returns all rows of a batch, at most `width` each; they are no longer pending.

        Returns:
            Features [batch, states, width of a feature], and the row of each position in them [batch, width] int64.
        """
        batch = len(sequences)
        is_whole = not any(sequence.draft_state.features or sequence.draft_state.states for sequence in sequences)
        if self._live is not None and is_whole and same_sequences(sequences, self._sequences):
            live = self._make(self._live)
            self._release()
            return live, np.ascontiguousarray(self._path[:, :width])
        self.flush()
        held = np.zeros((batch, width, self._width), dtype=np.float32)
        for slot, sequence in enumerate(sequences):
            rows = self._take_all(sequence)
            held[slot, : len(rows)] = rows
        return held, np.ascontiguousarray(np.broadcast_to(np.arange(width), (batch, width)))

    def take_rows(self, sequence: TokenSequence, num: int) -> Floats:
        """Returns the first `num` rows [num, width] of a sequence; they are no longer pending."""
        self.flush()
        rows = self._take_all(sequence)
        if num < len(rows):
            sequence.draft_state.features = [rows[num:]]
        return rows[:num]

    def _release(self) -> None:
        for sequence in self._sequences:
            sequence.draft_state.num_live = 0
        self._live, self._sequences = None, []

    def flush(self) -> None:
        """Copies the rows in use from the target's outputs to the host: the target is about to run."""
        if self._live is None:
            return
        for slot, sequence in enumerate(self._sequences):
            self.add(sequence, self._live, slot, self._path[slot, : sequence.draft_state.num_live])
        self._release()
