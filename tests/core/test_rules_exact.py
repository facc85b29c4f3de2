# SPDX-License-Identifier: Apache-2.0
"""The acceptance rules by enumeration: every draft and every outcome of every draw, in float64, without sampling.

Where the rule compares a draw with a bound, both outcomes are followed with their probabilities; where it draws a
token, all tokens are. The joint distribution of the emitted tokens must be the target's to 1e-12.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from speccompile.core import acceptance
from speccompile.core.acceptance import accept_slot
from speccompile.core.sampling import NODE_BY_NODE

VOCAB, NUM_PAIRS = 3, 2
CHAIN, TREE, WIDE = (-1, 0, 1, 2), (-1, 0, 0, 1, 1), (-1, 0, 0, 2)
Prefix = tuple[int, ...]
Dists = Callable[[Prefix], np.ndarray]


def random_dists(seed: int, heat: float) -> Dists:
    """Returns distributions that depend on all tokens before."""

    def dist_after(prefix: Prefix) -> np.ndarray:
        return np.random.default_rng([seed, *prefix, 99]).dirichlet(np.full(VOCAB, heat))

    return dist_after


class Script:
    """The outcomes of one run of a rule: those given, then the first of each; and its probability."""

    def __init__(self, given: list[int]) -> None:
        self.given, self.taken, self.counts, self.prob = given, list[int](), list[int](), 1.0

    def choose(self, probs: list[float]) -> int:
        step = len(self.taken)
        number = self.given[step] if step < len(self.given) else 0
        self.taken.append(number)
        self.counts.append(len(probs))
        self.prob *= probs[number]
        return number

    def next(self) -> list[int] | None:
        """Returns the outcomes of the next run; None after the last."""
        taken = list(self.taken)
        while taken and taken[-1] + 1 == self.counts[len(taken) - 1]:
            taken.pop()
        return None if not taken else [*taken[:-1], taken[-1] + 1]


class Draw:
    """A uniform number that is not known: a comparison with a bound has both outcomes."""

    def __init__(self, script: Script, scale: float = 1.0) -> None:
        self.script, self.scale = script, scale

    def __mul__(self, scale: float) -> Draw:
        return Draw(self.script, self.scale * float(scale))

    def __lt__(self, bound: float) -> bool:
        share = min(1.0, float(bound) / self.scale) if self.scale > 0 else float(bound > 0)
        return self.script.choose([share, 1 - share]) == 0


def runs(rule: Callable[[Script], Prefix]) -> Iterator[tuple[Prefix, float]]:
    given: list[int] | None = []
    while given is not None:
        script = Script(given)
        emitted = rule(script)
        yield emitted, script.prob
        given = script.next()


def drafts(
    form: tuple[int, ...], draft: Dists, stops: bool
) -> Iterator[tuple[list[int], list[np.ndarray], float, int]]:
    """Yields every draft: tokens, the distribution of each, its probability and its number of nodes.

    Args:
        form: parents.
        draft: its distributions.
        stops: the chain ends after token 0.
    """
    for tokens in itertools.product(range(VOCAB), repeat=len(form) - 1):
        named, prob, dists = [VOCAB, *tokens], 1.0, [np.zeros(VOCAB)]
        for node in range(1, len(form)):
            dist = draft(path_to(form, named, form[node])).copy()
            for sibling in range(1, node):
                if form[sibling] == form[node]:
                    dist[named[sibling]] = 0
            dist /= dist.sum()
            dists.append(dist)
            prob *= dist[named[node]]
        nodes = 1 + next((i for i, token in enumerate(tokens, 1) if stops and token == 0), len(tokens))
        if prob > 0 and not any(tokens[nodes - 1 :]):  # drafts that differ after their end are one
            chance = float(np.prod([dists[node][named[node]] for node in range(1, nodes)]))
            yield named[:nodes], dists[:nodes], chance, nodes


def path_to(form: tuple[int, ...], tokens: list[int], node: int) -> Prefix:
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


def variation(
    form: tuple[int, ...], target: Dists, draft: Dists, monkeypatch: pytest.MonkeyPatch, *, stops: bool = False
) -> tuple[float, float]:
    """Returns the total variation between emitted tokens and the target's, and the mean number of kept drafts."""
    num, mean = max(map(len, (path_to(form, [0] * len(form), n) for n in range(len(form))))) + 1, 0.0
    got: dict[Prefix, float] = {}
    for tokens, dists, chance, nodes in drafts(form, draft, stops):
        parents, named = np.array(form[:nodes]), np.array(tokens)
        probs = np.stack([target(path_to(form, tokens, node)) for node in range(nodes)])

        def rule(script: Script, named=named, parents=parents, probs=probs, dists=dists) -> Prefix:  # type: ignore[no-untyped-def]
            def draw(dist: np.ndarray, uniform: object) -> int:
                return script.choose((dist / dist.sum()).tolist())

            monkeypatch.setattr(acceptance, "draw", draw)
            uniforms = np.array([[Draw(script)] * 2 for _ in named], dtype=object)
            uniforms[0, 0] = 0.0 if form == CHAIN[: len(form)] else NODE_BY_NODE
            path, token = accept_slot(named, parents, probs, uniforms, np.stack(dists))
            return (*named[path[1:]].tolist(), token)

        for emitted, prob in runs(rule):
            mean += chance * prob * (len(emitted) - 1)
            if prob > 0:
                for text, share in joint(target, num, emitted).items():
                    got[text] = got.get(text, 0.0) + chance * prob * share
    wanted = joint(target, num)
    assert abs(sum(got.values()) - 1) < 1e-12
    return 0.5 * sum(abs(got.get(text, 0.0) - prob) for text, prob in wanted.items()), mean


def worst(form: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, *, stops: bool = False) -> float:
    pairs = [(random_dists(seed, 0.7), random_dists(seed + 100, 0.7)) for seed in range(NUM_PAIRS)]
    return max(variation(form, target, draft, monkeypatch, stops=stops)[0] for target, draft in pairs)


@pytest.mark.parametrize(("form", "stops"), [(CHAIN, False), (CHAIN, True), (TREE, False), (WIDE, False)], ids=str)
def test_the_emitted_tokens_have_the_targets_distribution(
    form: tuple[int, ...], stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worst(form, monkeypatch, stops=stops) < 1e-12


def test_a_block_keeps_what_the_theory_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sun et al.'s example: 11/9 drafts of two are kept; a rule that decides draft by draft keeps 10/9."""
    target, draft = (lambda _: np.array([1 / 3, 2 / 3, 0])), (lambda _: np.array([2 / 3, 1 / 3, 0]))
    assert variation((-1, 0, 1), target, draft, monkeypatch) == pytest.approx((0, 11 / 9), abs=1e-12)
    for dist_after in (target, lambda _: np.array([0.0, 1.0, 0.0])):  # the draft is the target, and greedy
        assert variation((-1, 0, 1), dist_after, dist_after, monkeypatch) == pytest.approx((0, 2), abs=1e-12)


CAPPED = "out=(mass > 0).astype(np.float64), where=mass < drafted)"
UNCAPPED = "out=np.zeros(batch), where=drafted > 0)"
SCALED = "scaled = weights[:, :, None]"
MUTANTS = {
    "stops at the first prefix that fails": {
        "kept: Ints = np.where(is_passed, index, 0).max(axis=1)": (
            "kept = np.cumprod(is_passed[:, 1:], axis=1).sum(axis=1).astype(np.int64)"
        )
    },
    "residual without the weight": {"rests = scaled[each, kept]": "rests = target_probs[each, kept]"},
    "no look-ahead": {"np.where(index == ends[:, None], weights, passes)": "weights"},
    "weights are not capped": {CAPPED: UNCAPPED},
    "weights are capped at the end alone": {CAPPED: UNCAPPED, SCALED: f"weights = np.minimum(weights, 1); {SCALED}"},
    "the whole chain passes as a prefix does": {"np.where(index == ends[:, None], weights, passes)": "passes"},
    "the next token is the target's own": {"(kept < ends)[:, None], rests": "(kept < 0)[:, None], rests"},
}


@pytest.mark.mutant
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_block_rule_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among them are the two forms of hierarchical decoding (arXiv 2601.05724) without the running cap."""
    source = inspect.getsource(acceptance.keep_block)
    for right, wrong in MUTANTS[mutant].items():
        assert source.count(right) == 1
        source = source.replace(right, wrong)
    made: dict[str, object] = dict(vars(acceptance))
    exec("from __future__ import annotations\n" + source, made)
    monkeypatch.setattr(acceptance, "keep_block", made["keep_block"])
    pairs = [(random_dists(seed, 0.7), random_dists(seed + 100, 0.7)) for seed in range(NUM_PAIRS)]
    assert max(variation(CHAIN[:3], *pair, monkeypatch)[0] for pair in pairs) > 1e-3
