# SPDX-License-Identifier: Apache-2.0
"""Growing draft trees by confidence: which nodes to expand next, and which of all candidates to score.

Deterministic drafts leave the text as it is whatever is drafted, so a tree may follow the draft's confidences
(the expansion and re-ranking of EAGLE-2, Li et al. 2024) and the measured costs: n candidates are worth scoring as
long as the tokens they promise per millisecond rise. A path's probability falls with its depth, so the best
candidates always hold their ancestors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from speccompile.core.jobs import StepCosts
from speccompile.core.tree import Ints, TokenTree

LEARNING_RATE = 0.1  # of the log odds between confidence and acceptance
MAX_LOG_ODDS = 4.0
REACH_MEMORY = 0.95  # weight of the past in how much an expansion has brought


class Calibration:
    """What a slot's verdicts have taught about its confidences.

    Args:
        log_odds: of a guess being right, over the odds that its confidence means, to begin with.
    """

    __slots__ = ("log_odds",)

    def __init__(self, log_odds: float = 0.0) -> None:
        self.log_odds = log_odds

    def probs(self, confidences: Sequence[float]) -> list[float]:
        """Probability that each of the guesses behind one node is the token that follows; they sum to 1 at most."""
        factor = math.exp(self.log_odds)
        probs = [factor * c / (factor * c + 1 - c) if c < 1 else 1.0 for c in confidences]
        total = sum(probs)
        return probs if total <= 1 else [prob / total for prob in probs]

    def learn(self, expected: Sequence[float], num_hits: int) -> None:
        """Move the odds by one verdict.

        Args:
            expected: for each node of the kept path that had children, the probability that one of them is kept.
            num_hits: of these, how many did keep one: all, or all but the last.
        """
        for place, prob in enumerate(expected):
            self.log_odds += LEARNING_RATE * ((place < num_hits) - prob)
        self.log_odds = min(max(self.log_odds, -MAX_LOG_ODDS), MAX_LOG_ODDS)


@dataclass
class Candidates:
    """The tree of one slot in the making. Candidate 0 is the root.

    Args:
        tokens, parents, probs, paths, depths: by candidate; `probs` given the parent, `paths` from the root.
        fed: candidates that the draft has read, in the order of reading, the root left out.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    probs: list[float] = field(default_factory=lambda: [1.0])
    paths: list[float] = field(default_factory=lambda: [1.0])
    depths: list[int] = field(default_factory=lambda: [0])
    fed: list[int] = field(default_factory=list)

    @classmethod
    def from_root(cls, token: int) -> Candidates:
        """A tree of the root alone."""
        return cls([token])

    def add(self, parent: int, tokens: Sequence[int], probs: Sequence[float]) -> None:
        """Guesses behind a candidate, the likeliest first."""
        path, depth = self.paths[parent], self.depths[parent] + 1
        for token, prob in zip(tokens, probs, strict=True):
            self.tokens.append(token)
            self.parents.append(parent)
            self.probs.append(prob)
            self.paths.append(path * prob)
            self.depths.append(depth)

    def level(self, depth: int, width: int) -> list[int]:
        """The `width` likeliest candidates at a depth, in index order."""
        level = [c for c in range(len(self.tokens) - 1, -1, -1) if self.depths[c] == depth]
        return sorted(sorted(level, key=lambda c: (-self.paths[c], c))[:width])

    def best(self, num: int) -> list[int]:
        """The root and the `num` likeliest others, in index order: parents stand before children."""
        order = sorted(range(1, len(self.tokens)), key=lambda c: (-self.paths[c], c))
        return [0, *sorted(order[:num])]


@dataclass(frozen=True)
class GrowthPolicy:
    """Bounds and costs of growing.

    Args:
        max_nodes: most draft tokens to score, per slot.
        max_depth: most draft tokens on a path.
        width: candidates expanded at a depth, per slot.
        target: costs of scoring by nodes; a batch of b slots and n nodes is taken to cost what b * n nodes do.
        draft: costs of one expansion by nodes. Without both, time is not looked at.
        is_fixed: always grow to the bounds.
    """

    max_nodes: int
    max_depth: int
    width: int
    target: StepCosts = field(default_factory=StepCosts)
    draft: StepCosts = field(default_factory=StepCosts)
    is_fixed: bool = False

    @property
    def weighs_time(self) -> bool:
        """Whether costs are known and count."""
        return bool(not self.is_fixed and self.target.ms_by_nodes and self.draft.ms_by_nodes)

    def begins(self, rate: float, num_slots: int) -> bool:
        """Whether a first expansion promises more tokens a millisecond than a plain step.

        Args:
            rate: accepted tokens a slot that a tree brought of late, see `Reach`.
            num_slots: slots of the batch.
        """
        if not self.weighs_time:
            return True
        plain_ms, nodes = self.target.ms(num_slots), 1 + min(self.max_nodes, self.max_depth)
        tree_ms = self.target.ms(num_slots * nodes) + self.max_depth * self.draft.ms(num_slots)
        return (1 + rate) * plain_ms > tree_ms

    def goes_on(self, trees: Sequence[Candidates], depth: int, spent_ms: float) -> bool:
        """Whether the candidates at `depth` are worth another expansion.

        What it can bring at most is the probability that one of the candidates it expands is on the path.
        """
        if depth >= self.max_depth:
            return False
        if not self.weighs_time:
            return True
        num_slots = len(trees)
        reach = sum(sum(tree.paths[c] for c in tree.level(depth, self.width)) for tree in trees)
        _, expected, cost_ms = self._size(trees, spent_ms)
        more_ms = self.draft.ms(num_slots * self.width) + self.target.ms(num_slots * 2) - self.target.ms(num_slots)
        return reach * cost_ms > expected * more_ms

    def size(self, trees: Sequence[Candidates], spent_ms: float) -> int:
        """Draft tokens to score, the same number in every slot that has as many.

        Args:
            trees: of all slots.
            spent_ms: time that growing them took.
        """
        return self._size(trees, spent_ms)[0]

    def _size(self, trees: Sequence[Candidates], spent_ms: float) -> tuple[int, float, float]:
        """(draft tokens, tokens expected, milliseconds) of the best size."""
        num_slots = len(trees)
        ranked = [sorted(tree.paths[1:], reverse=True) for tree in trees]
        most = min(self.max_nodes, max(map(len, ranked), default=0))
        gains = [sum(paths[num] for paths in ranked if num < len(paths)) for num in range(most)]
        expected = float(num_slots)
        if not self.weighs_time:
            return most, expected + sum(gains), 1.0
        best = (0, expected, self.target.ms(num_slots) + spent_ms)
        for num, gain in enumerate(gains, start=1):
            expected += gain
            cost_ms = self.target.ms(num_slots * (1 + num)) + spent_ms
            if expected * best[2] > best[1] * cost_ms:
                best = (num, expected, cost_ms)
        return best


class Reach:
    """How many draft tokens of a tree a slot kept of late; decides whether drafting is tried at all.

    It drifts back to `first` while nothing is drafted, lest a bad start ends drafting for good.
    """

    __slots__ = ("first", "rate")

    def __init__(self, first: float) -> None:
        self.first = self.rate = first

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """Take in one verdict."""
        if num_drafts:
            self.rate = REACH_MEMORY * self.rate + (1 - REACH_MEMORY) * num_accepted
        else:
            self.rate += 0.02 * (self.first - self.rate)


def tree_from_candidates(
    trees: Sequence[Candidates], num_drafts: int, max_drafts: Sequence[int]
) -> tuple[TokenTree, list[list[int]]]:
    """What is scored: the best candidates of every slot.

    Args:
        trees: of all slots.
        num_drafts: most draft tokens, see `GrowthPolicy.size`.
        max_drafts: most draft tokens on a path, by slot (`Slot.max_drafts`).

    Returns:
        The tree, and for each slot the candidate that each of its nodes is.
    """
    kept = []
    for tree, limit in zip(trees, max_drafts, strict=True):
        chosen = tree.best(num_drafts) if limit > 0 else [0]
        kept.append([c for c in chosen if tree.depths[c] <= limit])
    nodes = max(map(len, kept))
    tokens: Ints = np.zeros((len(trees), nodes), dtype=np.int64)
    parents: Ints = np.full((len(trees), nodes), -1, dtype=np.int64)
    is_chain = True
    for slot, (tree, chosen) in enumerate(zip(trees, kept, strict=True)):
        place = {candidate: node for node, candidate in enumerate(chosen)}
        tokens[slot, : len(chosen)] = [tree.tokens[c] for c in chosen]
        links = [place[tree.parents[c]] for c in chosen[1:]]
        parents[slot, 1 : len(chosen)] = links
        is_chain = is_chain and links == list(range(len(links)))
    num_nodes = np.array([len(chosen) for chosen in kept], dtype=np.int64)
    if is_chain:
        return TokenTree.chain(tokens, num_nodes), kept
    return TokenTree(tokens, parents, num_nodes), kept


def masks_from_fed(trees: Sequence[Candidates]) -> tuple[Ints, np.ndarray]:
    """Feeds of an expansion: all candidates that are or were expanded, the root left out.

    Returns:
        tokens [batch, nodes] int64 and tree mask [batch, nodes, nodes] bool; nodes is the longest `fed`, at padding
        the token is 0 and sees itself alone.
    """
    nodes = max(len(tree.fed) for tree in trees)
    tokens: Ints = np.zeros((len(trees), nodes), dtype=np.int64)
    mask = np.broadcast_to(np.eye(nodes, dtype=np.bool_), (len(trees), nodes, nodes)).copy()
    for slot, tree in enumerate(trees):
        place = {candidate: node for node, candidate in enumerate(tree.fed)}
        for node, candidate in enumerate(tree.fed):
            tokens[slot, node] = tree.tokens[candidate]
            above = place.get(tree.parents[candidate])
            if above is not None:
                mask[slot, node] |= mask[slot, above]
    return tokens, mask


def expected_hits(tree: Candidates, chosen: Sequence[int], path: Sequence[int]) -> list[float]:
    """For `Calibration.learn`: along the kept path, the probability that a child which was scored is kept.

    Args:
        tree: of the slot.
        chosen: candidate of each node that was scored.
        path: nodes kept, the root first.
    """
    sums: dict[int, float] = {}
    for candidate in chosen[1:]:
        parent = tree.parents[candidate]
        sums[parent] = sums.get(parent, 0.0) + tree.probs[candidate]
    return [min(sums[chosen[node]], 1.0) for node in path if chosen[node] in sums]


def draw_siblings(law: np.ndarray, draws: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Tokens drawn one after another without replacement, and the law that each was drawn from.

    Args:
        law: [vocab] float32, sums to 1.
        draws: [num] float32 in [0, 1), one a sibling.

    Returns:
        At most num tokens (fewer where the law has fewer with mass), and laws [len(tokens), vocab] float32: the
        law of sibling i is `law` without the tokens before it, normalised (Chen et al. 2024, "Sequoia").
    """
    left = law.astype(np.float64)
    tokens: list[int] = []
    laws = []
    for u in draws.tolist():
        mass = float(left.sum())
        if mass <= 0:
            break
        sums = np.cumsum(left)
        token = int(np.searchsorted(sums, u * sums[-1], side="right"))
        token = min(token, int(np.flatnonzero(left)[-1]))
        laws.append((left / mass).astype(np.float32))
        tokens.append(token)
        left[token] = 0.0
    return tokens, np.stack(laws) if laws else np.zeros((0, len(law)), dtype=np.float32)
