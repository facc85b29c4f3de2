# SPDX-License-Identifier: Apache-2.0
"""Recipe fields that describe trees, the same in every method: a `Config` inherits `TreeFields`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from speccompile.common.parameters import check_parameters, parameter
from speccompile.core.jobs import DraftBounds, MethodContext, StepCosts
from speccompile.core.protocols import Engine
from speccompile.core.specs import GraphSpec
from speccompile.core.tree_shape import TreeShape
from speccompile.drafting.budget import Budget
from speccompile.drafting.drawn_length import DrawnLength
from speccompile.drafting.proposer import Drafts, Scorer, TreeGrower
from speccompile.drafting.race import MIN_RACERS
from speccompile.drafting.static_tree import StaticTrees
from speccompile.errors import RecipeError

MAX_CANDIDATES = 64  # of a node; the top-k search over more could take longer than the draft
MAX_DEPTH = 64


@dataclass(frozen=True)
class ProductTree:
    """A tree by widths, `{widths: [4, 2, 1]}`."""

    widths: tuple[int, ...]
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


Choices = tuple[tuple[int, ...], ...]
Tree = Literal["chain", "auto"] | ProductTree | Choices


@dataclass(frozen=True, kw_only=True)
class TreeFields:
    """Recipe fields of the draft tree.

    Args:
        tree: `chain`: one token after the other; `auto`: grown by the draft's confidences, as long as another token is
            worth its time by the measured costs, within engine.max_draft_nodes; a list of rank paths such as
            [[0], [1], [0, 0]], or `{widths: [4, 2, 1]}`: the same shape in every step.
        num_candidates: with `auto`, candidates after each expanded node; a fixed shape has as many as it needs.

    Raises:
        RecipeError: a value is out of range, or the shape is no tree.
    """

    tree: Tree = "chain"
    tree_width: int = parameter(4, ge=1, le=MAX_CANDIDATES)  # with `auto`, most nodes that are expanded at a depth
    tree_depth: int = parameter(6, ge=1, le=MAX_DEPTH)  # with `auto`, most draft tokens on a path
    num_candidates: int = parameter(8, ge=1, le=MAX_CANDIDATES)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", tree_from_words(self.tree))
        check_parameters(self, "speculator")
        if (shape := self.shape) is not None and shape.max_rank >= MAX_CANDIDATES:
            deepest = f"rank {shape.max_rank}"
            raise RecipeError("speculator.tree", deepest, f"ranks below {MAX_CANDIDATES}", "Correct the tree.")

    @property
    def has_tree(self) -> bool:
        return self.tree != "chain"

    @property
    def shape(self) -> TreeShape | None:
        """The fixed shape; None where the tree is grown, or is a chain of the method's own length."""
        if isinstance(self.tree, ProductTree):
            return TreeShape.product(self.tree.widths)
        return None if isinstance(self.tree, str) else TreeShape.from_choices(self.tree)

    @property
    def leaves_length(self) -> bool:
        """Whether the recipe leaves the number of drafts open, so that it may be 0 where plain decoding is faster."""
        return self.shape is None

    @property
    def candidates_needed(self) -> int:
        shape = self.shape
        return self.num_candidates if shape is None else shape.max_rank + 1

    @property
    def fixed_length(self) -> int:
        """Draft tokens of a chain whose length the recipe fixes; 0: there is none."""
        return 0

    @property
    def draft_bounds(self) -> DraftBounds:
        return DraftBounds(self.fixed_length, self.num_tree_drafts, self.has_tree, self.leaves_length)

    @property
    def num_tree_drafts(self) -> int:
        """Draft tokens of a fixed shape; 0 where there is none."""
        shape = self.shape
        return 0 if shape is None else shape.num_drafts


def tree_from_words(value: Any) -> Tree:
    """Returns the tree that a recipe, JSON or Python describes. Raises RecipeError: it is no tree.

    Args:
        value: `chain`, `auto`, a `ProductTree` or {"widths": ...}, or rank paths as lists or tuples.
    """
    if isinstance(value, str) and value in ("chain", "auto"):
        return value  # type: ignore[return-value]
    if isinstance(value, ProductTree):
        TreeShape.product(value.widths)
        return ProductTree(tuple(value.widths))
    if isinstance(value, Mapping) and set(value) == {"widths"} and _is_ints(value["widths"]):
        return tree_from_words(ProductTree(tuple(value["widths"])))
    if isinstance(value, Sequence) and not isinstance(value, str) and value and all(_is_ints(path) for path in value):
        return TreeShape.from_choices(value).choices
    expected = "chain, auto, a list of rank paths such as [[0], [1], [0, 0]], or {widths: [4, 2, 1]}"
    raise RecipeError("speculator.tree", repr(value), expected, "Correct the recipe.")


def _is_ints(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)


def check_trees(target: GraphSpec, bounds: DraftBounds, has_paths: bool) -> None:
    """Refuses trees for a target with recurrent states, unless the backend's follow paths (`has_paths`)."""
    if target.states and not (has_paths and target.state_trees) and bounds.has_tree:
        got = "a tree" if bounds.nodes else "auto"
        where = "as this one was built" if has_paths else "on this backend and device"
        expected = f"chain: a target with recurrent layers scores chains alone {where}"
        raise RecipeError("speculator.tree", got, expected, "Write speculator.tree: chain.")


_TOO_LATE = "Build a bundle whose recipe says so; at load it is too late."
_RUNS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class CachedDraftFields(TreeFields):
    """Recipe fields; a method's `Config` inherits them.

    Args:
        num_draft_tokens: of a chain; `auto`: as many as are worth their time, `tree_depth` at most.
        drafts: `greedy` (deterministic), `sampled` (from the draft's own distribution at the request's temperature), or
            `auto`: sampled where the request samples and the drafts are a chain or a tree of a fixed shape. A grown
            tree leaves out candidates by their confidence, which is not allowed for drawn tokens.
        confidence_odds: initial odds that a draft token is accepted, divided by the odds given by its confidence.

    Raises:
        RecipeError: a value is out of range.
    """

    quantization: str = "auto"  # `none`, `int8` or `int4`; `auto`: what the backend has for drafts of such a target
    num_draft_tokens: int | Literal["auto"] = parameter("auto", ge=1, le=64, words=("auto",))
    drafts: Literal["auto", "greedy", "sampled"] = parameter("auto", words=("auto", "greedy", "sampled"))
    confidence_odds: float = parameter(1.0, ge=0.02, le=50)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree == "auto" and self.drafts == "sampled":
            todo = "Give the tree a fixed shape, or let drafts be greedy."
            raise RecipeError("speculator.drafts", "sampled with tree: auto", "auto or greedy", todo)

    @property
    def leaves_length(self) -> bool:
        return super().leaves_length and (self.tree == "auto" or self.num_draft_tokens == "auto")

    @property
    def fixed_length(self) -> int:
        return 0 if self.num_draft_tokens == "auto" else self.num_draft_tokens

    @property
    def max_length(self) -> int:
        return self.tree_depth if self.num_draft_tokens == "auto" else self.num_draft_tokens

    @property
    def min_path(self) -> float:
        return 0.0

    @property
    def has_probs(self) -> bool:
        return self.tree != "auto" and self.drafts != "greedy"

    @property
    def candidates_needed(self) -> int:
        return super().candidates_needed if self.has_tree else 1

    @property
    def depth_asked(self) -> int:
        shape = self.shape
        return shape.max_depth if shape is not None else self.tree_depth if self.has_tree else self.max_length

    @property
    def is_depth_fixed(self) -> bool:
        return self.shape is not None or (not self.has_tree and self.num_draft_tokens != "auto")

    def check_depth(self, engine: Engine, max_draft_nodes: int) -> None:
        """Refuses a draft whose one run gives fewer tokens on a path. Raises RecipeError: it does."""
        asked = min(self.depth_asked, max_draft_nodes)
        if self.is_depth_fixed and engine.spec.num_drafts < asked:
            got, expected = f"a draft built for {engine.spec.num_drafts} tokens", f"{asked} on a path"
            raise RecipeError("speculator.num_draft_tokens", got, expected, _TOO_LATE)

    def check_engine(self, engine: Engine, max_draft_nodes: int) -> None:
        """Refuses a draft that was built for other trees: a method chosen at load may differ from the recipe's.

        Raises:
            RecipeError: the draft has too few candidates or no distributions, or the tree has too many nodes.
        """
        todo, held = _TOO_LATE, engine.spec.num_candidates
        if held < self.candidates_needed:
            expected = f"{self.candidates_needed} candidates a node"
            raise RecipeError("speculator.tree", f"a draft built for {held} candidates a node", expected, todo)
        if self.num_tree_drafts > max_draft_nodes:
            got, expected = (
                f"{self.num_tree_drafts} draft tokens",
                f"at most engine.max_draft_nodes = {max_draft_nodes}",
            )
            raise RecipeError("speculator.tree", got, expected, todo)
        if self.has_probs and not engine.spec.gives_probs:
            raise RecipeError(
                "speculator.drafts",
                "a draft built without distributions",
                "distributions to draw from, or greedy",
                todo,
            )

    def make_drafts(
        self,
        scorer: Scorer,
        engine: Engine,
        graph: str,
        context: MethodContext,
        block: int | None = None,
        *,
        has_masks: bool = False,
    ) -> tuple[Drafts, Drafts]:
        """Returns the drafts for greedy batches and those for batches that sample; one object where it serves both.

        Args:
            block: most drafts on a path of a draft that gives all candidates in one run; None: each depth is a run.

        Raises:
            RecipeError: see `check_engine`.
        """
        most = context.max_draft_nodes
        self.check_engine(engine, most)
        if has_masks:
            self.check_depth(engine, most)
        if (shape := self.shape) is not None:
            static = self._static(scorer, shape, engine)
            return static, static
        none = StepCosts()
        is_chain, depth = not self.has_tree, min(self.tree_depth if self.has_tree else self.max_length, most)
        depth = depth if block is None else min(depth, block)
        draft = context.costs.get(graph, none)
        if has_masks and draft.ms_by_nodes:
            draft = StepCosts(tuple((num, draft.ms(num * depth)) for num in _RUNS))
        budget = Budget(
            depth if is_chain else most,
            depth,
            1 if is_chain else self.tree_width,
            context.costs.get("target", none),
            draft,
            is_fixed=is_chain and not self.leaves_length,
            min_path=self.min_path,
            num_runs=None if block is None else 1,
        )
        log_odds = math.log(self.confidence_odds)
        races_probs = engine.spec.gives_probs and engine.spec.num_candidates < MIN_RACERS
        grown = TreeGrower(scorer, budget, log_odds, num_candidates=self.candidates_needed, races_probs=races_probs)
        if not self.has_probs:
            return grown, grown
        is_cut = self.leaves_length or self.min_path > 0
        length = DrawnLength(budget, log_odds, self.min_path) if is_cut else None
        return grown, self._static(scorer, TreeShape.chain(depth), engine, length)

    def _static(
        self, scorer: Scorer, shape: TreeShape, engine: Engine, length: DrawnLength | None = None
    ) -> StaticTrees:
        vocab_size = engine.spec.vocab_size
        return StaticTrees(scorer, shape, may_draw=self.has_probs, vocab_size=vocab_size, length=length)
