# SPDX-License-Identifier: Apache-2.0
"""Scorer over a draft that gives a whole block in one run: it reads accepted positions' features, and keeps no more.

Its candidates are a lattice: what follows a path, at any temperature, without a run of the draft. A walk draws each
token from the softmax of the scores after the token before, over the candidates of its slot: the distribution by which
drawn drafts are verified. The most probable walks and trees are deterministic drafts. Where slots depend on the whole
path before them, a small second graph walks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.jobs import PREFILL_CHUNK
from speccompile.core.protocols import Batch, Engine, Outputs, TokenSequence
from speccompile.core.sampling import warp
from speccompile.core.specs import (
    CANDIDATE_PROBS,
    CANDIDATES,
    FEATURE_NODES,
    FEATURES,
    LENGTHS,
    NODE_PROBS,
    START_NODES,
    TEMPERATURE,
    TOKENS,
    TOP_K,
    TOP_P,
)
from speccompile.core.tree import Floats, Ints
from speccompile.drafting.feature_drafts import FeatureCache
from speccompile.drafting.sliding_rows import GrowingRows
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
