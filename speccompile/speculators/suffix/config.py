# SPDX-License-Identifier: Apache-2.0
"""Drafting by a suffix tree: recipe fields, and what the build and the runtime ask. It has no graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from speccompile.core import registry
from speccompile.core.jobs import DraftBounds, MethodContext
from speccompile.core.method import Method
from speccompile.core.proposer import Proposer
from speccompile.core.protocols import Engine
from speccompile.errors import RecipeError

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

    Raises:
        RecipeError: a value is out of range.
    """

    num_draft_tokens: int = 15
    depth: int = 24
    min_match: int = 1
    min_prob: float = 0.1
    tokens_per_match: float | Literal["auto"] = "auto"
    tree: Literal["chain", "auto"] = "chain"
    max_bytes: int = 8_000_000
    shared_bytes: int = 0

    def __post_init__(self) -> None:
        per_match = 1.0 if self.tokens_per_match == "auto" else self.tokens_per_match
        bounds = (
            ("num_draft_tokens", self.num_draft_tokens, 1, 64),
            ("depth", self.depth, 2, 64),
            ("min_match", self.min_match, 1, self.depth - 1),
            ("min_prob", self.min_prob, 0.01, 1),
            ("tokens_per_match", per_match, 0.1, 64),
            ("max_bytes", self.max_bytes, 1_000_000, 2**40),
            ("shared_bytes", self.shared_bytes or 1_000_000, 1_000_000, 2**40),
        )
        for name, got, low, high in bounds:
            if not low <= got <= high:
                raise RecipeError(f"speculator.{name}", str(got), f"{low} to {high}", "Correct the recipe.")
        if self.tree not in ("chain", "auto"):
            raise RecipeError("speculator.tree", repr(self.tree), "chain or auto", "Correct the recipe.")

    @property
    def draft_bounds(self) -> DraftBounds:
        return DraftBounds(self.num_draft_tokens, has_tree=self.tree != "chain", is_open=True)


def section_for_target(folder: Path) -> dict[str, Any]:
    """See `Method.default_section`: it drafts for every target, and no graph has to be read."""
    return {}


class SuffixMethod(Method):
    """See `speccompile.core.method.Method`."""

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

    def make_proposer(self, config: SuffixConfig, engines: Mapping[str, Engine], context: MethodContext) -> Proposer:
        """Returns the proposer; it never drafts more tokens than a step may score."""
        proposer: Proposer = registry.find_class(PROPOSER)(config, context)
        return proposer
