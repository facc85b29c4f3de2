# SPDX-License-Identifier: Apache-2.0
"""Plain decoding as a method, so that the baseline shares every line of the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from speccompile.core.jobs import DraftBounds, MethodContext
from speccompile.core.protocols import Batch, Engine, Outputs, StepTimes, TokenSequence
from speccompile.core.registry import Method
from speccompile.core.tree import Ints, TokenTree, Verdict


@dataclass(frozen=True)
class NoneConfig:
    """Plain decoding has nothing to configure."""

    draft_bounds = DraftBounds()


class NoneMethod(Method):
    """The speculation method of a `NoneConfig`."""

    name = "none"
    Config = NoneConfig

    def make_proposer(self, config: NoneConfig, engines: Mapping[str, Engine], context: MethodContext) -> NoneProposer:
        return NoneProposer()


class NoneProposer:
    """A `speccompile.core.proposer.Proposer`."""

    catches_up = True
    may_draw = False
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
