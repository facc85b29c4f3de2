# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup as a method: no graph of its own."""

from __future__ import annotations

from collections.abc import Mapping

from speccompile.core.jobs import MethodContext
from speccompile.core.method import Method
from speccompile.core.protocols import Engine
from speccompile.speculators.ngram.config import Config as NgramConfig
from speccompile.speculators.ngram.proposer import NgramProposer


class NgramMethod(Method):
    """See `speccompile.core.method.Method`."""

    name = "ngram"
    Config = NgramConfig

    def make_proposer(
        self, config: NgramConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> NgramProposer:
        """The lookup; never more draft tokens than a step may score."""
        return NgramProposer(config, context)
