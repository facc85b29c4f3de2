# SPDX-License-Identifier: Apache-2.0
"""Drafts one token after the other with a small model that keeps a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.acceptance import Verdict
from speccompile.core.cache_rows import CacheRows
from speccompile.core.protocols import Batch, Engine, Outputs, Slot, StepTimes
from speccompile.core.specs import (
    CONFIDENCE,
    LENGTHS,
    SAMPLED_PROBS,
    SAMPLED_TOKEN,
    SCORED_NODES,
    TOKENS,
    UNIFORMS,
)
from speccompile.core.tree import Floats, Ints, TokenTree
from speccompile.speculators.draft_model.policy import LengthPolicy, Plan, Round

CHUNK = 128  # most tokens read at once when the draft is far behind
CATCH_UP = 4  # a draft at most this far behind catches up in its first draft step


class DraftModelProposer:
    """See `speccompile.core.protocols.Proposer`.

    Args:
        engine: the draft (`sampled_spec`).
        policy: how far to draft.
        max_seq_len: cache rows a sequence may use, at least `CATCH_UP`; a slot that is out of rows is decoded
            plainly.
        may_sample: draw drafts from the draft's law in slots that sample; otherwise drafts are greedy.
    """

    catches_up = True

    def __init__(self, engine: Engine, policy: LengthPolicy, max_seq_len: int, may_sample: bool) -> None:
        self.engine, self.policy, self.max_seq_len, self.may_sample = engine, policy, max_seq_len, may_sample
        self._unbound = policy.unbound()
        self.lengths = [0] * engine.max_slots  # rows that hold the slot's own tokens
        self.caches = (CacheRows(engine, self.lengths),)
        self._laws: dict[int, Floats] = {}  # by batch: [batch, 1 + max_drafts, vocab]
        self._feeds: dict[int, tuple[Ints, Ints]] = {}  # by batch: tokens [batch, 1], lengths [batch]

    def start(self, slot: int, sequence: Slot) -> None:
        """An empty cache."""
        self.lengths[slot] = 0
        sequence.draft_state = Plan(self.policy)

    def resume(self, slot: int, sequence: Slot, num_rows: int) -> int:
        """What the cache lacks of the rows is read once it is to draft."""
        sequence.draft_state = Plan(self.policy)
        self.lengths[slot] = min(self.lengths[slot], num_rows)
        return num_rows

    def prefill(self, slot: int, sequence: Slot, tokens: Ints, start: int, outputs: Outputs) -> None:
        """Read the chunk as well, while there is room."""
        if start == self.lengths[slot]:
            self._read(slot, tokens[0, : self.max_seq_len - start])

    def _read(self, slot: int, tokens: Ints) -> None:
        if len(tokens) > 0:
            start = np.array([self.lengths[slot]], dtype=np.int64)
            self.engine.run({TOKENS: tokens[None], LENGTHS: start}, first_slot=slot)
            self.lengths[slot] += len(tokens)

    def propose(self, batch: Batch) -> TokenTree:
        """Chains, as far as the policy goes; a slot that has stopped is padded."""
        slots = batch.slots
        rows = [[slot.tokens[-1]] for slot in slots]
        is_sampled = self.may_sample and batch.may_draw
        drafting = self._begin(batch, is_sampled)
        if not drafting:
            return TokenTree.chain(np.array(rows, dtype=np.int64))
        warp = batch.warp_feeds() if is_sampled else {}
        laws = self._law_buffer(len(slots)) if is_sampled else None
        feeds = self._first_feeds(slots, [place for _, places in drafting for place in places])
        depth = 1
        while True:
            if is_sampled:
                feeds = {**feeds, **warp, UNIFORMS: batch.draft_uniforms(depth)}
            outputs = self.engine.run(feeds)
            if laws is not None:
                laws[:, depth] = outputs[SAMPLED_PROBS]
            drafting = self._extend(rows, slots, drafting, outputs)
            if not drafting:
                return chains(rows, laws)
            feeds = self._next_feeds(rows, [place for _, places in drafting for place in places])
            depth += 1

    def _begin(self, batch: Batch, is_sampled: bool) -> list[tuple[Round, list[int]]]:
        """Who decides with whom, and which of them draft at all; these are at most `CATCH_UP` tokens behind."""
        slots, policy = batch.slots, self._unbound if batch.is_planned else self.policy
        plans: list[Plan] = [slot.draft_state for slot in slots]
        for plan in plans:
            plan.begin()
        able = [p for p, slot in enumerate(slots) if slot.max_drafts > 0 and len(slot.tokens) <= self.max_seq_len]
        if is_sampled:
            rounds = [Round(policy, plans, (p,), slots[p].sampling.is_greedy) for p in able]
        else:
            rounds = [Round(policy, plans, range(len(slots)), may_drop=True)]
        drafting = []
        for group in rounds:
            going = group.going(able if len(rounds) == 1 else [p for p in able if p in group.members], 0)
            if going:
                drafting.append((group, going))
            for place in going:
                self._catch_up(place, slots[place].tokens)
        return drafting

    def _catch_up(self, place: int, tokens: list[int]) -> None:
        num = len(tokens)
        self.lengths[place] = min(self.lengths[place], num - 1)  # the root is read again, however the last step ended
        while num - (start := self.lengths[place]) > CATCH_UP:
            self._read(place, np.array(tokens[start : min(start + CHUNK, num - 1)], dtype=np.int64))

    def _first_feeds(self, slots: Sequence[Slot], drafting: list[int]) -> dict[str, NDArray[Any]]:
        """The tokens that drafting slots have not read yet, the root last.

        All read as many as the one that is furthest behind: to read a token again costs what padding would.
        """
        width = max(len(slots[place].tokens) - self.lengths[place] for place in drafting)
        tokens = np.zeros((len(slots), width), dtype=np.int64)
        scored = np.zeros((len(slots), 1), dtype=np.int64)
        lengths = np.array(self._idle_lengths(len(slots), width), dtype=np.int64)
        for place in drafting:
            known = slots[place].tokens
            start = max(len(known) - width, 0)
            read = known[start:]
            tokens[place, : len(read)] = read
            scored[place, 0] = len(read) - 1
            lengths[place], self.lengths[place] = start, len(known)
        feeds: dict[str, NDArray[Any]] = {TOKENS: tokens, LENGTHS: lengths}
        if width > 1:
            feeds[SCORED_NODES] = scored
        return feeds

    def _next_feeds(self, rows: list[list[int]], drafting: list[int]) -> dict[str, NDArray[Any]]:
        """The last draft token of each slot."""
        batch = len(rows)
        if batch not in self._feeds:
            self._feeds[batch] = (np.zeros((batch, 1), dtype=np.int64), np.zeros(batch, dtype=np.int64))
        tokens, lengths = self._feeds[batch]
        lengths[:] = self._idle_lengths(batch, 1)
        for place in drafting:
            tokens[place, 0] = rows[place][-1]
            self.lengths[place] += 1
        return {TOKENS: tokens, LENGTHS: lengths}

    def _idle_lengths(self, batch: int, width: int) -> list[int]:
        """Where the step writes; a slot that is full gives up its last rows, as padding must go somewhere.

        It could not draft more than they hold, and would read them again.
        """
        lengths, last = self.lengths, self.max_seq_len - width
        for place in range(batch):
            if lengths[place] > last:
                lengths[place] = last
        return lengths[:batch]

    def _extend(
        self,
        rows: list[list[int]],
        slots: Sequence[Slot],
        drafting: list[tuple[Round, list[int]]],
        outputs: Outputs,
    ) -> list[tuple[Round, list[int]]]:
        """Append the sampled tokens; returns who goes on."""
        tokens, confidences = outputs[SAMPLED_TOKEN].tolist(), outputs[CONFIDENCE].tolist()
        still = []
        for group, places in drafting:
            num = len(rows[places[0]])  # draft tokens, with the one to come
            with_room = []
            for place in group.keep(places, confidences, num - 1):
                rows[place].append(tokens[place])
                if num < slots[place].max_drafts and self.lengths[place] < self.max_seq_len:
                    with_room.append(place)
            going = group.going(with_room, num) if with_room else []
            if going:
                still.append((group, going))
        return still

    def _law_buffer(self, batch: int) -> Floats:
        if batch not in self._laws:
            shape = (batch, 1 + self.policy.max_drafts, self.engine.spec.vocab_size)
            self._laws[batch] = np.zeros(shape, dtype=np.float32)
        return self._laws[batch]

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        """Forget the rows of refused drafts: what is left is at most the path that was kept."""
        num_drafts, num_accepted = tree.num_nodes.tolist(), verdict.num_accepted.tolist()
        for place, slot in enumerate(batch.slots):
            kept = len(slot.tokens) + num_accepted[place]
            if self.lengths[place] > kept:
                self.lengths[place] = kept
            slot.draft_state.learn(num_drafts[place] - 1, num_accepted[place])

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        """Learns nothing."""

    def settle(self) -> None:
        """Nothing of the target's is held."""


def chains(rows: list[list[int]], laws: Floats | None) -> TokenTree:
    """The tokens of each slot as ragged chains; `laws` [batch, nodes or more, vocab] as `TokenTree.draft_probs`."""
    if len(rows) == 1:
        tokens, num_nodes = np.array(rows, dtype=np.int64), None
    else:
        num_nodes = np.array([len(row) for row in rows], dtype=np.int64)
        tokens = np.zeros((len(rows), int(num_nodes.max())), dtype=np.int64)
        for place, row in enumerate(rows):
            tokens[place, : len(row)] = row
    return TokenTree.chain(tokens, num_nodes, None if laws is None else laws[:, : tokens.shape[1]])
