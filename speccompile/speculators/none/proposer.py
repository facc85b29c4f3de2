# SPDX-License-Identifier: Apache-2.0
"""The proposer whose trees are the root alone."""

from __future__ import annotations

from speccompile.core.acceptance import Verdict
from speccompile.core.protocols import Batch, Outputs, StepTimes, TokenSequence
from speccompile.core.tree import Ints, TokenTree


class NoneProposer:
    """A `speccompile.core.proposer.Proposer`."""

    catches_up = True
    caches = ()

    def start(self, slot: int, sequence: TokenSequence) -> None: ...

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        return num_rows

    def prefill(self, slot: int, sequence: TokenSequence, tokens: Ints, start: int, outputs: Outputs) -> None: ...

    def propose(self, batch: Batch) -> TokenTree:
        return TokenTree.roots([sequence.tokens[-1] for sequence in batch.sequences])

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None: ...

    def skip(self, batch: Batch, verdict: Verdict, outputs: Outputs) -> None: ...

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None: ...

    def flush(self) -> None: ...
