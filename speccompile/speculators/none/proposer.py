# SPDX-License-Identifier: Apache-2.0
"""The proposer whose trees are the root alone."""

from __future__ import annotations

from speccompile.core.acceptance import Verdict
from speccompile.core.protocols import Batch, Outputs, StepTimes, TokenSequence
from speccompile.core.tree import Ints, TokenTree


class NoneProposer:
    """See `speccompile.core.protocols.Proposer`."""

    catches_up = True
    caches = ()

    def start(self, slot: int, sequence: TokenSequence) -> None:
        """Nothing to prepare."""

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        """Returns `num_rows`: nothing is read."""
        return num_rows

    def prefill(self, slot: int, sequence: TokenSequence, tokens: Ints, start: int, outputs: Outputs) -> None:
        """Nothing to read."""

    def propose(self, batch: Batch) -> TokenTree:
        """Returns trees of the roots alone."""
        return TokenTree.roots([sequence.tokens[-1] for sequence in batch.sequences])

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        """Nothing to keep."""

    def skip(self, batch: Batch, verdict: Verdict, outputs: Outputs) -> None:
        """Nothing is kept."""

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        """Learns nothing."""

    def flush(self) -> None:
        """Nothing: none of the target's outputs is held."""
