# SPDX-License-Identifier: Apache-2.0
"""Growing draft trees by confidence: which nodes to expand next, and which of all candidates to score.

Deterministic drafts leave the text as it is whatever is drafted, so a tree may follow the draft's confidences
(the expansion and re-ranking of EAGLE-2, Li et al. 2024) and the measured costs: n candidates are worth scoring as
long as the tokens they promise per millisecond rise. A path's probability falls with its depth, so the best
candidates always hold their ancestors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from speccompile.core.jobs import StepCosts
from speccompile.core.tree import Floats, Ints, TokenTree
from speccompile.drafting.home_rate import HomeRate

LEARNING_RATE = 0.1  # of the log odds between confidence and acceptance
MAX_LOG_ODDS = 4.0
# Of the first guess's log odds, by rank; the last is for all that follow. Seen on the example pair, greedy: 1.6 with a
# first guess, 0.3, -0.3 and -0.6 with those after it.
RANK_SHARES = (1.0, 0.2, -0.2, -0.4)
_LITTLE = 1e-3  # of a law's mass
REACH_MEMORY = 0.95  # weight of the past in how much an expansion has brought


class Calibration:
    """What a slot's verdicts have taught about its confidences, by rank.

    A target that is greedy takes one token, so a first guess is right more often than its confidence says and a third
    one less; the more a request samples, the less so.

    Args:
        log_odds: of a first guess being right, over the odds that its confidence means, to begin with.
    """

    __slots__ = ("_factors", "log_odds")

    def __init__(self, log_odds: float = 0.0) -> None:
        self.log_odds = [share * log_odds for share in RANK_SHARES]
        self._factors: list[float] = []  # of the odds, by rank, for as many ranks as were asked for; empty: to be made

    def probs(self, confidences: Sequence[float]) -> list[float]:
        """Probability that each of the guesses behind one node is the token that follows; they sum to 1 at most.

        Args:
            confidences: by rank.
        """
        factors = self._factors
        if len(factors) < len(confidences):
            factors = [math.exp(odds) for odds in self.log_odds]
            self._factors = factors = factors + factors[-1:] * (len(confidences) - len(factors))
        # 1e-9 keeps a confidence of 1 from 0/0 and of being surer than sure.
        probs = [f * c / (f * c + 1.000000001 - c) for f, c in zip(factors, confidences, strict=False)]
        total = sum(probs)
        return probs if total <= 1 else [prob / total for prob in probs]

    def learn(self, tree: Candidates, chosen: Sequence[int], path: Sequence[int]) -> None:
        """Move the odds by one verdict.

        Args:
            tree: of the slot.
            chosen: candidate of each node that was scored.
            path: nodes kept, the root first.
        """
        kept, last, self._factors = {chosen[node] for node in path}, len(RANK_SHARES) - 1, []
        for candidate in chosen[1:]:
            if tree.parents[candidate] in kept:
                rank = min(tree.ranks[candidate], last)
                odds = self.log_odds[rank] + LEARNING_RATE * ((candidate in kept) - tree.probs[candidate])
                self.log_odds[rank] = min(max(odds, -MAX_LOG_ODDS), MAX_LOG_ODDS)


@dataclass
class Candidates:
    """The tree of one slot in the making. Candidate 0 is the root.

    Args:
        tokens, parents, probs, paths, depths, ranks: by candidate; `probs` given the parent, `paths` from the root.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    probs: list[float] = field(default_factory=lambda: [1.0])
    paths: list[float] = field(default_factory=lambda: [1.0])
    depths: list[int] = field(default_factory=lambda: [0])
    ranks: list[int] = field(default_factory=lambda: [0])

    @classmethod
    def from_root(cls, token: int) -> Candidates:
        """A tree of the root alone."""
        return cls([token])

    def add(
        self, parent: int, tokens: Sequence[int], probs: Sequence[float], floor: float = 0.0, first_rank: int = 0
    ) -> None:
        """Guesses behind a candidate, by rank; those whose path is less likely than `floor` are left out."""
        path, ranks = self.paths[parent], list(range(first_rank, first_rank + len(tokens)))
        if floor > 0:
            kept = [i for i, prob in enumerate(probs) if path * prob >= floor]
            tokens, probs, ranks = [tokens[i] for i in kept], [probs[i] for i in kept], [ranks[i] for i in kept]
        self.tokens += tokens
        self.probs += probs
        self.ranks += ranks
        self.paths += [path * prob for prob in probs]
        self.parents += [parent] * len(tokens)
        self.depths += [self.depths[parent] + 1] * len(tokens)

    def likeliest(self, start: int, width: int) -> list[int]:
        """The `width` likeliest of the candidates from `start` on, the likeliest first."""
        return sorted(range(start, len(self.tokens)), key=self.paths.__getitem__, reverse=True)[:width]

    def best(self, num: int) -> list[int]:
        """The root and the `num` likeliest others: first the path of likeliest children, then all in index order.

        Parents stand before children, siblings in their order. Where the first path is kept, nothing has to be moved
        in the target's cache.
        """
        chosen = sorted(self.likeliest(1, num))
        first: dict[int, int] = {}
        for c in chosen:
            first.setdefault(self.parents[c], c)
        path = [0]
        while (c := first.get(path[-1], 0)) > 0:
            path.append(c)
        on_path = set(path)
        return path + [c for c in chosen if c not in on_path]


class Usual:
    """How large trees were of late.

    Args:
        num_drafts: scored, a slot; to begin with.
        num_runs: of the draft, each counted by what it cost over one of a node a slot; to begin with.
    """

    __slots__ = ("num_drafts", "num_runs")

    def __init__(self, num_drafts: float, num_runs: float) -> None:
        self.num_drafts, self.num_runs = num_drafts, num_runs

    def learn(self, num_drafts: float, num_runs: float) -> None:
        """Take in one tree."""
        self.num_drafts += (1 - REACH_MEMORY) * (num_drafts - self.num_drafts)
        self.num_runs += (1 - REACH_MEMORY) * (num_runs - self.num_runs)


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

    def begins(self, rate: float, num_slots: int, usual: Usual) -> bool:
        """Whether drafting promises more tokens a millisecond than a plain step.

        Args:
            rate: accepted tokens a slot that a tree brought of late, see `Reach`.
            num_slots: slots of the batch.
            usual: what such a tree costs.
        """
        if not self.weighs_time:
            return True
        tree_ms = self.target.ms(round(num_slots * (1 + usual.num_drafts))) + usual.num_runs * self.draft.ms(num_slots)
        return (1 + rate) * self.target.ms(num_slots) > tree_ms

    def goes_on(self, trees: Sequence[Candidates], depth: int, reach: float, spent_ms: float) -> bool:
        """Whether candidates at `depth` are worth another expansion.

        Args:
            trees: of all slots.
            depth: of the candidates that would be expanded.
            reach: their paths' probabilities, all slots added: what the expansion can bring at most.
            spent_ms: time that growing took so far.
        """
        if depth >= self.max_depth:
            return False
        if not self.weighs_time:
            return True
        num_slots = len(trees)
        _, expected, cost_ms = self._size(trees, spent_ms)
        scores = self._score_ms(num_slots)
        more_ms = self.draft.ms(num_slots * self.width) + scores[min(1, self.max_nodes)] - scores[0]
        return reach * cost_ms > expected * more_ms

    def floor(self, trees: Sequence[Candidates]) -> float:
        """Probability that a path must have to be of use.

        There are `max_nodes` better ones otherwise, or it is not worth the time of scoring it: what a token costs in
        plain decoding is the most that a token of a good tree costs.
        """
        floor = 0.0
        if self.weighs_time:
            scores = self._score_ms(len(trees))
            floor = max(min((b - a for a, b in itertools.pairwise(scores)), default=0.0), 0.0) / scores[0]
        if len(trees) == 1 and len(trees[0].paths) > self.max_nodes:
            floor = max(floor, sorted(trees[0].paths, reverse=True)[self.max_nodes])
        return floor

    def _score_ms(self, num_slots: int) -> tuple[float, ...]:
        """What scoring costs by the number of draft tokens a slot."""
        return _score_ms(self.target, num_slots, self.max_nodes)

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
        gains = ranked[0] if num_slots == 1 else [sum(p[n] for p in ranked if n < len(p)) for n in range(most)]
        expected = float(num_slots)
        if not self.weighs_time:
            return most, expected + sum(gains[:most]), 1.0
        scores = self._score_ms(num_slots)
        best, best_expected, best_ms = 0, expected, scores[0] + spent_ms
        for num in range(1, most + 1):
            expected += gains[num - 1]
            cost_ms = scores[num] + spent_ms
            if expected * best_ms > best_expected * cost_ms:
                best, best_expected, best_ms = num, expected, cost_ms
        return best, best_expected, best_ms


@lru_cache(maxsize=64)
def _score_ms(target: StepCosts, num_slots: int, max_nodes: int) -> tuple[float, ...]:
    return tuple(target.ms(num_slots * (1 + num)) for num in range(max_nodes + 1))


class Reach:
    """How many draft tokens of a tree a slot kept of late; decides whether drafting is tried at all.

    It drifts back to where it began while nothing is drafted, lest a bad start ends drafting for good.

    Args:
        home: where it begins.
    """

    __slots__ = ("home", "rate")

    def __init__(self, home: HomeRate) -> None:
        self.home, self.rate = home, home.value

    def learn(self, was_drafted: bool, num_accepted: int) -> None:
        """Take in one verdict.

        Args:
            was_drafted: time was spent on drafts, whether any of them was worth scoring or not.
            num_accepted: drafts kept.
        """
        if was_drafted:
            self.rate = REACH_MEMORY * self.rate + (1 - REACH_MEMORY) * num_accepted
            self.home.learn(num_accepted)
        else:
            self.rate += 0.02 * (self.home.value - self.rate)
            self.home.rest()


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
        kept.append(chosen if max(tree.depths) <= limit else [c for c in chosen if tree.depths[c] <= limit])
    if len(trees) == 1:
        return _tree_of_one(trees[0], kept[0]), kept
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


def _tree_of_one(tree: Candidates, chosen: list[int]) -> TokenTree:
    place = {candidate: node for node, candidate in enumerate(chosen)}
    links = [-1, *(place[tree.parents[c]] for c in chosen[1:])]
    tokens = np.array([[tree.tokens[c] for c in chosen]], dtype=np.int64)
    if links == list(range(-1, len(links) - 1)):
        return TokenTree.chain(tokens)
    return TokenTree(tokens, np.array([links], dtype=np.int64), np.array([len(chosen)], dtype=np.int64))


def draw_siblings(law: Floats, draws: Sequence[float], laws: Floats) -> list[int]:
    """Tokens drawn one after another without replacement (Chen et al. 2024, "Sequoia").

    Args:
        law: [vocab] float32, sums to 1.
        draws: one in [0, 1) for each sibling.
        laws: [len(draws), vocab] float32, filled: the law that each was drawn from, which for sibling i is `law`
            without the tokens before it, normalised.

    Returns:
        At most len(draws) tokens: fewer where the law has fewer with mass.
    """
    sums, left, tokens = np.cumsum(law, dtype=np.float64), 0.0, list[int]()
    for row, u in zip(laws, draws, strict=True):
        left = float(sums[-1]) if not tokens else left - float(law[tokens[-1]])
        if left < _LITTLE:  # what is left over is not told by a difference any more
            rest = law.astype(np.float64)
            rest[tokens] = 0
            left = float(rest.sum())
            if left <= 0:
                break
            token = _place(np.cumsum(rest), u * left, rest)
            row[...] = rest / left
        else:
            bound = u * left
            for taken in sorted(tokens):  # their mass is skipped, from the first on
                if taken == 0 or bound >= sums[taken - 1]:
                    bound += float(law[taken])
            token = _place(sums, bound, law)
            if token in tokens:  # rounding at the upper end
                token = max(t for t in np.flatnonzero(law).tolist() if t not in tokens)
            np.multiply(law, np.float32(1 / left), out=row)
            row[tokens] = 0
        tokens.append(token)
    return tokens


def _place(sums: np.ndarray, bound: float, law: np.ndarray) -> int:
    """First index whose running sum exceeds the bound; the last with mass where rounding leaves none."""
    token = int(np.searchsorted(sums, bound, side="right"))
    return token if token < len(law) else int(np.flatnonzero(law)[-1])
