# SPDX-License-Identifier: Apache-2.0
"""Greedy multi-path block verification by enumeration, see `rules_lab`: exact to 1e-12, and wrong forms are noticed."""

from typing import Any

import numpy as np
import pytest

from speccompile.core import acceptance, multi_path
from tests.core.rules_lab import (
    CHAIN,
    PAIRS,
    SIBLINGS,
    TREE,
    WIDE,
    Prefix,
    Rule,
    Script,
    Uniform,
    follow_draws,
    mutate,
    path_to,
)

TWO_PATHS = (-1, 0, 0, 1, 2)


class Paths(Rule):
    """Siblings are independent draws; `one_number`: those of a depth are not. See `Rule`."""

    one_number = False

    def __call__(self, script: Script) -> Prefix:
        form, accepts, last = self.form, [Uniform(script) for _ in self.form], Uniform(script)
        tokens, dists = [0], [np.zeros(len(self.draft(())))]
        uniforms: Any = np.empty((len(form), 2), dtype=object)
        uniforms[0] = 0.0, last
        of_depth: dict[int, Uniform] = {}
        for node in range(1, len(form)):
            above = path_to(form, tokens, form[node])
            number = of_depth.setdefault(len(above), Uniform(script)) if self.one_number else Uniform(script)
            dists.append(self.draft(above))
            tokens.append(number.draw(dists[-1]))
            uniforms[node] = accepts[len(above)], last  # nodes of one depth share their numbers
        rows = np.stack([self.target(path_to(form, tokens, node)) for node in range(len(form))])
        path, token = multi_path.accept_paths(np.array(tokens), np.array(form), rows, uniforms, np.stack(dists))
        assert [form[node] for node in path[1:]] == path[:-1]
        return (*(tokens[node] for node in path[1:]), token)


class OneNumber(Paths):
    one_number = True


@pytest.fixture(autouse=True)
def enumerated(monkeypatch: pytest.MonkeyPatch) -> None:
    follow_draws(multi_path, monkeypatch)
    follow_draws(acceptance, monkeypatch)


def worst(form: tuple[int, ...], rule: type[Rule] = Paths) -> float:
    return max(rule(*pair, form, by_match=False).distance()[0] for pair in PAIRS)


@pytest.mark.parametrize("form", [CHAIN, SIBLINGS, (-1, 0, 0, 0), TREE, WIDE, TWO_PATHS], ids=str)
def test_the_chosen_path_leaves_the_targets_distribution(form):
    assert worst(form) < 1e-12


def test_it_keeps_more_than_siblings_without_replacement_and_as_much_as_a_block():
    for pair in PAIRS:
        chain, two = (Paths(*pair, form, by_match=False).distance()[1] for form in (CHAIN[:3], TWO_PATHS))
        assert chain == pytest.approx(Rule(*pair, CHAIN[:3], by_match=False).distance()[1], abs=1e-12)
        assert two > chain


NUM, BEST = "len(children))", "np.argmax(ratio_classes(dist[drawn], draft_probs[children, drawn]))"
CHOICE = f"chosen_probs(dist, draft_probs[best], {NUM}"
WRONG = {
    "verified as if it had not been chosen": ("choose_path", CHOICE, "draft_probs[best]"),
    "one draw too many is counted": ("choose_path", NUM, "len(children) + 1)"),
    "the draws of all prefixes are counted": ("choose_path", NUM, "2)"),
    "the lowest class is chosen": ("choose_path", BEST, BEST.replace("argmax", "argmin")),
    "the most probable draft is chosen": ("choose_path", BEST, "np.argmax(draft_probs[children, drawn])"),
    "masses of single classes": ("chosen_probs", "np.cumsum(mass[::-1])[::-1]", "mass"),
    "factors are not by class": ("chosen_probs", "[classes]", "[classes * 0]"),
    "the residual of the draft's own distribution": ("keep_path", "probs[None]", "draft_probs[nodes][None]"),
}


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_form_is_noticed(wrong, monkeypatch):
    function, right, changed = WRONG[wrong]
    mutate(function, {right: changed}, monkeypatch, multi_path)
    assert worst(TWO_PATHS if "all prefixes" in wrong else SIBLINGS) > 1e-3


@pytest.mark.mutant
def test_siblings_that_are_drawn_with_one_number_are_noticed():
    assert worst(SIBLINGS, OneNumber) > 1e-3
