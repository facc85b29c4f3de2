# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup as a method: no graph of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speccompile.core.jobs import GraphJob, MethodContext
from speccompile.core.protocols import Engine
from speccompile.speculators.ngram.config import Config as NgramConfig
from speccompile.speculators.ngram.proposer import NgramProposer


class NgramMethod:
    """See `speccompile.core.protocols.Method`."""

    name = "ngram"
    Config = NgramConfig

    def target_outputs(self, config: NgramConfig) -> dict[str, Any]:
        """Nothing besides the verdicts."""
        return {}

    def graph_jobs(self, config: NgramConfig) -> tuple[GraphJob, ...]:
        """No further graph."""
        return ()

    def make_proposer(
        self, config: NgramConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> NgramProposer:
        """The lookup; never more draft tokens than a step may score."""
        return NgramProposer(config, context)
