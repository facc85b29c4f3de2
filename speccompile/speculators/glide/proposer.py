# SPDX-License-Identifier: Apache-2.0
"""The drafter's own cache, and how many rows of the target's may be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.jobs import PREFILL_CHUNK
from speccompile.core.protocols import Batch, Engine, Outputs, TokenSequence
from speccompile.core.specs import TARGET_LENGTHS, GraphSpec
from speccompile.core.tree import Ints
from speccompile.drafting.kv_cache import DraftCache


class TargetReader:
    """The drafter's engine, fed with `target_lengths`, set before each run: the target's rows in use."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.spec: GraphSpec = engine.spec
        self.max_slots, self.max_rows = engine.max_slots, engine.max_rows
        self.compacts_in_step, self.states = engine.compacts_in_step, engine.states
        self.max_scored = engine.max_scored
        self.target_lengths: Ints = np.zeros(engine.max_slots, dtype=np.int64)

    @property
    def view_rows(self) -> int:
        return self.engine.view_rows

    @property
    def graph_fault(self) -> str | None:
        return self.engine.graph_fault

    def run(self, feeds: Mapping[str, NDArray[Any]], first_slot: int = 0) -> Mapping[str, NDArray[Any]]:
        batch = feeds[next(iter(feeds))].shape[0]
        lengths = self.target_lengths[first_slot : first_slot + batch]
        return self.engine.run({**feeds, TARGET_LENGTHS: lengths}, first_slot)

    def reset(self, rows: int = 1) -> None:
        self.engine.reset(rows)

    def shrink(self, rows: int) -> None:
        self.engine.shrink(rows)

    def read_caches(self, slot: int, rows: int) -> Mapping[str, NDArray[Any]] | None:
        return self.engine.read_caches(slot, rows)

    def move_slot(self, source: int, dest: int, rows: int | None = None) -> None:
        self.engine.move_slot(source, dest, rows)

    def swap_slots(self, first: int, second: int, rows: int) -> None:
        self.engine.swap_slots(first, second, rows)

    def slide_slot(self, slot: int, first: int, num: int) -> None:
        self.engine.slide_slot(slot, first, num)

    def clear_slot(self, slot: int) -> None:
        self.engine.clear_slot(slot)

    def compact(self, lengths: Ints, path: Ints) -> None:
        self.engine.compact(lengths, path)


class GlideRows(DraftCache):
    """A `DraftCache`. While drafts are made the target has read the tokens before the root, and no more."""

    def __init__(self, engine: Engine, max_seq_len: int, max_nodes: int) -> None:
        self.reader = TargetReader(engine)
        super().__init__(self.reader, max_seq_len, max_nodes)

    catches_up = False

    def start(self, slot: int) -> None:
        super().start(slot)
        self.reader.target_lengths[slot] = 0

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        self.reader.target_lengths[slot] = num_rows
        start = self.lengths[slot] = min(self.lengths[slot], num_rows)
        end = min(num_rows, self.max_seq_len)
        if end - start > PREFILL_CHUNK:
            return start
        self._read(slot, np.array(sequence.tokens[start:end], dtype=np.int64))
        return num_rows

    def prefill(self, slot: int, sequence: TokenSequence, tokens: Ints, start: int, outputs: Outputs) -> None:
        self.reader.target_lengths[slot] = start + tokens.shape[1]
        super().prefill(slot, sequence, tokens, start, outputs)

    def room(self, slot: int, sequence: TokenSequence) -> int:
        return super().room(slot, sequence) if len(sequence.tokens) > 1 else -1

    def begin(self, batch: Batch, slots: Sequence[int], warp: Mapping[str, NDArray[Any]]) -> Outputs:
        self.reader.target_lengths[: len(batch.sequences)] = [len(sequence.tokens) - 1 for sequence in batch.sequences]
        return super().begin(batch, slots, warp)
