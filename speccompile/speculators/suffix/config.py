# SPDX-License-Identifier: Apache-2.0
"""Drafting by a suffix tree: recipe fields, and what the build and the runtime ask. It has no graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from speccompile.common.parameters import check_parameters, parameter
from speccompile.core import registry
from speccompile.core.jobs import DraftBounds, MethodContext
from speccompile.core.proposer import Proposer
from speccompile.core.protocols import Engine
from speccompile.core.registry import Method

PROPOSER = "speccompile.speculators.suffix.proposer:SuffixProposer"


@dataclass(frozen=True)
class SuffixConfig:
    """A suffix tree of each sequence.

    Args:
        depth: most tokens of a run that is counted, the match and its drafts together.
        min_match: least number of tokens that must have occurred before.
        min_prob: drafts end where the share of the path among all that followed falls below this.
        tokens_per_match: drafts on a path for each matched token: a longer match gives a longer draft. `auto`: as many
            as the measured costs and the acceptance after matches of that length allow.
        tree: `chain`: the most frequent continuation; `auto`: the most frequent ones as a tree.
        max_bytes: memory of a sequence's tree; the runs that begin at the oldest tokens are forgotten first.
        shared_bytes: memory of one more tree that counts the outputs of all requests; 0: there is none. It shows one
            request's text to the others, by the times and the drafts that they see.
    """

    num_draft_tokens: int = parameter(15, ge=1, le=64)
    depth: int = parameter(24, ge=2, le=64)
    min_match: int = parameter(1, ge=1, le=63)
    min_prob: float = parameter(0.1, ge=0.01, le=1)
    tokens_per_match: float | Literal["auto"] = parameter("auto", ge=0.1, le=64, words=("auto",))
    tree: Literal["chain", "auto"] = parameter("chain", words=("chain", "auto"))
    max_bytes: int = parameter(8_000_000, ge=1_000_000, le=2**40)
    shared_bytes: int = parameter(0, ge=0, le=2**40)

    def __post_init__(self) -> None:
        shared_bytes = (1_000_000 if self.shared_bytes else 0, 2**40)
        check_parameters(self, "speculator", min_match=(1, self.depth - 1), shared_bytes=shared_bytes)

    @property
    def draft_bounds(self) -> DraftBounds:
        return DraftBounds(self.num_draft_tokens, has_tree=self.tree != "chain", is_open=True)


def section_for_target(folder: Path) -> dict[str, Any]:
    """See `Method.default_section`: it drafts for every target, and no graph has to be read."""
    return {}


class SuffixMethod(Method):
    """The speculation method of a `SuffixConfig`."""

    name = "suffix"
    Config = SuffixConfig
    vllm_keys = MappingProxyType(
        {
            "suffix_decoding_max_tree_depth": "depth",
            "suffix_decoding_max_spec_factor": "tokens_per_match",
            "suffix_decoding_min_token_prob": "min_prob",
        }
    )
    default_section = "speccompile.speculators.suffix.config:section_for_target"

    def host_ms(self, config: SuffixConfig) -> float:
        return 0.16

    def make_proposer(self, config: SuffixConfig, engines: Mapping[str, Engine], context: MethodContext) -> Proposer:
        proposer: Proposer = registry.find_class(PROPOSER)(config, context)
        return proposer
