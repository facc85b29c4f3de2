# SPDX-License-Identifier: Apache-2.0
"""A lookup that is asked without drafting finds what drafting would score, and changes nothing of it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.registry import method
from speccompile.drafting.budget import Budget
from speccompile.drafting.candidates import Candidates
from speccompile.drafting.lookup import LooksUp, first_path, lookup_from_chain

COSTS = StepCosts(((1, 1.0), (8, 1.4), (16, 2.0)))
LOOKUPS: list[tuple[str, dict[str, Any]]] = [
    ("ngram", {}),
    ("suffix", {}),
    ("suffix", {"tree": "auto"}),
    ("hybrid", {"drafters": [{"method": "ngram"}, {"method": "suffix"}]}),
]


def make(name: str, config: dict[str, Any], costs: StepCosts | None = COSTS) -> Any:
    made = method(name)
    context = MethodContext(2, 512, 15, {"target": costs} if costs else {})
    return made.make_proposer(made.Config(**config), {}, context)


def batch_of(tokens: list[int]) -> Any:
    sequence = SimpleNamespace(
        tokens=list(tokens), max_drafts=99, grammar=None, sampling=None, draft_state=None, has_draft=True
    )
    return SimpleNamespace(sequences=[sequence], is_forced=False, is_greedy=True, least_drafts=0, may_draw=False)


@pytest.mark.parametrize(("name", "config"), LOOKUPS)
@pytest.mark.parametrize("costs", [COSTS, None])
def test_what_is_looked_up_is_what_is_drafted(name: str, config: dict[str, Any], costs: StepCosts | None) -> None:
    rng, num_found = np.random.default_rng(3), 0
    for _ in range(40):
        text = rng.integers(0, 4, int(rng.integers(2, 60))).tolist()
        if rng.random() < 0.5:
            text += text[: len(text) // 2]
        looks, drafts = (make(name, config, costs), batch_of(text)), (make(name, config, costs), batch_of(text))
        for proposer, batch in (looks, drafts):
            proposer.start(0, batch.sequences[0])
        for _ in range(3):
            found = looks[0].look_up(looks[1].sequences[0], len(text), 1)
        wanted, got = drafts[0].propose(drafts[1]), looks[0].propose(looks[1])
        np.testing.assert_array_equal(got.tokens, wanted.tokens)
        np.testing.assert_array_equal(got.parents, wanted.parents)
        row = [int(wanted.tokens[0, node]) for node in range(1, int(wanted.num_nodes[0]))]
        if config.get("tree") != "auto" and name != "hybrid":
            assert found.tokens == row
        assert found.cost == pytest.approx(COSTS.ms(1 + len(found.tokens)) if costs else 1.0)
        num_found += len(found.tokens) > 0
    assert num_found > 20


def test_a_combination_looks_up_with_the_drafter_that_finds_more() -> None:
    rng, longest = np.random.default_rng(5), 0
    for _ in range(20):
        text = rng.integers(0, 4, 40).tolist()
        lengths = []
        for name, config in (LOOKUPS[0], LOOKUPS[1], LOOKUPS[3]):
            proposer, batch = make(name, config), batch_of(text)
            proposer.start(0, batch.sequences[0])
            lengths.append(len(proposer.look_up(batch.sequences[0], len(text), 1).tokens))
        assert lengths[2] == max(lengths[:2])
        longest = max(longest, lengths[2])
    assert longest > 1


def test_as_much_of_a_chain_is_taken_as_pays_in_a_batch_of_that_size() -> None:
    budget = Budget(15, 15, 1, StepCosts(((1, 1.0), (4, 1.1), (5, 9.0), (64, 90.0))))
    tokens, paths = list(range(10)), [0.9**n for n in range(1, 11)]
    alone, together = lookup_from_chain(budget, tokens, paths, 1), lookup_from_chain(budget, tokens, paths, 4)
    assert alone.tokens == [0, 1, 2] and alone.cost == pytest.approx(1.1)
    assert together.tokens == [] and together.cost == 1.0


def test_of_a_tree_the_first_child_is_followed() -> None:
    found = Candidates.from_root(7)
    found.add(0, [1, 2], [0.6, 0.3])
    found.add(2, [3], [0.9])
    found.add(1, [4, 5], [0.5, 0.2])
    found.add(4, [6], [0.5])
    assert [found.tokens[candidate] for candidate in first_path(found)] == [1, 4, 6]


def test_methods_that_look_up_say_so() -> None:
    assert isinstance(make("ngram", {}), LooksUp) and not isinstance(make("none", {}), LooksUp)


@pytest.mark.parametrize(("name", "config"), LOOKUPS)
def test_what_comes_after_the_length_is_not_seen(name: str, config: dict[str, Any]) -> None:
    rng = np.random.default_rng(9)
    for _ in range(20):
        text = rng.integers(0, 3, 60).tolist()
        whole, grown = (make(name, config), batch_of(text)), (make(name, config), batch_of(text[:20]))
        for proposer, batch in (whole, grown):
            proposer.start(0, batch.sequences[0])
        for length in range(20, 60, 3):
            grown[1].sequences[0].tokens[:] = text[:length]
            wanted = grown[0].look_up(grown[1].sequences[0], length, 1)
            assert whole[0].look_up(whole[1].sequences[0], length, 1) == wanted
