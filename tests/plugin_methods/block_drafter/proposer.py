# SPDX-License-Identifier: Apache-2.0
"""Chains from one run of a drafter that keeps features of the target in a cache of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speccompile.core.proposer import CacheRows
from speccompile.core.protocols import Batch, Engine, Outputs, StepTimes, TokenSequence
from speccompile.core.specs import HIDDEN, LENGTHS
from speccompile.core.tree import Floats, Ints, TokenTree, Verdict

FEATURES, ANCHOR, ANCHOR_NODE, BLOCK = "block_features", "anchor", "anchor_node", "block_tokens"


@dataclass(eq=False)
class BlockState:
    """The `draft_state` of a sequence.

    Args:
        pending: [positions, hidden], features that the drafter has not read; at least one after the first.
    """

    pending: Floats


class BlockProposer:
    """See `speccompile.core.proposer.Proposer`. Drafts are deterministic.

    Args:
        engine: the drafter.
        max_drafts: most draft tokens of a step.
        max_rows: cache rows that a sequence may use.
    """

    catches_up = False
    may_draw = False

    def __init__(self, engine: Engine, max_drafts: int, max_rows: int) -> None:
        self.engine, self.max_rows = engine, max_rows
        size, width = engine.spec.output(BLOCK).dims[1], engine.spec.input(FEATURES).dims[2]
        assert isinstance(size, int) and isinstance(width, int)
        self.max_drafts, self._none = min(max_drafts, size), np.zeros((0, width), np.float32)
        self._lengths = [0] * engine.max_slots
        self.caches = (CacheRows(engine, self._lengths),)

    def start(self, slot: int, sequence: TokenSequence) -> None:
        """Starts without features."""
        self._lengths[slot], sequence.draft_state = 0, BlockState(self._none)

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        """Returns 0: features of the rows that the slot holds are not kept, so all tokens are read again."""
        self.start(slot, sequence)
        return 0

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        """Learns nothing from times."""

    def prefill(self, slot: int, sequence: TokenSequence, tokens: Ints, start: int, outputs: Outputs) -> None:
        """Reads all features of the prompt so far but the last, which the first step reads."""
        self._add(sequence, np.asarray(outputs[HIDDEN])[0, : tokens.shape[1]])
        self._flush(slot, sequence)

    def propose(self, batch: Batch) -> TokenTree:
        """Returns drafts of one run for all slots; a slot without features or room has the root alone."""
        sequences = batch.sequences
        roots = np.array([[sequence.tokens[-1]] for sequence in sequences], dtype=np.int64)
        nums = [self._num_drafts(slot, sequence) for slot, sequence in enumerate(sequences)]
        if not any(nums):
            return TokenTree.roots(roots[:, 0])
        states: list[BlockState] = [sequence.draft_state for sequence in sequences]
        held = [state.pending if num else self._none for state, num in zip(states, nums, strict=True)]
        features = np.zeros((len(sequences), max(map(len, held)), self._none.shape[1]), np.float32)
        for slot, rows in enumerate(held):
            features[slot, : len(rows)] = rows
        ends = np.array([max(len(rows), 1) - 1 for rows in held], dtype=np.int64)
        starts = np.array([min(n, self.max_rows - 1) for n in self._lengths[: len(sequences)]], dtype=np.int64)
        made = self.engine.run({FEATURES: features, ANCHOR: roots, ANCHOR_NODE: ends, LENGTHS: starts})
        drafts = np.asarray(made[BLOCK])[:, : max(nums)]
        for slot, rows in enumerate(held):
            if len(rows):  # the last is read again, with what comes after it
                self._lengths[slot] += len(rows) - 1
                sequences[slot].draft_state.pending = rows[-1:]
        return TokenTree.chain(np.concatenate((roots, drafts), 1), 1 + np.array(nums, dtype=np.int64))

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        """Keeps the features of the path."""
        self.skip(batch, verdict, outputs)

    def skip(self, batch: Batch, verdict: Verdict, outputs: Outputs) -> None:
        """Keeps the features of the accepted nodes, the root's included."""
        hidden = np.asarray(outputs[HIDDEN])
        for slot, sequence in enumerate(batch.sequences):
            if not sequence.has_draft:
                continue
            self._add(sequence, hidden[slot, verdict.nodes_kept(slot)])
            if len(sequence.draft_state.pending) > self.max_drafts + 2:  # nothing was drafted for some steps
                self._flush(slot, sequence)

    def flush(self) -> None:
        """Nothing: none of the target's outputs is held."""

    def _num_drafts(self, slot: int, sequence: TokenSequence) -> int:
        pending = len(sequence.draft_state.pending)
        room = self.max_rows - self._lengths[slot] - pending
        return min(self.max_drafts, sequence.max_drafts) if pending and room >= 0 else 0

    def _add(self, sequence: TokenSequence, rows: Floats) -> None:
        state: BlockState = sequence.draft_state
        state.pending = np.concatenate((state.pending, rows), dtype=np.float32)

    def _flush(self, slot: int, sequence: TokenSequence) -> None:
        """Reads the pending rows but the last, as far as there is room."""
        state: BlockState = sequence.draft_state
        rows = state.pending[: min(len(state.pending) - 1, self.max_rows - self._lengths[slot])]
        if len(rows):
            end, start = np.array([len(rows) - 1]), np.array([self._lengths[slot]])
            feeds = {FEATURES: rows[None], ANCHOR: np.zeros((1, 1), np.int64), ANCHOR_NODE: end, LENGTHS: start}
            self.engine.run(feeds, first_slot=slot)
            self._lengths[slot] += len(rows)
            state.pending = state.pending[len(rows) :]
