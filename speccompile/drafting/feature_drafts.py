# SPDX-License-Identifier: Apache-2.0
"""Scorer over a draft that reads features of the target: those that it has not read yet, and its cache rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.jobs import PREFILL_CHUNK
from speccompile.core.protocols import Batch, Engine, Outputs, TokenSequence
from speccompile.core.specs import FEATURE_NODES, FEATURES, NEXT_FEATURES, SCORED_NODES, TOKENS, TREE_MASK
from speccompile.core.tree import Floats, Ints, Verdict
from speccompile.drafting.acceptance import DraftState
from speccompile.drafting.sliding_rows import draft_rows, rows_of_step
from speccompile.drafting.tree import Expansion, padding_mask
from speccompile.graph_kinds.features import NO_FEATURE

MAX_STATES = 128  # rows per sequence that are kept as states before features are made of them


class PendingFeatures:
    """Feature rows, by sequence, of the positions that the target has read and the draft has not.

    The target's outputs stay on their device until the next draft. Where they would be lost before (a prompt is read,
    the batch changes, nothing is drafted), the rows in use are copied to each sequence's `draft_state.states`, of which
    features are made before the next draft, or of `MAX_STATES` rows at once.

    Args:
        make: makes features [batch, nodes, width] of the target's outputs, valid as long as these are.
        names: of the target's outputs that `make` reads, [batch, nodes, ..] each.
    """

    def __init__(self, width: int, make: Callable[[Outputs], Any], names: Sequence[str]) -> None:
        self._none: Floats = np.zeros((0, width), dtype=np.float32)
        self._make, self._width, self._names = make, width, tuple(names)
        self._live: Outputs | None = None  # of the target's last step
        self._path: Ints = np.zeros((0, 1), dtype=np.int64)
        self._sequences: list[TokenSequence] = []  # of that step

    def add(self, sequence: TokenSequence, outputs: Outputs, slot: int, nodes: Ints) -> None:
        """Copies the target's states of the positions after those that the sequence has, of `nodes` [num] int64."""
        state: DraftState = sequence.draft_state
        if not len(nodes):
            return
        if state.num_states + len(nodes) > MAX_STATES:  # a graph of TensorRT takes no more at once
            self._make_features(state)
        state.states.append(tuple(np.asarray(outputs[name])[slot, nodes] for name in self._names))
        state.num_states += len(nodes)
        if state.num_states >= MAX_STATES:
            self._make_features(state)

    def _make_features(self, state: DraftState) -> None:
        if not state.states:
            return
        columns = zip(*state.states, strict=True)
        outputs = {name: np.concatenate(parts)[None] for name, parts in zip(self._names, columns, strict=True)}
        state.features.append(np.array(np.asarray(self._make(outputs))[0], dtype=np.float32))
        state.states, state.num_states = [], 0

    def keep(self, sequences: Sequence[TokenSequence], verdict: Verdict, outputs: Outputs) -> None:
        """Adds the features of the accepted paths of a step, the roots included; none of sequences without a draft."""
        self._live, self._sequences, self._path = outputs, list(sequences), np.maximum(verdict.path, 0)
        for sequence, num in zip(sequences, verdict.num_accepted.tolist(), strict=True):
            sequence.draft_state.num_live = 1 + num if sequence.has_draft else 0

    def count(self, sequence: TokenSequence) -> int:
        state: DraftState = sequence.draft_state
        return sum(map(len, state.features)) + state.num_states + state.num_live

    def _take_all(self, sequence: TokenSequence) -> Floats:
        state: DraftState = sequence.draft_state
        self._make_features(state)
        parts, state.features = state.features, []
        return np.concatenate((self._none, *parts)) if len(parts) != 1 else parts[0]

    def take(self, sequences: Sequence[TokenSequence], width: int) -> tuple[Any, Ints]:
        """Takes all rows of a batch, at most `width` each, out of the pending ones.

        Returns:
            Features [batch, states, width of a feature], and the row of each position in them [batch, width] int64.
        """
        batch = len(sequences)
        is_live = self._live is not None and len(sequences) == len(self._sequences)
        for sequence, scored in zip(sequences, self._sequences, strict=False):
            state: DraftState = sequence.draft_state
            is_live = is_live and sequence is scored and not (state.features or state.states)
        if is_live and self._live is not None:
            live = self._make(self._live)
            self._release()
            return live, np.ascontiguousarray(self._path[:, :width])
        self.flush()
        held = np.zeros((batch, width, self._width), dtype=np.float32)
        for slot, sequence in enumerate(sequences):
            rows = self._take_all(sequence)
            held[slot, : len(rows)] = rows
        return held, np.ascontiguousarray(np.broadcast_to(np.arange(width), (batch, width)))

    def take_rows(self, sequence: TokenSequence, num: int) -> Floats:
        """Returns the first `num` rows [num, width] of a sequence; they are no longer pending."""
        self.flush()
        rows = self._take_all(sequence)
        if num < len(rows):
            sequence.draft_state.features = [rows[num:]]
        return rows[:num]

    def _release(self) -> None:
        for sequence in self._sequences:
            sequence.draft_state.num_live = 0
        self._live, self._sequences = None, []

    def flush(self) -> None:
        """Copies the rows in use from the target's outputs to the host: the target is about to run."""
        if self._live is None:
            return
        for slot, sequence in enumerate(self._sequences):
            self.add(sequence, self._live, slot, self._path[slot, : sequence.draft_state.num_live])
        self._release()


def fused_features(fusion: Engine) -> tuple[Callable[[Outputs], Any], list[str]]:
    """Returns what makes features of the target's outputs, and the names of those that it reads."""
    names = [t.name for t in fusion.spec.inputs]

    def fuse(outputs: Outputs) -> Any:
        return fusion.run({name: outputs[name] for name in names})[FEATURES]

    return fuse, names


class FeatureCache:
    """A `Scorer` whose draft reads the target's features of the prompt and of accepted paths.

    Each draft node after the root reads the draft's own feature of its parent, fed from run to run without a copy.

    Args:
        make: makes features [batch, nodes, hidden] of the target's outputs.
        names: of the target's outputs that `make` reads.
        max_nodes: most nodes that a step with every slot may have.
    """

    catches_up = False

    def __init__(
        self, engine: Engine, make: Callable[[Outputs], Any], names: Sequence[str], max_seq_len: int, max_nodes: int
    ) -> None:
        self.engine, self.max_seq_len, self.max_nodes, self._make = engine, max_seq_len, max_nodes, make
        width = engine.spec.input(FEATURES).dims[2]
        assert isinstance(width, int)
        self.pending = PendingFeatures(width, make, names)
        self.lengths = [0] * engine.max_slots  # rows with the target's features
        self.rows = draft_rows(engine, self.lengths, max_seq_len + max_nodes + engine.spec.rows_written_ahead)
        self.caches = (self.rows,)
        self._next: Any = None  # features of the last run, [batch, nodes, hidden]
        self._roots: list[int] = []  # by slot, row of the root's own feature in `_next`
        self._feature_rows: list[dict[int, int]] = []  # by slot, row of each node's feature in `_next`

    def start(self, slot: int) -> None:
        self.pending.flush()  # the target is about to read the prompt
        self.rows.cut(slot, 0)

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        """Keeps all rows but the last: a row also depends on the token after its feature, which may differ."""
        self.pending.flush()
        self.rows.cut(slot, num_rows - 1)
        return self.lengths[slot]

    def prefill(self, slot: int, sequence: TokenSequence, tokens: Ints, start: int, outputs: Outputs) -> None:
        """Reads the chunk [1, nodes] except the prompt's last row, which stays pending for the first draft."""
        prompt, num = sequence.tokens, tokens.shape[1]
        features = self._make(outputs)
        is_last = start + num == len(prompt) - 1
        self._read(slot, prompt[start + 1 : start + num + 1 - is_last], features)
        if is_last:
            self.pending.add(sequence, outputs, 0, np.array([num - 1], dtype=np.int64))

    def _read(self, slot: int, tokens: Sequence[int], features: Any) -> None:
        for first in range(0, len(tokens), self.rows.most_rows):
            part = tokens[first : first + self.rows.most_rows]
            self.rows.make_room(slot, len(part))
            feeds = {
                TOKENS: np.array([part], dtype=np.int64),
                **self.rows.feeds([self.lengths[slot]], slot),
                FEATURES: features,
                FEATURE_NODES: np.arange(first, first + len(part), dtype=np.int64)[None],
                SCORED_NODES: np.zeros((1, 1), dtype=np.int64),  # not used; the LM head is computed for one row
            }
            self.engine.run(feeds, first_slot=slot)
            self.lengths[slot] += len(part)

    def room(self, slot: int, sequence: TokenSequence) -> int:
        """Returns the rows left after the root's; -1 without a pending feature, as after a prompt of one token."""
        return self.max_seq_len - len(sequence.tokens) if self.pending.count(sequence) else -1

    def begin(self, batch: Batch, slots: Sequence[int], warp: Mapping[str, NDArray[Any]]) -> Outputs:
        """Reads the pending features of all slots of the batch, as `take` releases those of all of them."""
        return self._read_new(batch.sequences, warp)

    def _read_new(
        self, sequences: Sequence[TokenSequence], warp: Mapping[str, NDArray[Any]], masks: Sequence[int] = ()
    ) -> Outputs:
        """Reads the pending features of all slots, and after them masks, which have none; scores roots and masks."""
        num_masks, most = len(masks), min(max(map(self.pending.count, sequences)), self.max_nodes)
        # Masks do not fit after all pending rows where a slot is nearly full: those are read first, but for the roots.
        is_full = max(self.lengths[: len(sequences)]) + most + num_masks > self.max_seq_len + self.max_nodes
        for slot, sequence in enumerate(sequences):
            while (num := self.pending.count(sequence)) > (1 if is_full else self.max_nodes):
                self._catch_up(slot, sequence, min(num - 1, PREFILL_CHUNK))
        counts = [self.pending.count(sequence) for sequence in sequences]
        width = max(counts) + num_masks
        features, held = self.pending.take(sequences, max(counts))
        rows: Ints = np.pad(held, ((0, 0), (0, num_masks))) if num_masks else held
        tokens: Ints = np.zeros((len(sequences), width), dtype=np.int64)
        for slot in range(len(sequences)):
            self.rows.make_room(slot, rows_of_step(self.max_nodes))
        lengths = self.lengths[: len(sequences)]
        starts = self.rows.feeds(lengths)
        for slot, (sequence, num) in enumerate(zip(sequences, counts, strict=True)):
            start = self.lengths[slot] + 1
            tokens[slot, : num + num_masks] = [*sequence.tokens[start : start + num], *masks]
            if num_masks:
                rows[slot, num : num + num_masks] = NO_FEATURE
            self.lengths[slot] += num
        feeds: dict[str, Any] = {TOKENS: tokens, **starts, FEATURES: features, FEATURE_NODES: rows, **warp}
        if width > 1:
            roots = np.array([[max(num - 1, 0)] for num in counts], dtype=np.int64)
            feeds[SCORED_NODES] = roots + np.arange(1 + num_masks)
        if max(lengths) + width > self.max_seq_len:
            ends = np.array(lengths, dtype=np.int64)
            feeds[TREE_MASK] = padding_mask(ends, [num + num_masks for num in counts], width, self.max_seq_len)
        self._roots, self._feature_rows = counts, [{}] * len(sequences)
        return self._run(feeds)

    def _catch_up(self, slot: int, sequence: TokenSequence, num: int) -> None:
        start = self.lengths[slot] + 1
        self._read(slot, sequence.tokens[start : start + num], self.pending.take_rows(sequence, num)[None])

    def expand(self, batch: Batch, level: Expansion) -> Outputs:
        """Reads an expansion after the roots."""
        width = level.tokens.shape[1]
        rows: Ints = np.zeros(level.tokens.shape, dtype=np.int64)
        starts, feature_rows = [], []
        for slot, (nodes, parents) in enumerate(zip(level.nodes, level.parents, strict=True)):
            known, root, made = self._feature_rows[slot], self._roots[slot], dict[int, int]()
            for column, (node, parent) in enumerate(zip(nodes, parents, strict=True)):
                rows[slot, column] = known.get(parent, root)
                made[node] = 1 + column
            feature_rows.append(made)
            starts.append(self.lengths[slot] + (level.num_in_place[slot] if nodes else 0))
        feeds: dict[str, Any] = {
            TOKENS: level.tokens,
            **self.rows.feeds(starts),
            FEATURES: self._next,
            FEATURE_NODES: rows,
            **level.warp,
        }
        if width > 1:
            feeds |= {TREE_MASK: level.mask_without_idle(), SCORED_NODES: level.scored_nodes}
        # Row 0 is the first column's input: its parent's own feature, which other children of that parent read as well.
        self._roots, self._feature_rows = [0] * len(feature_rows), feature_rows
        return self._run(feeds)

    def _run(self, feeds: Mapping[str, Any]) -> Outputs:
        outputs = self.engine.run(feeds)
        self._next = outputs[NEXT_FEATURES]
        return outputs

    def commit(self, batch: Batch, num_kept: Sequence[int], verdict: Verdict, outputs: Outputs) -> None:
        """Keeps the features of the accepted paths: rows of drafts are always read again, with these."""
        self.pending.keep(batch.sequences, verdict, outputs)

    def skip(self, batch: Batch, verdict: Verdict, outputs: Outputs) -> None:
        """Copies the states of the scored roots to the host: the draft reads them before the next draft."""
        self.pending.keep(batch.sequences, verdict, outputs)
        self.pending.flush()

    def flush(self) -> None:
        self.pending.flush()
