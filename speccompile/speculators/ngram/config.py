# SPDX-License-Identifier: Apache-2.0
"""Drafting by prompt lookup: recipe fields, and what the build and the runtime ask. It has no graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from speccompile.common.parameters import check_parameters, parameter
from speccompile.core import registry
from speccompile.core.jobs import DraftBounds, MethodContext
from speccompile.core.proposer import Proposer
from speccompile.core.protocols import Engine
from speccompile.core.registry import Method

PROPOSER = "speccompile.speculators.ngram.proposer:NgramProposer"


@dataclass(frozen=True)
class NgramConfig:
    """Prompt lookup.

    Args:
        min_match: least number of tokens that must match.
        max_match: longest match that is looked for; longer matches are tried first.
        tokens_per_match: draft length per matched token: a longer match gives a longer draft. `auto`: by the acceptance
            after matches of that length in this sequence, and the measured costs.
    """

    num_draft_tokens: int = parameter(15, ge=1, le=64)
    min_match: int = parameter(1, ge=1, le=16)
    max_match: int = parameter(10, ge=1, le=32)
    tokens_per_match: int | Literal["auto"] = parameter("auto", ge=1, le=64, words=("auto",))

    def __post_init__(self) -> None:
        check_parameters(self, "speculator", max_match=(self.min_match, 32))

    @property
    def draft_bounds(self) -> DraftBounds:
        return DraftBounds(self.num_draft_tokens, is_open=self.tokens_per_match == "auto")


class NgramMethod(Method):
    """The speculation method of a `NgramConfig`."""

    name = "ngram"
    Config = NgramConfig
    vllm_names = ("ngram_gpu",)
    vllm_keys = MappingProxyType({"prompt_lookup_min": "min_match", "prompt_lookup_max": "max_match"})

    def host_ms(self, config: NgramConfig) -> float:
        return 0.06

    def make_proposer(self, config: NgramConfig, engines: Mapping[str, Engine], context: MethodContext) -> Proposer:
        proposer: Proposer = registry.find_class(PROPOSER)(config, context)
        return proposer
