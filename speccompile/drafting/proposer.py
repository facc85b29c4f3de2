# SPDX-License-Identifier: Apache-2.0
"""The proposer of every method whose draft is a decoder, over a scorer and the trees of its candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from speccompile.core.acceptance import Verdict
from speccompile.core.proposer import CacheRows
from speccompile.core.protocols import Batch, Outputs, StepTimes, TokenSequence
from speccompile.core.tree import Ints, TokenTree
from speccompile.drafting.acceptance import AcceptanceEstimate
from speccompile.drafting.budget import Outlook, Weighs
from speccompile.drafting.expansion import Scorer
from speccompile.drafting.state import DraftState


class Drafts(Protocol):
    """Makes draft trees of a scorer's candidates: `TreeGrower`, `StaticTrees`."""

    def new_estimate(self) -> AcceptanceEstimate | None:
        """Returns the estimate of a new sequence; None where nothing is estimated."""
        ...

    def propose(self, batch: Batch) -> TokenTree: ...

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        """See `speccompile.core.proposer.Proposer`."""
        ...

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict) -> list[int]:
        """Updates the estimates; returns by slot how many accepted drafts have their rows in the draft's cache."""
        ...


class DraftRows(Scorer, Protocol):
    """A scorer that keeps the draft's cache rows: `DraftCache`, `FeatureCache`, or one on another engine's caches.

    The methods are called as those of `speccompile.core.proposer.Proposer`.
    """

    catches_up: bool

    @property
    def caches(self) -> Sequence[CacheRows]: ...

    def start(self, slot: int) -> None: ...

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        """Returns how many of the first `num_rows` tokens need not be read again."""
        ...

    def prefill(self, slot: int, sequence: TokenSequence, tokens: Ints, start: int, outputs: Outputs) -> None:
        """Handles a chunk that the target has read: `tokens` [1, nodes], from position `start` on."""
        ...

    def commit(self, batch: Batch, num_kept: Sequence[int], verdict: Verdict, outputs: Outputs) -> None:
        """Handles the verdict.

        Args:
            batch: with the tokens before this step's verdict.
            num_kept: by slot, accepted drafts whose rows are in the draft's cache.
        """
        ...

    def skip(self, batch: Batch, verdict: Verdict, outputs: Outputs) -> None:
        """Handles a step without drafts, for which neither `begin` nor `commit` was called."""
        ...

    def flush(self) -> None:
        """Copies what is still needed of the target's last outputs: they become invalid."""
        ...


@runtime_checkable
class LooksUp(Protocol):
    """A proposer that can find drafts in the text alone, without a graph."""

    looks_up: bool


def looks_up(proposer: object) -> bool:
    """Returns whether a proposer can find drafts in the text alone."""
    return isinstance(proposer, LooksUp) and proposer.looks_up


class DraftProposer:
    """See `speccompile.core.proposer.Proposer`.

    Args:
        likeliest: makes the trees of batches whose drafts are not drawn.
        drawn: makes the trees of batches whose drafts may be drawn; may be the same object.
    """

    def __init__(self, rows: DraftRows, likeliest: Drafts, drawn: Drafts) -> None:
        self.rows, self.likeliest, self.drawn = rows, likeliest, drawn
        self.caches, self.catches_up, self._used = rows.caches, rows.catches_up, likeliest

    def start(self, slot: int, sequence: TokenSequence) -> None:
        self.rows.start(slot)
        sequence.draft_state = DraftState(self.likeliest.new_estimate())

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        """Returns how many rows need not be read again; the estimate is new."""
        sequence.draft_state = DraftState(self.likeliest.new_estimate())
        return self.rows.resume(slot, sequence, num_rows)

    def prefill(self, slot: int, sequence: TokenSequence, tokens: Ints, start: int, outputs: Outputs) -> None:
        self.rows.prefill(slot, sequence, tokens, start, outputs)

    def propose(self, batch: Batch) -> TokenTree:
        """Returns trees; a sequence that cannot or should not draft has its root alone."""
        self._used = self.drawn if batch.may_draw else self.likeliest
        tree = self._used.propose(batch)
        self.rows.flush()  # the target is about to run; without a draft, its last outputs were not read
        return tree

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        num_kept = self._used.commit(batch, tree, verdict)
        self.rows.commit(batch, num_kept, verdict, outputs)

    def skip(self, batch: Batch, verdict: Verdict, outputs: Outputs) -> None:
        self.rows.skip(batch, verdict, outputs)

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        self.likeliest.observe(num_slots, num_nodes, times)

    def flush(self) -> None:
        self.rows.flush()

    @property
    def outlook(self) -> Outlook | None:
        return self.likeliest.outlook if isinstance(self.likeliest, Weighs) else None
