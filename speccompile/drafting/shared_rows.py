# SPDX-License-Identifier: Apache-2.0
"""Rows of a draft that is made of the target's own layers, on the target's caches: no prefill, and no rows kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.protocols import Batch, Engine, Outputs, TokenSequence
from speccompile.core.specs import LENGTHS, SCORED_NODES, TOKENS, TREE_MASK
from speccompile.core.tree import Ints, Verdict
from speccompile.drafting.tree import Expansion


class SharedRows:
    """A `Scorer` over a draft that writes the target's caches in place.

    The target has filled the rows of the shared layers before the root, and writes those from the root on again when it
    scores. No earlier row may be written: padding begins where the slot's last run did. Recurrent states are copied
    from the target's before the root is read.
    """

    caches, catches_up = (), True

    def __init__(self, engine: Engine, max_seq_len: int) -> None:
        self.engine, self.max_seq_len = engine, max_seq_len
        self._starts: list[int] = []  # by slot, the row of the first node of the last run

    def start(self, slot: int) -> None: ...

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        return num_rows

    def prefill(self, slot: int, sequence: TokenSequence, tokens: Ints, start: int, outputs: Outputs) -> None: ...

    def room(self, slot: int, sequence: TokenSequence) -> int:
        return self.max_seq_len - len(sequence.tokens)

    def begin(self, batch: Batch, slots: Sequence[int], warp: Mapping[str, NDArray[Any]]) -> Outputs:
        if (states := self.engine.states) is not None:
            states.follow(len(batch.sequences))
        roots = np.array([[sequence.tokens[-1]] for sequence in batch.sequences], dtype=np.int64)
        self._starts = [len(sequence.tokens) - 1 for sequence in batch.sequences]
        return self.engine.run({TOKENS: roots, LENGTHS: np.array(self._starts, dtype=np.int64), **warp})

    def expand(self, batch: Batch, level: Expansion) -> Outputs:
        """Reads the nodes of one expansion."""
        for slot, sequence in enumerate(batch.sequences):
            if level.nodes[slot]:
                self._starts[slot] = len(sequence.tokens) + level.num_in_place[slot]
        lengths = np.array(self._starts, dtype=np.int64)
        feeds: dict[str, Any] = {TOKENS: level.tokens, LENGTHS: lengths, **level.warp}
        if level.tokens.shape[1] > 1:
            # Padding at the end of the cache must not have positions that the model does not know.
            feeds |= {TREE_MASK: level.mask_without_idle(), SCORED_NODES: level.scored_nodes}
        return self.engine.run(feeds)

    def commit(self, batch: Batch, num_kept: Sequence[int], verdict: Verdict, outputs: Outputs) -> None: ...

    def skip(self, batch: Batch, verdict: Verdict, outputs: Outputs) -> None: ...

    def flush(self) -> None: ...
