# SPDX-License-Identifier: Apache-2.0
"""Scorer over a draft that gives a whole block in one run: it reads accepted positions' features, and keeps no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.acceptance import Verdict
from speccompile.core.jobs import PREFILL_CHUNK
from speccompile.core.proposer import CacheRows
from speccompile.core.protocols import Batch, Engine, Outputs, TokenSequence
from speccompile.core.specs import CANDIDATES, FEATURE_NODES, FEATURES, LENGTHS, START_NODES, TOKENS
from speccompile.core.tree import Ints
from speccompile.drafting.expansion import Expansion
from speccompile.drafting.features import PendingFeatures
from speccompile.drafting.lattice import Lattice
from speccompile.drafting.path_lattice import PathLattice
from speccompile.graph_kinds.blocks import PAIR_SCORES


class BlockCache:
    """See `speccompile.drafting.proposer.DraftRows`.

    One run reads the features of the positions that were accepted since the last one, and gives the lattice of the
    next block. Trees grow over the lattice without another run, but for the small step of a draft whose slots depend on
    the path, and drafts leave nothing in the cache: its rows are those of accepted positions, whatever was drafted.

    Args:
        make: makes features [batch, nodes, hidden] of the target's outputs.
        names: of the target's outputs that `make` reads.
        max_nodes: most positions that a step with every slot may read.
        step: of a draft whose slots depend on the path before them (`graph_kinds.blocks.path_step_spec`); None: of any
            other.
    """

    catches_up = False

    def __init__(
        self,
        engine: Engine,
        make: Callable[[Outputs], Any],
        names: Sequence[str],
        max_seq_len: int,
        max_nodes: int,
        step: Engine | None = None,
    ) -> None:
        self.engine, self.max_seq_len, self.max_nodes, self._make = engine, max_seq_len, max_nodes, make
        width = engine.spec.input(FEATURES).dims[2]
        assert isinstance(width, int)
        self.pending = PendingFeatures(width, make, names)
        self.lengths = [0] * engine.max_slots
        self.caches = (CacheRows(engine, self.lengths),)
        self._step = step
        self._lattice: Lattice | None = None

    def start(self, slot: int) -> None:
        self.pending.flush()  # the target is about to read the prompt
        self.lengths[slot] = 0

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        """Keeps all rows: each depends on the positions up to its own alone."""
        self.pending.flush()
        self.lengths[slot] = min(self.lengths[slot], num_rows)
        return self.lengths[slot]

    def prefill(self, slot: int, sequence: TokenSequence, tokens: Ints, start: int, outputs: Outputs) -> None:
        """Reads the chunk [1, nodes] except the prompt's last row, which stays pending for the first draft."""
        num = tokens.shape[1]
        is_last = start + num == len(sequence.tokens) - 1
        self._read(slot, num - is_last, self._make(outputs))
        if is_last:
            self.pending.add(sequence, outputs, 0, np.array([num - 1], dtype=np.int64))

    def _read(self, slot: int, num: int, features: Any) -> None:
        """Reads the first `num` of the features [1, at least as many, hidden] of one slot; its block is not used."""
        if not num:
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
        """Returns how many drafts may follow the first; -1 without a pending feature, as after a one-token prompt."""
        is_able = self.pending.count(sequence) and len(sequence.tokens) <= self.max_seq_len
        return self.engine.spec.num_drafts - 1 if is_able else -1

    def begin(self, batch: Batch, slots: Sequence[int], warp: Mapping[str, NDArray[Any]]) -> Outputs:
        """Reads the pending features of all slots of the batch, as `take` releases those of all of them."""
        sequences = batch.sequences
        for slot, sequence in enumerate(sequences):
            while (num := self.pending.count(sequence)) > self.max_nodes:
                num = min(num - 1, PREFILL_CHUNK)
                self._read(slot, num, self.pending.take_rows(sequence, num)[None])
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

    def commit(self, batch: Batch, num_kept: Sequence[int], verdict: Verdict, outputs: Outputs) -> None:
        self.pending.keep(batch.sequences, verdict, outputs)

    def skip(self, batch: Batch, verdict: Verdict, outputs: Outputs) -> None:
        """Copies the states of the scored roots to the host: the draft reads them before the next draft."""
        self.pending.keep(batch.sequences, verdict, outputs)
        self.pending.flush()

    def flush(self) -> None:
        self.pending.flush()
