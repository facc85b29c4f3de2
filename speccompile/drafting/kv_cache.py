# SPDX-License-Identifier: Apache-2.0
"""Scorer over a decoder with its own KV cache: which rows hold emitted tokens, and how it catches up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.jobs import PREFILL_CHUNK
from speccompile.core.proposer import CacheRows
from speccompile.core.protocols import Batch, Engine, Outputs, TokenSequence
from speccompile.core.specs import LENGTHS, SCORED_NODES, TOKENS, TREE_MASK
from speccompile.core.tree import Ints, Verdict
from speccompile.drafting.tree import Expansion, padding_mask

_FIRST = np.zeros((1, 1), dtype=np.int64)


class DraftCache:
    """A `Scorer` whose draft reads tokens alone.

    Args:
        engine: the draft (`candidate_spec`); its cache has rows for `max_nodes` and one more after `max_seq_len`.
        max_seq_len: cache rows a sequence may use.
        max_nodes: most nodes of an expansion, and most missed tokens that the first run of a step reads.
    """

    catches_up = True

    def __init__(self, engine: Engine, max_seq_len: int, max_nodes: int) -> None:
        self.engine, self.max_seq_len, self.max_nodes = engine, max_seq_len, max_nodes
        self.lengths = [0] * engine.max_slots  # by slot, rows that hold tokens of its sequence
        self.caches = (CacheRows(engine, self.lengths),)
        # The first run of a step is as wide as what it reads, and `room` is called before that is known.
        self._spare = min(max_nodes, max_seq_len)

    def start(self, slot: int) -> None:
        self.lengths[slot] = 0

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        """Returns `num_rows`: rows that the cache lacks are read before the next draft."""
        self.lengths[slot] = min(self.lengths[slot], num_rows)
        return num_rows

    def prefill(self, slot: int, sequence: TokenSequence, tokens: Ints, start: int, outputs: Outputs) -> None:
        """Reads the chunk [1, nodes] as well, as far as the cache has rows."""
        if start == self.lengths[slot]:
            self._read(slot, tokens[0, : self.max_seq_len - start])

    def _read(self, slot: int, tokens: Ints) -> None:
        if len(tokens) > 0:
            start = np.array([self.lengths[slot]], dtype=np.int64)
            # One scored node, which is not used: the LM head is computed for one row.
            self._run({TOKENS: tokens[None], LENGTHS: start, SCORED_NODES: _FIRST}, slot)
            self.lengths[slot] += len(tokens)

    def _run(self, feeds: dict[str, Any], first_slot: int = 0) -> Outputs:
        return self.engine.run(feeds, first_slot)

    def room(self, slot: int, sequence: TokenSequence) -> int:
        return self.max_seq_len - len(sequence.tokens)

    def begin(self, batch: Batch, slots: Sequence[int], warp: Mapping[str, NDArray[Any]]) -> Outputs:
        return self._read_new(batch.sequences, slots, warp)

    def _read_new(
        self,
        sequences: Sequence[TokenSequence],
        slots: Sequence[int],
        warp: Mapping[str, NDArray[Any]],
        masks: Sequence[int] = (),
    ) -> Outputs:
        """Reads the tokens that the slots have not read yet, and after them masks; scores the roots and these.

        All read as many tokens as the one that missed most: reading a token again costs the same as padding.
        """
        for slot in slots:
            self._catch_up(slot, sequences[slot].tokens)
        num_masks = len(masks)
        most = max(len(sequences[slot].tokens) - self.lengths[slot] for slot in slots)
        width = most + num_masks
        tokens = np.zeros((len(sequences), width), dtype=np.int64)
        scored = np.zeros((len(sequences), 1 + num_masks), dtype=np.int64)
        lengths = np.array([self._idle(slot, width) for slot in range(len(sequences))], dtype=np.int64)
        counts = [0] * len(sequences)
        for slot in slots:
            known = sequences[slot].tokens
            read = [*known[-most:], *masks]
            tokens[slot, : len(read)], counts[slot] = read, len(read)
            scored[slot] = np.arange(len(read) - 1 - num_masks, len(read))
            lengths[slot], self.lengths[slot] = len(known) - len(read) + num_masks, len(known)
        feeds: dict[str, Any] = {TOKENS: tokens, LENGTHS: lengths, **warp}
        if width > 1:
            feeds[SCORED_NODES] = scored
        if int(lengths.max()) + width > self.max_seq_len:
            feeds[TREE_MASK] = padding_mask(lengths, counts, width, self.max_seq_len)
        return self._run(feeds)

    def _catch_up(self, slot: int, tokens: list[int]) -> None:
        num = len(tokens)
        self.lengths[slot] = min(self.lengths[slot], num - 1)  # the root is always read again
        while num - (start := self.lengths[slot]) > self._spare:
            self._read(slot, np.array(tokens[start : min(start + PREFILL_CHUNK, num - 1)], dtype=np.int64))

    def _idle(self, slot: int, span: int, num_in_place: int = 0) -> int:
        """Returns the row where padding of `span` positions is written; a full slot loses its last rows to it."""
        last = max(self.max_seq_len - span, 0)
        if self.lengths[slot] + num_in_place <= last:
            return self.lengths[slot] + num_in_place
        self.lengths[slot] = min(self.lengths[slot], last)
        return last

    def expand(self, batch: Batch, level: Expansion) -> Outputs:
        """Reads an expansion after the roots."""
        width, span, starts = level.tokens.shape[1], level.depth + 1, []
        for slot, (nodes, num) in enumerate(zip(level.nodes, level.num_in_place, strict=True)):
            starts.append(self.lengths[slot] + num if nodes else self._idle(slot, span, num))
        feeds: dict[str, Any] = {TOKENS: level.tokens, LENGTHS: np.array(starts, dtype=np.int64), **level.warp}
        if width > 1:
            feeds |= {TREE_MASK: level.tree_mask, SCORED_NODES: level.scored_nodes}
        return self._run(feeds)

    def commit(self, batch: Batch, num_kept: Sequence[int], verdict: Verdict, outputs: Outputs) -> None:
        """Keeps the rows of the `num_kept` accepted drafts of each slot; `batch` is before this step's verdict."""
        for slot, sequence in enumerate(batch.sequences):
            if self.lengths[slot] == len(sequence.tokens):  # the root was read, and nothing was written over it
                self.lengths[slot] += min(num_kept[slot], self.room(slot, sequence))

    def skip(self, batch: Batch, verdict: Verdict, outputs: Outputs) -> None: ...

    def flush(self) -> None: ...
