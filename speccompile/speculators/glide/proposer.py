# SPDX-License-Identifier: Apache-2.0
"""The drafter's own cache, and how many rows of the target's may be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.jobs import PREFILL_CHUNK
from speccompile.core.protocols import Batch, Engine, Outputs, TokenSequence
from speccompile.core.specs import TARGET_LENGTHS, TOKENS
from speccompile.core.tree import Ints
from speccompile.drafting.kv_cache import DraftCache


class GlideRows(DraftCache):
    """See `DraftCache`. Every run is told how many rows of the target's caches are in use.

    While drafts are made the target has read the tokens before the root, and no more.
    """

    catches_up = False

    def __init__(self, engine: Engine, max_seq_len: int, max_nodes: int) -> None:
        super().__init__(engine, max_seq_len, max_nodes)
        self._target_lengths: Ints = np.zeros(engine.max_slots, dtype=np.int64)

    def _run(self, feeds: dict[str, Any], first_slot: int = 0) -> Outputs:
        lengths = self._target_lengths[first_slot : first_slot + len(feeds[TOKENS])]
        return self.engine.run({**feeds, TARGET_LENGTHS: lengths}, first_slot)

    def start(self, slot: int) -> None:
        super().start(slot)
        self._target_lengths[slot] = 0

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        self._target_lengths[slot] = num_rows
        start = self.lengths[slot] = min(self.lengths[slot], num_rows)
        end = min(num_rows, self.max_seq_len)
        if end - start > PREFILL_CHUNK:
            return start
        self._read(slot, np.array(sequence.tokens[start:end], dtype=np.int64))
        return num_rows

    def prefill(self, slot: int, sequence: TokenSequence, tokens: Ints, start: int, outputs: Outputs) -> None:
        self._target_lengths[slot] = start + tokens.shape[1]
        super().prefill(slot, sequence, tokens, start, outputs)

    def room(self, slot: int, sequence: TokenSequence) -> int:
        return super().room(slot, sequence) if len(sequence.tokens) > 1 else -1

    def begin(self, batch: Batch, slots: Sequence[int], warp: Mapping[str, NDArray[Any]]) -> Outputs:
        self._target_lengths[: len(batch.sequences)] = [len(sequence.tokens) - 1 for sequence in batch.sequences]
        return super().begin(batch, slots, warp)
