# SPDX-License-Identifier: Apache-2.0
"""The proposer of every method whose draft is a decoder, over its cache rows and what makes trees of its candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from speccompile.core.acceptance import Verdict
from speccompile.core.cache_rows import CacheRows
from speccompile.core.protocols import Batch, Outputs, Slot, StepTimes
from speccompile.core.tree import Ints, TokenTree
from speccompile.drafting.acceptance import AcceptanceEstimate
from speccompile.drafting.expansion import Scorer
from speccompile.drafting.state import DraftState


class Drafts(Protocol):
    """What grows or fills trees: `TreeGrower`, `StaticTrees`."""

    def new_estimate(self) -> AcceptanceEstimate | None:
        """Returns what is known of a new sequence; None where nothing is ever learnt."""
        ...

    def propose(self, batch: Batch) -> TokenTree:
        """Returns drafts for every slot."""
        ...

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        """See `speccompile.core.protocols.Proposer`."""
        ...

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict) -> list[int]:
        """Learns; returns by slot how many accepted drafts stand in their rows of the draft's cache."""
        ...


class DraftRows(Scorer, Protocol):
    """A scorer that owns what the draft's rows hold: `DraftCache`, `FeatureCache`, or one on another engine's caches.

    The calls are those of `speccompile.core.protocols.Proposer`.
    """

    catches_up: bool

    @property
    def caches(self) -> Sequence[CacheRows]:
        """The caches that it owns."""
        ...

    def start(self, slot: int) -> None:
        """Nothing is read of the new sequence."""
        ...

    def resume(self, slot: int, sequence: Slot, num_rows: int) -> int:
        """Returns how many of the first `num_rows` tokens need not be read again."""
        ...

    def prefill(self, slot: int, sequence: Slot, tokens: Ints, start: int, outputs: Outputs) -> None:
        """The target has read `tokens` [1, nodes], which stand at `start`."""
        ...

    def commit(self, batch: Batch, num_kept: Sequence[int], verdict: Verdict, outputs: Outputs) -> None:
        """What became of the drafts.

        Args:
            batch: with the tokens that were drafted after.
            num_kept: by slot, accepted drafts that stand in their rows.
            verdict: on the drafts.
            outputs: the target's, valid during the call.
        """
        ...

    def flush(self) -> None:
        """What the target gave in its last step will be void."""
        ...


class DraftProposer:
    """See `speccompile.core.protocols.Proposer`.

    Args:
        rows: the draft.
        likeliest: drafts of greedy batches.
        drawn: drafts of batches that sample; the same, or such as are drawn.
    """

    def __init__(self, rows: DraftRows, likeliest: Drafts, drawn: Drafts) -> None:
        self.rows, self.likeliest, self.drawn = rows, likeliest, drawn
        self.caches, self.catches_up, self._used = rows.caches, rows.catches_up, likeliest

    def start(self, slot: int, sequence: Slot) -> None:
        """Nothing is read, and nothing known of it."""
        self.rows.start(slot)
        sequence.draft_state = DraftState(self.likeliest.new_estimate())

    def resume(self, slot: int, sequence: Slot, num_rows: int) -> int:
        """The rows are known, the acceptance is not."""
        sequence.draft_state = DraftState(self.likeliest.new_estimate())
        return self.rows.resume(slot, sequence, num_rows)

    def prefill(self, slot: int, sequence: Slot, tokens: Ints, start: int, outputs: Outputs) -> None:
        """Reads the chunk as well."""
        self.rows.prefill(slot, sequence, tokens, start, outputs)

    def propose(self, batch: Batch) -> TokenTree:
        """Returns trees; a slot that cannot or should not draft has its root alone."""
        self._used = self.drawn if batch.may_draw else self.likeliest
        tree = self._used.propose(batch)
        self.rows.flush()  # the target is about to run, and where nothing was drafted nothing was read
        return tree

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        """Learns, and keeps the rows of accepted drafts where they are right."""
        num_kept = self._used.commit(batch, tree, verdict)
        self.rows.commit(batch, num_kept, verdict, outputs)

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        """Corrects the costs."""
        self.likeliest.observe(num_slots, num_nodes, times)

    def flush(self) -> None:
        """See `DraftRows.flush`."""
        self.rows.flush()
