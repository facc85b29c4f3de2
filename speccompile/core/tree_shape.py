# SPDX-License-Identifier: Apache-2.0
"""Static tree shapes: the rank of the candidate at each node, the same in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speccompile.core.tree import Ints
from speccompile.errors import RecipeError


@dataclass(frozen=True)
class TreeShape:
    """Draft tokens by the ranks that lead to them. Use `from_choices`, `product` or `chain` to make one.

    Args:
        choices: a path of ranks for each draft token: (0,) is the most likely child of the root, (0, 2) the third most
            likely child of that. Sorted by depth, then by ranks; every prefix of a path is a path.
    """

    choices: tuple[tuple[int, ...], ...]

    @classmethod
    def from_choices(cls, choices: Sequence[Sequence[int]]) -> TreeShape:
        """Returns the shape of rank paths in any order (as `medusa_choices` has them).

        Raises:
            RecipeError: a path is empty, negative or listed twice, or its parent is missing.
        """
        paths = [tuple(path) for path in choices]
        known = set(paths)
        for path in paths:
            if not path or min(path) < 0:
                _refuse(path, "at least one rank, none below 0")
            if len(path) > 1 and path[:-1] not in known:
                _refuse(path, f"its parent {list(path[:-1])} in the list as well")
        if len(known) < len(paths):
            twice = next(path for path in paths if paths.count(path) > 1)
            _refuse(twice, "every path once")
        return cls(tuple(sorted(known, key=lambda path: (len(path), path))))

    @classmethod
    def product(cls, widths: Sequence[int]) -> TreeShape:
        """Returns every node of depth d has `widths[d]` children. Raises RecipeError: no width, or one below 1."""
        if not widths or min(widths) < 1:
            _refuse(tuple(widths), "at least one width, none below 1")
        paths: list[tuple[int, ...]] = []
        level: list[tuple[int, ...]] = [()]
        for width in widths:
            level = [(*path, rank) for path in level for rank in range(width)]
            paths += level
        return cls(tuple(paths))

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        return cls.product((1,) * length)

    @property
    def num_drafts(self) -> int:
        return len(self.choices)

    @property
    def max_depth(self) -> int:
        return len(self.choices[-1])

    @property
    def max_rank(self) -> int:
        return max(max(path) for path in self.choices)

    @property
    def is_chain(self) -> bool:
        return self.num_drafts == self.max_depth

    def parents(self) -> Ints:
        """Returns [1 + num_drafts] int64: parent node of each node; node 0 is the root (-1)."""
        index = {path: node for node, path in enumerate(self.choices, start=1)}
        index[()] = 0
        return np.array([-1, *(index[path[:-1]] for path in self.choices)], dtype=np.int64)

    def depths(self) -> Ints:
        """Returns [1 + num_drafts] int64: distance to the root."""
        return np.array([0, *(len(path) for path in self.choices)], dtype=np.int64)

    def ranks(self) -> Ints:
        """Returns [1 + num_drafts] int64: rank of each node among the candidates of its parent; 0 at the root."""
        return np.array([0, *(path[-1] for path in self.choices)], dtype=np.int64)

    def level(self, depth: int) -> list[int]:
        return [node for node, path in enumerate(self.choices, start=1) if len(path) == depth] if depth else [0]

    def cut(self, num_drafts: int) -> TreeShape:
        """Returns the first `num_drafts` draft tokens in index order: whole depths first."""
        return TreeShape(self.choices[:num_drafts])


def _refuse(path: tuple[int, ...], expected: str) -> None:
    raise RecipeError("speculator.tree", f"{list(path)}", expected, "Correct the tree's choices or widths.")
