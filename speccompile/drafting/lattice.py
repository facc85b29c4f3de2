# SPDX-License-Identifier: Apache-2.0
"""The candidates of a block as a lattice: what follows a path, at any temperature, without a run of the draft.

A walk draws each token from the softmax of the scores after the token before, over the candidates of its slot: the
distribution by which drawn drafts are verified. The most probable walks and trees are deterministic drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.protocols import Outputs
from speccompile.core.sampling import warp
from speccompile.core.specs import CANDIDATE_PROBS, CANDIDATES, NODE_PROBS, TEMPERATURE, TOP_K, TOP_P
from speccompile.core.tree import Floats, Ints
from speccompile.drafting.tree import Expansion


class Lattice:
    """Candidates and scores of a batch; see `speccompile.graph_kinds.blocks`.

    `candidates` are [batch, drafts, candidates] int64, those of a slot all different; `scores` [batch, drafts,
    candidates or 1, candidates] float32.
    """

    def __init__(self, candidates: Ints, scores: Floats, vocab_size: int) -> None:
        self.candidates, self.scores, self._vocab = candidates, scores, vocab_size

    def after_roots(self, heat: Mapping[str, NDArray[Any]]) -> Outputs:
        return self._outputs(0, self.scores[:, 0, :1], heat)

    def after(self, depth: int, tokens: Ints, heat: Mapping[str, NDArray[Any]]) -> Outputs:
        """Returns what follows tokens: `candidates` and `candidate_probs` [batch, scored, candidates], sorted.

        Where drafts are drawn, it has `node_probs` [batch, scored, vocab] as well.

        Args:
            depth: of the tokens, at least 1 and less than the number of slots.
            tokens: [batch, scored] int64, candidates of slot depth - 1; others stand for the first candidate.
            heat: temperature, top_k and top_p [batch] where drafts are drawn; empty: none are.
        """
        before = self.columns(depth, tokens)
        if self.scores.shape[2] == 1:
            before = np.zeros_like(before)
        rows = np.take_along_axis(self.scores[:, depth], before[:, :, None], axis=1)
        return self._outputs(depth, rows, heat)

    def columns(self, depth: int, tokens: Ints) -> Ints:
        """Returns which candidates of slot depth - 1 tokens [batch, scored] are, 0 for others; of the same shape."""
        found: Ints = (self.candidates[:, depth - 1, None] == tokens[:, :, None]).argmax(-1)
        return found

    def expand(self, level: Expansion) -> Outputs:
        """Returns what comes after the scored nodes of an expansion; see `after`."""
        return self.after(level.depth, np.take_along_axis(level.tokens, level.scored_nodes, axis=1), level.warp)

    def _outputs(self, slot: int, rows: Floats, heat: Mapping[str, NDArray[Any]]) -> Outputs:
        """Returns the outputs of scores [batch, scored, candidates] of a slot."""
        order = np.argsort(-rows, axis=-1, kind="stable")
        ranked = np.take_along_axis(rows, order, axis=-1)
        tokens = np.take_along_axis(np.broadcast_to(self.candidates[:, slot, None], rows.shape), order, axis=-1)
        masses = np.exp((ranked - ranked[:, :, :1]).astype(np.float64))
        probs = (masses / masses.sum(axis=-1, keepdims=True)).astype(np.float32)
        outputs: dict[str, NDArray[Any]] = {CANDIDATES: tokens, CANDIDATE_PROBS: probs}
        if heat:
            batch = len(rows)
            drawn = warp(
                ranked,
                heat.get(TEMPERATURE, np.zeros(batch, np.float32)),
                heat.get(TOP_K, np.zeros(batch, np.int64)),
                heat.get(TOP_P, np.ones(batch, np.float32)),
            )
            dists = np.zeros((*rows.shape[:2], self._vocab), dtype=np.float32)
            np.put_along_axis(dists, tokens, drawn, axis=-1)
            outputs[NODE_PROBS] = dists
        return outputs
