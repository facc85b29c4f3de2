# SPDX-License-Identifier: Apache-2.0
"""Drafts a chain in one run of heads, from the target's hidden state behind the root."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from speccompile.core.acceptance import Verdict
from speccompile.core.protocols import Batch, Engine, Outputs, Slot
from speccompile.core.specs import CONFIDENCES, HIDDEN, SAMPLED_LAWS, SAMPLED_TOKENS, TOKENS, UNIFORMS
from speccompile.core.tree import Ints, TokenTree
from speccompile.drafting.cutoff import FIRST_RATE, Cutoff, SlotRecord
from speccompile.drafting.hidden import TargetStates
from speccompile.drafting.home_rate import HomeRate
from speccompile.drafting.state import DraftState


class HeadsChainProposer:
    """See `speccompile.core.protocols.Proposer`.

    Args:
        engine: the heads (`heads_spec`).
        cutoff: how many of their tokens to score.
        log_odds: of acceptance over confidence, for a fresh slot.
        may_sample: draw drafts from the heads' laws in slots that sample; otherwise drafts are greedy.
    """

    catches_up = False
    caches = ()

    def __init__(self, engine: Engine, cutoff: Cutoff, log_odds: float, may_sample: bool) -> None:
        self.engine, self.cutoff, self.may_sample, self._log_odds = engine, cutoff, may_sample, log_odds
        width = engine.spec.input(HIDDEN).dims[2]
        assert isinstance(width, int)
        self.num_built = engine.spec.num_drafts  # tokens that one run drafts
        self.states = TargetStates(width)
        self._home = HomeRate(FIRST_RATE)
        self._drafting: Sequence[int] = ()  # slots that drafted in the last step

    def start(self, slot: int, sequence: Slot) -> None:
        """Nothing is known of it."""
        self.states.settle()  # the target is about to read the prompt
        # Where drafts are drawn, what is drafted must not depend on other sequences.
        is_drawn = self.may_sample and not sequence.sampling.is_greedy
        sequence.draft_state = DraftState(SlotRecord(self._log_odds, None if is_drawn else self._home))

    def resume(self, slot: int, sequence: Slot, num_rows: int) -> int:
        """Heads have no rows; the state that they need is behind a token that is read in any case."""
        self.start(slot, sequence)
        return num_rows

    def prefill(self, slot: int, sequence: Slot, tokens: Ints, start: int, outputs: Outputs) -> None:
        """Keep the state behind the last token that was read: the root follows it."""
        if start + tokens.shape[1] == len(sequence.tokens) - 1:
            self.states.read(sequence, outputs[HIDDEN])

    def propose(self, batch: Batch) -> TokenTree:
        """Chains; a slot that cannot or should not draft is padded."""
        slots = batch.slots
        roots = np.array([slot.tokens[-1] for slot in slots], dtype=np.int64)
        is_drawn = self.may_sample and batch.may_draw
        able = self.states.known(slots, [p for p, slot in enumerate(slots) if slot.max_drafts > 0])
        records: list[SlotRecord] = [slot.draft_state.lessons for slot in slots]
        drafting = able if batch.is_planned else self._worth_drafting(able, records, is_drawn)
        self._drafting = drafting
        if not drafting:
            return TokenTree.roots(roots)
        feeds: dict[str, Any] = {**self.states.feeds(slots), TOKENS: roots[:, None]}
        if is_drawn:
            draws = [batch.draft_uniforms(depth) for depth in range(1, self.num_built + 1)]
            feeds |= {**batch.warp_feeds(), UNIFORMS: np.stack(draws, axis=1)}
        outputs = self.engine.run(feeds)
        probs = np.asarray(outputs[CONFIDENCES]).tolist()
        chains = [records[place].draft(probs[place]) for place in drafting]
        is_whole = is_drawn or batch.is_planned
        length = self.cutoff.max_drafts if is_whole else self.cutoff.length(chains, len(slots))
        if not is_drawn:
            length = min(length, max(slots[place].max_drafts for place in drafting))
        if length == 0:
            return TokenTree.roots(roots)
        # Laws go to the target as they stand, so a drawn chain is as wide as they are and padded behind its end.
        width = self.num_built if is_drawn else length
        tokens = np.concatenate((roots[:, None], np.asarray(outputs[SAMPLED_TOKENS])[:, :width]), axis=1)
        num_nodes = np.ones(len(slots), dtype=np.int64)
        for place in drafting:
            num_nodes[place] += min(length, slots[place].max_drafts)
        return TokenTree.chain(tokens, num_nodes, outputs[SAMPLED_LAWS] if is_drawn else None)

    def _worth_drafting(self, able: Sequence[int], records: Sequence[SlotRecord], is_drawn: bool) -> Sequence[int]:
        """Places that draft: each for itself where drafts are drawn, otherwise all of them or none."""
        rates = [records[place].rate for place in able]
        if is_drawn:
            return [place for place, rate in zip(able, rates, strict=True) if self.cutoff.pays([rate], 1)]
        return able if able and self.cutoff.pays(rates, len(records)) else ()

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        """Keep the states behind the paths' last nodes, and learn."""
        accepted = verdict.num_accepted
        last = accepted if tree.is_chain else verdict.path[np.arange(tree.batch), accepted]
        self.states.keep(batch.slots, outputs[HIDDEN], last)
        num_nodes, num_accepted = tree.num_nodes.tolist(), accepted.tolist()
        for place, slot in enumerate(batch.slots):
            slot.draft_state.lessons.learn(num_nodes[place] - 1, num_accepted[place], place in self._drafting)

    def settle(self) -> None:
        """Bring the states to the host."""
        self.states.settle()
