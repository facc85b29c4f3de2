# SPDX-License-Identifier: Apache-2.0
"""Plain decoding as a method, so that the baseline shares every line of the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from speccompile.core.jobs import DraftBounds, MethodContext
from speccompile.core.proposer import Proposer
from speccompile.core.protocols import Batch, Engine, TokenSequence
from speccompile.core.registry import Method
from speccompile.core.tree import TokenTree


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


class NoneProposer(Proposer):
    """Returns the root alone."""

    catches_up = True
    may_draw = False
    caches = ()

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        return num_rows

    def propose(self, batch: Batch) -> TokenTree:
        return TokenTree.roots([sequence.tokens[-1] for sequence in batch.sequences])
