# SPDX-License-Identifier: Apache-2.0
"""Recipe fields that describe trees, the same in every method: a `Config` inherits `TreeFields`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from speccompile.common.parameters import check_parameters, parameter
from speccompile.core.jobs import DraftBounds
from speccompile.core.specs import GraphSpec
from speccompile.core.tree_shape import TreeShape
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
