# SPDX-License-Identifier: Apache-2.0
"""What methods share whose draft is a decoder on caches that guesses behind nodes: recipe words and the proposer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from speccompile.core.acceptance import Verdict
from speccompile.core.cache_rows import CacheRows
from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.protocols import Batch, Engine, Outputs, Slot, StepTimes
from speccompile.core.tree import Ints, TokenTree
from speccompile.core.tree_shape import TreeShape
from speccompile.drafting.acceptance import AcceptanceEstimate
from speccompile.drafting.budget import Budget
from speccompile.drafting.drawn_length import DrawnLength
from speccompile.drafting.dynamic_tree import TreeGrower
from speccompile.drafting.expansion import Scorer
from speccompile.drafting.state import DraftState
from speccompile.drafting.static_tree import StaticTrees
from speccompile.drafting.tree_config import TreeFields
from speccompile.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class CachedDraftFields(TreeFields):
    """Recipe fields; a method's `Config` inherits them.

    Args:
        quantization: `none`, `int8` or `int4`.
        num_draft_tokens: of a chain; `auto`: as long as a further token is worth its time, `tree_depth` at most.
        drafts: `greedy` (deterministic), `sampled` (from the draft's own law at the request's temperature), or
            `auto`: sampled where the request samples and the drafts are a chain or a tree of a fixed shape. A tree
            that is grown follows the draft's confidences, which drawn tokens must not.
        confidence_odds: the odds that a draft token is accepted, over the odds that the draft's confidence in it
            means, before a slot's own verdicts are known.

    Raises:
        RecipeError: a value is out of range.
    """

    quantization: str = "none"
    num_draft_tokens: int | Literal["auto"] = "auto"
    drafts: Literal["auto", "greedy", "sampled"] = "auto"
    confidence_odds: float = 1.0

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
            todo = "Give the tree a fixed shape, or let drafts be greedy."
            raise RecipeError("speculator.drafts", "sampled with tree: auto", "auto or greedy", todo)

    @property
    def leaves_length(self) -> bool:
        """See `TreeFields.leaves_length`."""
        return super().leaves_length and (self.tree == "auto" or self.num_draft_tokens == "auto")

    @property
    def max_length(self) -> int:
        """Most draft tokens of a chain."""
        return self.tree_depth if self.num_draft_tokens == "auto" else self.num_draft_tokens

    @property
    def min_path(self) -> float:
        """Probability that a path needs for a token to be drafted after it."""
        return 0.0

    @property
    def has_laws(self) -> bool:
        """Whether drafts are drawn where the request samples."""
        return self.tree != "auto" and self.drafts != "greedy"

    @property
    def guesses_needed(self) -> int:
        """Tokens to guess behind a node: one for a chain."""
        return super().guesses_needed if self.has_tree else 1

    def spec_options(self) -> tuple[tuple[str, Any], ...]:
        """Options of the draft's job: `num_guesses` and `laws` of its `guessing_spec`."""
        return (("laws", self.has_laws), ("num_guesses", self.guesses_needed))

    def check_engine(self, engine: Engine, max_draft_nodes: int) -> None:
        """Refuse a draft that was built for other trees: a method chosen at load may differ from the recipe's.

        Raises:
            RecipeError: the draft gives less than is needed.
        """
        if engine.spec.num_candidates == 0:
            got = f"a draft of an earlier version, which gives {', '.join(t.name for t in engine.spec.outputs[:3])}"
            raise RecipeError("speculator.method", got, "candidates after each node", "Build the bundle again.")
        todo, held = "Build a bundle whose recipe says so; at load it is too late.", engine.spec.num_candidates
        if held < self.guesses_needed:
            expected = f"{self.guesses_needed} guesses a node"
            raise RecipeError("speculator.tree", f"a draft built for {held} guesses a node", expected, todo)
        if self.num_tree_drafts > max_draft_nodes:
            got, expected = (
                f"{self.num_tree_drafts} draft tokens",
                f"at most engine.max_draft_nodes = {max_draft_nodes}",
            )
            raise RecipeError("speculator.tree", got, expected, todo)
        if self.has_laws and not engine.spec.gives_probs:
            raise RecipeError("speculator.drafts", "a draft built without laws", "laws to draw from, or greedy", todo)

    def make_drafts(self, scorer: Scorer, engine: Engine, graph: str, context: MethodContext) -> tuple[Drafts, Drafts]:
        """Drafts for batches that are greedy, and for those that sample; the same object where it serves both.

        Args:
            scorer: the draft.
            engine: of the draft.
            graph: its name in the bundle.
            context: sizes and measured costs.

        Raises:
            RecipeError: see `check_engine`.
        """
        most = context.max_draft_nodes
        self.check_engine(engine, most)
        if (shape := self.shape) is not None:
            static = self._static(scorer, shape, engine)
            return static, static
        none = StepCosts()
        is_chain, depth = not self.has_tree, self.tree_depth if self.has_tree else self.max_length
        budget = Budget(
            min(depth, most) if is_chain else most,
            min(depth, most),
            1 if is_chain else self.tree_width,
            context.costs.get("target", none),
            context.costs.get(graph, none),
            is_fixed=is_chain and not self.leaves_length,
            min_path=self.min_path,
        )
        log_odds = math.log(self.confidence_odds)
        grown = TreeGrower(scorer, budget, log_odds, num_guesses=self.guesses_needed)
        if not self.has_laws:
            return grown, grown
        is_cut = self.leaves_length or self.min_path > 0
        length = DrawnLength(budget, log_odds, self.min_path) if is_cut else None
        return grown, self._static(scorer, TreeShape.chain(min(depth, most)), engine, length)

    def _static(
        self, scorer: Scorer, shape: TreeShape, engine: Engine, length: DrawnLength | None = None
    ) -> StaticTrees:
        vocab_size = engine.spec.vocab_size
        return StaticTrees(scorer, shape, may_sample=self.has_laws, vocab_size=vocab_size, length=length)


class Drafts(Protocol):
    """What grows or fills trees: `TreeGrower`, `StaticTrees`."""

    def new_estimate(self) -> AcceptanceEstimate | None:
        """Returns what is known of a new sequence; None where nothing is ever learnt."""
        ...

    def propose(self, batch: Batch) -> TokenTree:
        """Drafts."""
        ...

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        """See `speccompile.core.protocols.Proposer`."""
        ...

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict) -> list[int]:
        """Accepted drafts that stand in their rows of the draft's cache, by slot."""
        ...


class DraftRows(Scorer, Protocol):
    """A scorer that owns what the draft's rows hold: `DraftCache`, or one on another engine's caches."""

    catches_up: bool  # see `speccompile.core.protocols.Proposer`

    @property
    def caches(self) -> Sequence[CacheRows]:
        """See `speccompile.core.protocols.Proposer`."""
        ...

    def start(self, slot: int) -> None:
        """Nothing is read."""
        ...

    def resume(self, slot: int, sequence: Slot, num_rows: int) -> int:
        """See `speccompile.core.protocols.Proposer.resume`."""
        ...

    def prefill(self, slot: int, tokens: Ints, start: int) -> None:
        """The target has read `tokens` [1, nodes], which stand at `start`."""
        ...

    def commit(self, batch: Batch, num_kept: Sequence[int], num_accepted: Sequence[int]) -> None:
        """What became of the drafts."""
        ...


class CachedDraftProposer:
    """See `speccompile.core.protocols.Proposer`.

    Args:
        rows: the draft.
        likeliest: drafts of greedy batches.
        drawn: drafts of batches that sample; the same, or such as learn nothing.
    """

    def __init__(self, rows: DraftRows, likeliest: Drafts, drawn: Drafts) -> None:
        self.rows, self.likeliest, self.drawn = rows, likeliest, drawn
        self.caches, self.catches_up, self._used = rows.caches, rows.catches_up, likeliest

    def start(self, slot: int, sequence: Slot) -> None:
        """Nothing is read, and nothing known of it."""
        self.rows.start(slot)
        sequence.draft_state = DraftState(self.likeliest.new_estimate())

    def resume(self, slot: int, sequence: Slot, num_rows: int) -> int:
        """The rows are known, the lessons are not."""
        sequence.draft_state = DraftState(self.likeliest.new_estimate())
        return self.rows.resume(slot, sequence, num_rows)

    def prefill(self, slot: int, sequence: Slot, tokens: Ints, start: int, outputs: Outputs) -> None:
        """Read the chunk as well."""
        self.rows.prefill(slot, tokens, start)

    def propose(self, batch: Batch) -> TokenTree:
        """Trees; a slot that cannot or should not draft is padded."""
        self._used = self.drawn if batch.may_draw else self.likeliest
        return self._used.propose(batch)

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        """Learn, and keep the rows of accepted drafts where they are right."""
        num_kept = self._used.commit(batch, tree, verdict)
        self.rows.commit(batch, num_kept, verdict.num_accepted.tolist())

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        """Corrects the costs."""
        self.likeliest.observe(num_slots, num_nodes, times)

    def settle(self) -> None:
        """Nothing of the target's is held."""
