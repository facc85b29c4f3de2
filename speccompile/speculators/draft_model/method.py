# SPDX-License-Identifier: Apache-2.0
"""Drafting by a small model as a method: one more decoder graph."""

from __future__ import annotations

from collections.abc import Mapping

from speccompile.core.jobs import CandidateOptions, DecoderOptions, GraphJob, MethodContext
from speccompile.core.method import Method
from speccompile.core.protocols import Engine
from speccompile.errors import RecipeError
from speccompile.speculators.draft_model.config import Config as DraftModelConfig
from speccompile.speculators.draft_model.policy import LengthPolicy
from speccompile.speculators.draft_model.proposer import DraftModelProposer
from speccompile.speculators.draft_model.training import HeadsConfig
from speccompile.speculators.draft_model.tree import TreeProposer

DRAFT = "draft"  # the graph's name in the bundle


class DraftModelMethod(Method):
    """See `speccompile.core.method.Method`."""

    name = "draft_model"
    Config = DraftModelConfig
    TrainingConfig = HeadsConfig
    trainer = "speccompile.speculators.draft_model.training:DraftModelTrainer"

    def graph_jobs(self, config: DraftModelConfig) -> tuple[GraphJob, ...]:
        """The draft model."""
        candidates = CandidateOptions(config.guesses_needed, config.has_laws) if config.has_tree else None
        options = DecoderOptions(candidates=candidates)
        return (GraphJob(DRAFT, config.model, config.quantization, options=options, config=config.config),)

    def make_proposer(
        self, config: DraftModelConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> DraftModelProposer | TreeProposer:
        """The proposer for the form that the draft was built in; how far it drafts depends on the measured costs."""
        engine, costs = engines[DRAFT], context.costs
        _check_form(config, engine, context.max_draft_nodes)
        if config.has_tree:
            return TreeProposer(config, engine, costs, DRAFT, context)
        policy = LengthPolicy(config, costs.get("target"), costs.get(DRAFT), context.max_draft_nodes)
        max_rows = context.seq_lens.get(DRAFT, context.max_seq_len)
        return DraftModelProposer(engine, policy, max_rows, may_sample=config.drafts != "greedy")


def _check_form(config: DraftModelConfig, engine: Engine, max_draft_nodes: int) -> None:
    """A bundle's draft drafts chains or guesses for trees, as its recipe said; a method chosen at load may differ.

    Raises:
        RecipeError: the draft gives less than the tree needs.
    """
    held, needed = engine.spec.num_candidates, config.guesses_needed if config.has_tree else 0
    todo = "Build a bundle whose recipe says so; at load it is too late."
    if needed > held or (held and not needed):
        got = f"{held} guesses a node" if held else "an engine for chains"
        expected = f"{needed} guesses a node" if needed else "an engine for chains"
        raise RecipeError("speculator.tree", f"a draft built as {got}", expected, todo)
    if config.num_tree_drafts > max_draft_nodes:
        got = f"{config.num_tree_drafts} draft tokens"
        raise RecipeError("speculator.tree", got, f"at most engine.max_draft_nodes = {max_draft_nodes}", todo)
    if config.has_tree and config.has_laws and not engine.spec.gives_probs:
        raise RecipeError("speculator.drafts", "a draft built without laws", "laws to draw from, or greedy", todo)
