# SPDX-License-Identifier: Apache-2.0
"""What methods share whose draft reads features: recipe words and the proposer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from speccompile.core.feature_drafts import FeatureCache, FeatureProposer
from speccompile.core.growing import TreeGrower
from speccompile.core.growth import GrowthPolicy
from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.protocols import Engine, Outputs
from speccompile.core.specs import gives_laws, num_guesses
from speccompile.core.static_trees import StaticTrees
from speccompile.core.tree_config import TreeFields
from speccompile.core.tree_shape import TreeShape
from speccompile.errors import RecipeError

DRAWN_LENGTH = 4  # drafts of a drawn chain where the recipe leaves the length to measurement: it must be fixed


@dataclass(frozen=True, kw_only=True)
class FeatureFields(TreeFields):
    """Recipe fields; a method's `Config` inherits them.

    Args:
        quantization: `none`, `int8` or `int4`.
        num_draft_tokens: tokens of a chain; or `auto`: as far as a further token is worth its time, at most
            `tree_depth`, and 4 of them where they are drawn.
        drafts: `greedy` (deterministic), `sampled` (from the draft's own law at the request's temperature), or
            `auto`: sampled where the request samples and the tree has a fixed shape: one that is grown follows the
            draft's confidences, which drawn tokens must not.
        confidence_odds: the odds that a guess is right, over the odds that the draft's confidence in it means,
            before a slot's own verdicts are known.
        config: folder with the speculator's config.json, where the hub's is not at hand; for random weights.

    Raises:
        RecipeError: a value is out of range.
    """

    quantization: str = "none"
    num_draft_tokens: int | Literal["auto"] = "auto"
    drafts: Literal["auto", "greedy", "sampled"] = "auto"
    confidence_odds: float = 1.0
    config: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        length = self.num_draft_tokens
        checks = (
            ("num_draft_tokens", length == "auto" or 1 <= int(length) <= 64, length, "auto, or 1 to 64"),
            ("drafts", self.drafts in ("auto", "greedy", "sampled"), self.drafts, "auto, greedy or sampled"),
            ("confidence_odds", 0.02 <= self.confidence_odds <= 50, self.confidence_odds, "0.02 to 50"),
        )
        for name, is_right, got, expected in checks:
            if not is_right:
                raise RecipeError(f"speculator.{name}", repr(got), expected, "Correct the recipe.")
        if self.tree == "auto" and self.drafts == "sampled":
            expected = "greedy or auto with speculator.tree: auto"
            raise RecipeError("speculator.drafts", "'sampled'", expected, "Give the tree a fixed shape.")

    @property
    def has_laws(self) -> bool:
        """Whether the draft's engine must give the laws that drafts are drawn from."""
        return self.tree != "auto" and self.drafts != "greedy"

    def graph_options(self) -> tuple[tuple[str, Any], ...]:
        """Options of the draft's job: what its graph must give."""
        return (("laws", self.has_laws), ("num_guesses", self.guesses_needed))

    def make_proposer(
        self, engine: Engine, make: Callable[[Outputs], Any], graph: str, context: MethodContext
    ) -> FeatureProposer:
        """The proposer over the draft's engine; how far it drafts depends on the measured costs.

        Args:
            engine: of the draft.
            make: features [batch, nodes, hidden] of the target's outputs.
            graph: the draft's name in the bundle.
            context: of the proposer.

        Raises:
            RecipeError: the engine was built for less.
        """
        self._check_form(engine)
        looked_at = 1 if self.tree == "chain" else self.guesses_needed
        max_rows = context.seq_lens.get(graph, context.max_seq_len)
        cache = FeatureCache(engine, make, max_rows, context.max_draft_nodes + 1, looked_at)
        may_sample, vocab = self.drafts != "greedy", engine.spec.vocab_size
        if (shape := self.shape) is not None:
            fixed = StaticTrees(cache, shape, may_sample=may_sample, vocab_size=vocab)
            return FeatureProposer(cache, fixed, fixed)
        target, draft = (context.costs.get(name, StepCosts()) for name in ("target", graph))
        grower = TreeGrower(cache, self._policy(context, target, draft), engine.max_slots, self._log_odds)
        if self.tree == "auto" or not may_sample:
            return FeatureProposer(cache, grower, grower)
        length = min(DRAWN_LENGTH, self.tree_depth) if self.num_draft_tokens == "auto" else self.num_draft_tokens
        chain = TreeShape.chain(min(length, context.max_draft_nodes))
        return FeatureProposer(cache, grower, StaticTrees(cache, chain, may_sample=True, vocab_size=vocab))

    @property
    def _log_odds(self) -> float:
        return math.log(self.confidence_odds)

    def _policy(self, context: MethodContext, target: StepCosts, draft: StepCosts) -> GrowthPolicy:
        most, length = context.max_draft_nodes, self.num_draft_tokens
        if self.tree == "auto":
            return GrowthPolicy(most, min(self.tree_depth, most), self.tree_width, target, draft)
        depth = min(self.tree_depth if length == "auto" else length, most)
        return GrowthPolicy(depth, depth, 1, target, draft, is_fixed=length != "auto")

    def _check_form(self, engine: Engine) -> None:
        """A bundle's draft gives what its recipe asked for; a method chosen at load may ask for more."""
        held, todo = num_guesses(engine.spec), "Build a bundle whose recipe says so; at load it is too late."
        needed = 1 if self.tree == "chain" else self.guesses_needed
        if self.shape is not None and needed > held:
            raise RecipeError("speculator.tree", f"a draft that gives {held} guesses", f"{needed} a node", todo)
        if self.has_laws and not gives_laws(engine.spec):
            raise RecipeError("speculator.drafts", "a draft built without laws", "laws to draw from, or greedy", todo)
