# SPDX-License-Identifier: Apache-2.0
"""What a lookup would draft, asked for without drafting: see `speccompile.runtime.lookup_watch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from speccompile.core.protocols import TokenSequence
from speccompile.drafting.budget import Budget
from speccompile.drafting.candidates import Candidates


class Lookup(NamedTuple):
    """Drafts of a step that is not made.

    Args:
        cost: time of such a step over that of a plain one.
    """

    tokens: list[int]
    cost: float


@runtime_checkable
class LooksUp(Protocol):
    """A proposer that finds drafts in the text alone, with no graph and no outputs of the target."""

    def look_up(self, sequence: TokenSequence, length: int, num_slots: int) -> Lookup:
        """Returns what it would draft after the first tokens of a sequence; a later `propose` is not changed by it.

        Args:
            sequence: after `start`, whatever steps it has made.
            length: how many of its tokens are looked at, the prompt and those of the last call at least.
        """
        ...


def lookup_from_chain(budget: Budget, tokens: Sequence[int], paths: Sequence[float], num_slots: int) -> Lookup:
    """Returns as much of a chain as is worth its time.

    Args:
        paths: probability that a token and all before it are accepted.
        num_slots: sequences of the batch, all of which are taken to draft alike.
    """
    num, _, _ = budget.best([path * num_slots for path in paths[: budget.max_nodes]], num_slots)
    if not budget.weighs_time:
        return Lookup(list(tokens[:num]), 1.0)
    scores = budget.costs.scores(num_slots)
    return Lookup(list(tokens[:num]), scores[num] / scores[0])


def first_path(found: Candidates) -> list[int]:
    """Returns the candidates of a path from the root on, each the first child of the one before, without the root."""
    path = [0]
    for candidate, parent in enumerate(found.parents[1:], 1):
        if parent == path[-1]:
            path.append(candidate)
    return path[1:]
