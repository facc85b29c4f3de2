# SPDX-License-Identifier: Apache-2.0
"""Enumeration of what an acceptance rule emits: every draft and every outcome of every draw, in float64, unsampled.

A random number is the part of its range that is still possible. A comparison, a draw of a token or a race splits that
part; all pieces are followed, with their shares as probabilities. A number that is used twice is thus followed exactly:
what a rule does wrong when it reuses one shows as a difference from the target's distribution.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from speccompile.core import acceptance, multi_path

VOCAB, NUM_PAIRS = 3, 2
CHAIN, TREE, WIDE, TWO_PATHS = (-1, 0, 1, 2), (-1, 0, 0, 1, 1), (-1, 0, 0, 2), (-1, 0, 0, 1, 2)
SIBLINGS = WIDE[:3]
LEAST = 1e-15  # share of a piece that is followed
Form = tuple[int, ...]
Prefix = tuple[int, ...]
Dists = Callable[[Prefix], np.ndarray]
Point = tuple[float, float, float]


def random_dists(seed: int, heat: float = 0.7) -> Dists:
    """Returns distributions that depend on all tokens before."""

    @functools.cache
    def dist_after(prefix: Prefix) -> np.ndarray:
        return np.random.default_rng([seed, *prefix, 99]).dirichlet(np.full(VOCAB, heat))

    return dist_after


PAIRS = [(random_dists(seed), random_dists(seed + 100)) for seed in range(NUM_PAIRS)]


class Script:
    """The outcomes of one run of a rule: those given, then the first of each; and its probability."""

    def __init__(self, given: list[int]) -> None:
        self.given, self.taken, self.counts, self.prob = given, list[int](), list[int](), 1.0

    def choose(self, shares: list[float]) -> int:
        """Returns the index of one of these shares; those that are zero are not followed."""
        possible = [i for i, share in enumerate(shares) if share > LEAST]
        step = len(self.taken)
        number = self.given[step] if step < len(self.given) else 0
        self.taken.append(number)
        self.counts.append(len(possible))
        self.prob *= shares[possible[number]] / sum(shares)
        return possible[number]

    def next(self) -> list[int] | None:
        """Returns the outcomes of the next run; None after the last."""
        taken = list(self.taken)
        while taken and taken[-1] + 1 == self.counts[len(taken) - 1]:
            taken.pop()
        return None if not taken else [*taken[:-1], taken[-1] + 1]


def runs(rule: Callable[[Script], Prefix]) -> Iterator[tuple[Prefix, float]]:
    """Yields what every run emits, and its probability."""
    given: list[int] | None = []
    while given is not None:
        script = Script(given)
        emitted = rule(script)
        yield emitted, script.prob
        given = script.next()


class Uniform:
    """A uniform number: the interval that it is in, times `scale`."""

    def __init__(self, script: Script, scale: float = 1.0, ends: list[float] | None = None) -> None:
        self.script, self.scale, self.ends = script, scale, [0.0, 1.0] if ends is None else ends

    def __mul__(self, scale: float) -> Uniform:
        return Uniform(self.script, self.scale * float(scale), self.ends)

    def __lt__(self, bound: float) -> bool:
        limit = float(bound) / self.scale if self.scale > 0 else float(bound > 0)
        return self._split([0.0, min(max(limit, 0.0), 1.0), 1.0]) == 0

    def draw(self, dist: np.ndarray) -> int:
        """Returns the token by the inverse distribution function."""
        mass = np.concatenate(([0.0], np.cumsum(dist)))
        return self._split((mass / mass[-1]).tolist())

    def _split(self, cuts: list[float]) -> int:
        low, high = self.ends
        pieces = [(max(low, a), min(high, b)) for a, b in itertools.pairwise(cuts)]
        index = self.script.choose([max(0.0, b - a) for a, b in pieces])
        self.ends[:] = pieces[index]
        return index


class Times:
    """The exponential variates of three tokens, up to a factor: the part of the triangle of their shares they are in.

    Shares of independent exponential variates are uniform in the triangle, so a probability is an area.
    """

    def __init__(self, script: Script) -> None:
        self.script, self.corners = script, [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]

    def draw(self, dist: np.ndarray) -> int:
        """Returns the winner of the race: the token with the least time / probability."""
        pieces = []
        for token in range(VOCAB):
            piece = self.corners if dist[token] > 0 else []
            for other in range(VOCAB):
                if other != token:
                    piece = self._half(piece, (token, float(dist[other])), (other, float(dist[token])))
            pieces.append(piece)
        winner = self.script.choose([_area(piece) for piece in pieces])
        self.corners = pieces[winner]
        return winner

    @staticmethod
    def _half(corners: list[Point], less: tuple[int, float], more: tuple[int, float]) -> list[Point]:
        """Returns the part where the one time times its factor is at most the other."""
        heights = [point[less[0]] * less[1] - point[more[0]] * more[1] for point in corners]
        kept: list[Point] = []
        for i, (point, height) in enumerate(zip(corners, heights, strict=True)):
            before, below = corners[i - 1], heights[i - 1]
            if (height <= 0) != (below <= 0):
                share = below / (below - height)
                a, b, c = (u + share * (v - u) for u, v in zip(before, point, strict=True))
                kept.append((a, b, c))
            if height <= 0:
                kept.append(point)
        return kept


def _area(corners: list[Point]) -> float:
    crossed = (a[0] * b[1] - a[1] * b[0] for a, b in zip(corners, corners[1:] + corners[:1], strict=True))
    return abs(sum(crossed))  # twice the area of its projection: of the whole triangle 1


def path_to(form: Sequence[int], tokens: list[int], node: int) -> Prefix:
    """Returns the drafts on the path to a node."""
    path: list[int] = []
    while node > 0:
        path.append(tokens[node])
        node = form[node]
    return tuple(path[::-1])


def joint(dists_after: Dists, num: int, prefix: Prefix = ()) -> dict[Prefix, float]:
    """Returns the distribution of the next tokens up to `num` in all."""
    if len(prefix) >= num:
        return {prefix[:num]: 1.0}
    dist, out = dists_after(prefix), dict[Prefix, float]()
    for token in range(VOCAB):
        for rest, prob in joint(dists_after, num, (*prefix, token)).items():
            out[rest] = out.get(rest, 0.0) + dist[token] * prob
    return out


class Rule:
    """One step of speculative decoding with `accept_slot`, on random numbers that are enumerated.

    Args:
        target: distributions.
        draft: the same.
        form: parents of the drafts.
        drafts_share: the numbers that drafts are drawn with: "" their own; "accept" those that decide over them;
            "next" those that give the target's token at their position.
        races: the numbers that give the target's tokens are those of a race.
        by_match: drafts are kept where they are the target's own token, as deterministic ones are.
    """

    stops = False  # the chain ends after token 0
    replaces = True  # siblings may be equal; then the first has the children of all
    one_number = False  # siblings are drawn with one number
    drops_impossible = False  # the chain ends before a draft to which the target gives no probability

    def __init__(
        self, target: Dists, draft: Dists, form: Form, drafts_share: str = "", *, races: bool = False, by_match: bool
    ) -> None:
        self.target, self.draft, self.form = target, draft, form
        self.drafts_share, self.races, self.by_match = drafts_share, races, by_match

    def __call__(self, script: Script) -> Prefix:
        """Returns what a run emits."""
        form, firsts, noise = list(self.form), [0], Times if self.races else Uniform
        at_depth = [noise(script) for _ in range(len(form) + 1)]  # nodes of one depth share their draws
        accepts = [Uniform(script) for _ in form]
        uniforms: Any = np.empty((len(form), 2), dtype=object)
        tokens, dists, depths, numbers = [VOCAB], [np.zeros(VOCAB)], [0], [accepts[0]]
        uniforms[0] = 0.0, at_depth[0]
        for node in range(1, len(form)):
            parent = form[node] = firsts[form[node]]
            elder = [sibling for sibling in range(1, node) if form[sibling] == parent]
            depths.append(depths[parent] + 1)
            uniforms[node] = accepts[depths[node]], at_depth[depths[node]]
            whole = self.draft(path_to(form, tokens, parent))
            dist = whole.copy()
            if self.by_match or not self.replaces:
                dist[[tokens[sibling] for sibling in elder]] = 0
            numbers.append(numbers[elder[0]] if self.one_number and elder else Uniform(script))
            own = {"": numbers[-1], "accept": uniforms[node, 0], "next": at_depth[depths[parent]]}
            tokens.append(own[self.drafts_share].draw(dist))
            dists.append(self.declared(whole, tokens[-1]))
            firsts.append(next((sibling for sibling in elder if tokens[sibling] == tokens[-1]), node))
            if self.drops_impossible and self.target(path_to(form, tokens, parent))[tokens[-1]] == 0:
                tokens.pop()
                break
            if self.stops and tokens[-1] == 0:
                break
        num = len(tokens)
        probs = np.stack([self.target(path_to(form, tokens, node)) for node in range(num)])
        given = None if self.by_match else np.stack(dists[:num])
        path, token = acceptance.accept_slot(np.array(tokens), np.array(form[:num]), probs, uniforms[:num], given)
        return (*(tokens[node] for node in path[1:]), token)

    def declared(self, dist: np.ndarray, token: int) -> np.ndarray:
        """Returns the distribution that the rule is told a draft was drawn from; it was drawn from `dist`."""
        return dist

    def distance(self) -> tuple[float, float]:
        """Returns the total variation between the emitted tokens and the target's, and the mean number kept."""
        lengths = (len(path_to(self.form, [0] * len(self.form), node)) for node in range(len(self.form)))
        num, mean = max(lengths) + 1, 0.0
        got: dict[Prefix, float] = {}
        for emitted, prob in runs(self):
            mean += prob * (len(emitted) - 1)
            for text, share in joint(self.target, num, emitted).items():
                got[text] = got.get(text, 0.0) + prob * share
        assert abs(sum(got.values()) - 1) < 1e-12
        wanted = joint(self.target, num)
        return 0.5 * sum(abs(got.get(text, 0.0) - prob) for text, prob in wanted.items()), mean


class OneHot(Rule):
    """Drafts that are told as drawn from one-hot distributions, as those of a lookup may be."""

    def declared(self, dist: np.ndarray, token: int) -> np.ndarray:
        """See `Rule`."""
        return np.eye(VOCAB)[token]


class Ones(Rule):
    """Drafts with a probability of one for every token: how a lookup's missing distribution may be read."""

    def declared(self, dist: np.ndarray, token: int) -> np.ndarray:
        """See `Rule`."""
        return np.ones(VOCAB)


class WithoutReplacement(Rule):
    replaces = False


class OneNumber(Rule):
    one_number = True


@pytest.fixture
def enumerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draws of `accept_slot` are those of `Uniform` and `Times`."""
    monkeypatch.setattr(acceptance, "draw", lambda dists, numbers: np.array([numbers[0].draw(dists[0])]))
    monkeypatch.setattr(acceptance, "race", lambda dists, numbers: np.array([numbers[0, 1].draw(dists[0])]))


def mutate(function: str, changes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces a function of the rules by one with another text; each text that is replaced occurs once."""
    module = multi_path if function in ("choose_paths", "chosen_probs") else acceptance
    source = inspect.getsource(getattr(module, function))
    for right, wrong in changes.items():
        assert source.count(right) == 1, right
        source = source.replace(right, wrong)
    made: dict[str, object] = dict(vars(module))
    exec("from __future__ import annotations\n" + source, made)
    for users in (module, acceptance):
        monkeypatch.setattr(users, function, made[function], raising=False)
