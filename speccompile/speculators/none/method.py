# SPDX-License-Identifier: Apache-2.0
"""Plain decoding as a method, so that the baseline shares every line of the loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speccompile.core.jobs import GraphJob, MethodContext
from speccompile.core.protocols import Engine
from speccompile.speculators.none.config import Config as NoneConfig
from speccompile.speculators.none.proposer import NoneProposer


class NoneMethod:
    """See `speccompile.core.protocols.Method`."""

    name = "none"
    Config = NoneConfig

    def target_outputs(self, config: NoneConfig) -> dict[str, Any]:
        """Nothing besides the verdicts."""
        return {}

    def graph_jobs(self, config: NoneConfig) -> tuple[GraphJob, ...]:
        """No further graph."""
        return ()

    def make_proposer(self, config: NoneConfig, engines: Mapping[str, Engine], context: MethodContext) -> NoneProposer:
        """The proposer of roots."""
        return NoneProposer()
