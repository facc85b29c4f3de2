# SPDX-License-Identifier: Apache-2.0
"""Scorer over a draft that gives a whole block in one run: it reads accepted positions' features, and keeps no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.jobs import PREFILL_CHUNK
from speccompile.core.protocols import Batch, Engine, Outputs, TokenSequence
from speccompile.core.specs import CANDIDATES, FEATURE_NODES, FEATURES, LENGTHS, START_NODES, TOKENS
from speccompile.drafting.feature_drafts import FeatureCache
from speccompile.drafting.lattice import Lattice, PathLattice
from speccompile.drafting.sliding_rows import GrowingRows
from speccompile.drafting.tree import Expansion
from speccompile.graph_kinds.blocks import PAIR_SCORES


class BlockCache(FeatureCache):
    """A `Scorer` that runs once per block: it reads the positions accepted since, and gives the next block's lattice.

    Trees grow over the lattice without another run, but for the small step of a draft whose slots depend on the path.
    Cache rows are those of accepted positions, whatever was drafted.

    Args:
        make: makes features [batch, nodes, hidden] of the target's outputs.
        names: of the target's outputs that `make` reads.
        max_nodes: most positions that a step with every slot may read.
        step: of a draft whose slots depend on the path (`graph_kinds.blocks.path_step_spec`); None: of any other.
    """

    def __init__(
        self,
        engine: Engine,
        make: Callable[[Outputs], Any],
        names: Sequence[str],
        max_seq_len: int,
        max_nodes: int,
        step: Engine | None = None,
    ) -> None:
        super().__init__(engine, make, names, max_seq_len, max_nodes)
        self.rows = GrowingRows(engine, self.lengths)
        self.caches = (self.rows,)
        self._step = step
        self._lattice: Lattice | None = None

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        return super().resume(slot, sequence, num_rows + 1)

    def _read(self, slot: int, tokens: Sequence[int], features: Any) -> None:
        if not (num := len(tokens)):
            return
        feeds = {
            TOKENS: np.zeros((1, 1), dtype=np.int64),
            LENGTHS: np.array([self.lengths[slot]], dtype=np.int64),
            FEATURES: features,
            FEATURE_NODES: np.arange(num, dtype=np.int64)[None],
            START_NODES: np.array([num - 1], dtype=np.int64),
        }
        self.engine.run(feeds, first_slot=slot)
        self.lengths[slot] += num

    def room(self, slot: int, sequence: TokenSequence) -> int:
        is_able = self.pending.count(sequence) and len(sequence.tokens) <= self.max_seq_len
        return self.engine.spec.num_drafts - 1 if is_able else -1

    def begin(self, batch: Batch, slots: Sequence[int], warp: Mapping[str, NDArray[Any]]) -> Outputs:
        sequences = batch.sequences
        for slot, sequence in enumerate(sequences):
            while (num := self.pending.count(sequence)) > self.max_nodes:
                self._catch_up(slot, sequence, min(num - 1, PREFILL_CHUNK))
        counts = [self.pending.count(sequence) for sequence in sequences]
        features, rows = self.pending.take(sequences, max(counts))
        feeds = {
            TOKENS: np.array([[sequence.tokens[-1]] for sequence in sequences], dtype=np.int64),
            LENGTHS: np.array(self.lengths[: len(sequences)], dtype=np.int64),
            FEATURES: features,
            FEATURE_NODES: rows,
            START_NODES: np.array([max(num - 1, 0) for num in counts], dtype=np.int64),
        }
        made = self.engine.run(feeds)
        for slot, num in enumerate(counts):
            self.lengths[slot] += num
        vocab_size = self.engine.spec.vocab_size
        if self._step is None:
            self._lattice = Lattice(np.asarray(made[CANDIDATES]), np.asarray(made[PAIR_SCORES]), vocab_size)
        else:
            self._lattice = PathLattice(self._step, made, vocab_size)
        return self._lattice.after_roots(warp)

    def expand(self, batch: Batch, level: Expansion) -> Outputs:
        assert self._lattice is not None
        return self._lattice.expand(level)
