# SPDX-License-Identifier: Apache-2.0
"""Scorers over drafts that give all tokens of a path in one run, from masks after the root.

A mask stands for an unknown token, so what comes after a node depends on its depth alone, and a tree is the product of
the candidates of its depths. Drawn tokens are independent, each verified by its own row's distribution. Masks are
written after the rows of real tokens, and the next run overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.protocols import Batch, Engine, Outputs
from speccompile.core.specs import CANDIDATE_PROBS, CANDIDATES, NODE_PROBS
from speccompile.core.tree import Verdict
from speccompile.drafting.feature_drafts import FeatureCache
from speccompile.drafting.kv_cache import DraftCache
from speccompile.drafting.proposer import Scorer
from speccompile.drafting.tree import Expansion

_AFTER_NODES = (CANDIDATES, CANDIDATE_PROBS, NODE_PROBS)


class Depths:
    """What a run gives after the nodes of each depth: [batch, depths, ..], after the root, then after each mask."""

    def __init__(self, outputs: Outputs) -> None:
        self._held = {name: np.asarray(outputs[name]) for name in _AFTER_NODES if name in outputs}

    def after(self, depth: int, num_nodes: int) -> Outputs:
        """Returns the same for each of `num_nodes` nodes of a depth; the root has depth 0."""
        rows = {name: held[:, depth : depth + 1] for name, held in self._held.items()}
        return {name: np.broadcast_to(row, (len(row), num_nodes, row.shape[2])) for name, row in rows.items()}


def masks_of(scorer: Scorer, engine: Engine, batch: Batch, slots: Sequence[int], num_drafts: int) -> list[int]:
    """Returns the masks of a run: as many as the longest path of the batch needs."""
    sequences, token = batch.sequences, engine.spec.mask_token
    assert token is not None
    lengths = [min(sequences[slot].max_drafts, scorer.room(slot, sequences[slot]) + 1) for slot in slots]
    return [token] * (min(num_drafts, max(lengths)) - 1)


class MaskDraftCache(DraftCache):
    """A `DraftCache` whose draft reads tokens and masks, at most `max_nodes` missed tokens in a step."""

    def __init__(self, engine: Engine, max_seq_len: int, max_nodes: int, num_drafts: int) -> None:
        super().__init__(engine, max_seq_len, max_nodes)
        self.num_drafts, self._depths = num_drafts, Depths({})

    def begin(self, batch: Batch, slots: Sequence[int], warp: Mapping[str, NDArray[Any]]) -> Outputs:
        masks = masks_of(self, self.engine, batch, slots, self.num_drafts)
        self._depths = Depths(self._read_new(batch.sequences, slots, warp, masks))
        return self._depths.after(0, 1)

    def expand(self, batch: Batch, level: Expansion) -> Outputs:
        return self._depths.after(level.depth, level.scored_nodes.shape[1])

    def commit(self, batch: Batch, num_kept: Sequence[int], verdict: Verdict, outputs: Outputs) -> None: ...


class MaskFeatureCache(FeatureCache):
    """A `FeatureCache`; the draft has a feature of its own for masks."""

    def __init__(
        self,
        engine: Engine,
        make: Callable[[Outputs], Any],
        names: Sequence[str],
        max_seq_len: int,
        max_nodes: int,
        num_drafts: int,
    ) -> None:
        super().__init__(engine, make, names, max_seq_len, max_nodes)
        self.num_drafts, self._depths = num_drafts, Depths({})

    def begin(self, batch: Batch, slots: Sequence[int], warp: Mapping[str, NDArray[Any]]) -> Outputs:
        masks = masks_of(self, self.engine, batch, slots, self.num_drafts)
        self._depths = Depths(self._read_new(batch.sequences, warp, masks))
        return self._depths.after(0, 1)

    def expand(self, batch: Batch, level: Expansion) -> Outputs:
        return self._depths.after(level.depth, level.scored_nodes.shape[1])
