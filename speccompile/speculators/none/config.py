# SPDX-License-Identifier: Apache-2.0
"""Plain decoding as a method, so that the baseline shares every line of the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from speccompile.core.jobs import DraftBounds, MethodContext
from speccompile.core.method import Method
from speccompile.core.protocols import Engine
from speccompile.speculators.none.proposer import NoneProposer


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
