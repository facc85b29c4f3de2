# SPDX-License-Identifier: Apache-2.0
"""The lattice of a block draft whose slots depend on the whole path before them, walked by a small second graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.protocols import Engine, Outputs
from speccompile.core.specs import CANDIDATES
from speccompile.core.tree import Floats
from speccompile.drafting.lattice import Lattice
from speccompile.drafting.tree import Expansion
from speccompile.graph_kinds.blocks import (
    BASE_SCORES,
    CANDIDATE_ROWS,
    EMBEDDED,
    NEXT_STATES,
    PAIR_SCORES,
    PATH_SCORES,
    PATH_STATES,
    SLOT_TERMS,
)


class PathLattice(Lattice):
    """Candidates of a batch, and the states of the paths that were walked over them.

    One run of the step reads all nodes of one depth; their states are kept until the next block.
    """

    def __init__(self, step: Engine, made: Outputs, vocab_size: int) -> None:
        super().__init__(np.asarray(made[CANDIDATES]), np.asarray(made[PAIR_SCORES]), vocab_size)
        self._step = step
        self._embedded, self._terms, self._rows = (
            np.asarray(made[name]) for name in (EMBEDDED, SLOT_TERMS, CANDIDATE_ROWS)
        )
        width = step.spec.input(PATH_STATES).dims[2]
        assert isinstance(width, int)
        self._width = width
        self._states: list[dict[int, Floats]] = [{} for _ in self.candidates]  # by slot and node

    def after_roots(self, heat: Mapping[str, NDArray[Any]]) -> Outputs:
        before = np.zeros((len(self.candidates), 1, self._width), dtype=np.float32)
        states, scores = self._run(0, self._embedded[:, :1], before)
        for held, state in zip(self._states, states, strict=True):
            held[0] = state[0]
        return self._outputs(0, scores, heat)

    def expand(self, level: Expansion) -> Outputs:
        tokens = np.take_along_axis(level.tokens, level.scored_nodes, axis=1)
        num = self.candidates.shape[2]
        rows = 1 + (level.depth - 1) * num + self.columns(level.depth, tokens)  # of the tokens in `embedded`
        embedded = np.take_along_axis(self._embedded, rows[:, :, None], axis=1)
        before = np.zeros((*tokens.shape, self._width), dtype=np.float32)
        scored = [
            [(nodes[column], parents[column]) for column in columns] if nodes else []
            for columns, nodes, parents in zip(level.scored_nodes.tolist(), level.nodes, level.parents, strict=True)
        ]
        for slot, nodes in enumerate(scored):
            for column, (_, parent) in enumerate(nodes):
                before[slot, column] = self._states[slot][parent]
        states, scores = self._run(level.depth, embedded, before)
        for slot, nodes in enumerate(scored):
            for column, (node, _) in enumerate(nodes):
                self._states[slot].setdefault(node, states[slot, column])  # padding may name an ancestor once more
        return self._outputs(level.depth, scores, level.warp)

    def _run(self, slot: int, embedded: Floats, before: Floats) -> tuple[Floats, Floats]:
        feeds = {
            EMBEDDED: np.ascontiguousarray(embedded),
            PATH_STATES: before,
            SLOT_TERMS: np.ascontiguousarray(self._terms[:, slot]),
            CANDIDATE_ROWS: np.ascontiguousarray(self._rows[:, slot]),
            BASE_SCORES: np.ascontiguousarray(self.scores[:, slot, 0]),
        }
        made = self._step.run(feeds)
        return np.array(made[NEXT_STATES]), np.array(made[PATH_SCORES])
