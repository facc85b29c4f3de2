# SPDX-License-Identifier: Apache-2.0
"""Drafts a whole chain in one run of a small model whose steps are unrolled in its graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speccompile.core.protocols import Batch, Engine, Slot
from speccompile.core.specs import (
    CONFIDENCES,
    LENGTHS,
    SAMPLED_LAWS,
    SAMPLED_TOKENS,
    SCORED_NODES,
    TOKENS,
    UNIFORMS,
    chain_rows,
)
from speccompile.core.tree import Floats, Ints, TokenTree
from speccompile.speculators.draft_model.policy import LengthPolicy, Round
from speccompile.speculators.draft_model.proposer import DraftModelProposer, chains


class UnrolledProposer(DraftModelProposer):
    """See `speccompile.core.protocols.Proposer`. All tokens of a chain are drafted; those known to be weak may go.

    Args:
        engine: the draft (`unrolled_spec`).
        policy: which drafts are worth scoring, and whether a slot drafts at all.
        max_seq_len: cache rows a sequence may use; the last drafts of a chain need some of them, so that a slot is
            decoded plainly a chain's length before its rows end.
        may_sample: see `DraftModelProposer`.
    """

    def __init__(self, engine: Engine, policy: LengthPolicy, max_seq_len: int, may_sample: bool) -> None:
        self.num_fed = chain_rows(engine.spec)  # drafts that the graph reads itself: all but the last
        super().__init__(engine, policy, max_seq_len - self.num_fed, may_sample)

    def _read(self, slot: int, tokens: Ints) -> None:
        """The graph drafts behind the chunk as well; what it writes there is void."""
        if len(tokens) > 0:
            start, last = np.array([self.lengths[slot]]), np.array([[len(tokens) - 1]])
            self.engine.run({TOKENS: tokens[None], LENGTHS: start, SCORED_NODES: last}, first_slot=slot)
            self.lengths[slot] += len(tokens)

    def propose(self, batch: Batch) -> TokenTree:
        """Chains of one length, shorter where a draft is known not to be worth its place or a slot has no room."""
        slots = batch.slots
        rows = [[slot.tokens[-1]] for slot in slots]
        is_sampled = self.may_sample and batch.may_draw
        drafting = self._begin(batch, is_sampled)
        if not drafting:
            return TokenTree.chain(np.array(rows, dtype=np.int64))
        members = [place for _, places in drafting for place in places]
        feeds = self._first_feeds(slots, members)
        if is_sampled:
            draws = [batch.draft_uniforms(depth) for depth in range(1, self.num_fed + 2)]
            feeds = {**feeds, **batch.warp_feeds(), UNIFORMS: np.stack(draws, axis=1)}
        outputs = self.engine.run(feeds)
        for place in members:
            self.lengths[place] += self.num_fed
        for group, places in drafting:
            self._keep(rows, slots, group, places, outputs[SAMPLED_TOKENS], outputs[CONFIDENCES])
        return chains(rows, outputs[SAMPLED_LAWS] if is_sampled else None)

    def _keep(
        self,
        rows: list[list[int]],
        slots: Sequence[Slot],
        group: Round,
        places: list[int],
        tokens: Ints,
        confidences: Floats,
    ) -> None:
        """Append what is to be scored."""
        for depth in range(min(self.num_fed + 1, self.policy.max_drafts)):
            places = [place for place in places if depth < slots[place].max_drafts]
            if places:
                places = group.keep(places, confidences[:, depth].tolist(), depth)
            for place in places:
                rows[place].append(int(tokens[place, depth]))
