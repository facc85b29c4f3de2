# SPDX-License-Identifier: Apache-2.0
"""Drafting in blocks: recipe fields, and what the build and the runtime ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from speccompile.core.jobs import DraftBounds, GraphJob, MethodContext, TargetOutputs
from speccompile.core.protocols import Engine
from speccompile.core.registry import Method
from speccompile.errors import RecipeError
from tests.plugin_methods.block_drafter.proposer import BlockProposer

DRAFT = "block"  # the graph's name in the bundle
HOME = "tests.plugin_methods.block_drafter"


@dataclass(frozen=True)
class BlockConfig:
    """A drafter of blocks.

    Args:
        model: checkpoint folder or hub id.
        num_draft_tokens: of a block that are scored.
        block_size: tokens of a block in the graph; 0: as many as it was trained for.
        quantization: `none`, `int8` or `int4`.

    Raises:
        RecipeError: a value is out of range.
    """

    model: str
    num_draft_tokens: int = 3
    block_size: int = 0
    quantization: str = "none"

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 1:
            got, todo = f"{self.num_draft_tokens}", "Correct the recipe."
            raise RecipeError("speculator.num_draft_tokens", got, "1 or more", todo)

    @property
    def draft_bounds(self) -> DraftBounds:
        """How much it drafts: a fixed number of tokens."""
        return DraftBounds(self.num_draft_tokens)


@dataclass(frozen=True)
class BlockOptions:
    """Options of the drafter's graph.

    Args:
        block_size: see `BlockConfig`.
    """

    block_size: int


class BlockMethod(Method):
    """See `speccompile.core.registry.Method`."""

    name = "block_drafter"
    Config = BlockConfig
    formats = f"{HOME}.checkpoint:FORMATS"

    def target_outputs(self, config: BlockConfig) -> TargetOutputs:
        """Returns the hidden state that the LM head reads."""
        return TargetOutputs(hidden=True)

    def graph_jobs(self, config: BlockConfig) -> tuple[GraphJob, ...]:
        """Returns the drafter's graph."""
        options = BlockOptions(config.block_size)
        return (GraphJob(DRAFT, config.model, config.quantization, f"{HOME}.checkpoint:BlockSource", options),)

    def make_proposer(
        self, config: BlockConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> BlockProposer:
        """Returns the proposer over the drafter's engine."""
        most = min(config.num_draft_tokens, context.max_draft_nodes)
        return BlockProposer(engines[DRAFT], most, context.seq_lens.get(DRAFT, context.max_seq_len))
