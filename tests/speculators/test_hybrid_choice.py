# SPDX-License-Identifier: Apache-2.0
"""Which of several drafters runs, with planted acceptance and costs, and wrong choices that must be noticed."""

import inspect
import itertools
import random

import pytest

from speccompile.core.jobs import StepCosts
from speccompile.drafting.budget import FORGOTTEN_STEPS
from speccompile.speculators.hybrid import choice
from speccompile.speculators.hybrid.choice import READ_OVER, DrafterCosts, Offer, choose

SCORES = (10.0, 10.5, 11.0, 11.5, 12.0, 12.5)


def wanted(known, num_known, offers, scores):
    """The definition: the step with the most tokens a millisecond; of equals the first."""
    rows = [(sum(1 + k for k in known) / scores[num_known], -1)]
    for index, offer in enumerate(offers):
        wins = [new > old for old, new in zip(known, offer.expected, strict=True)]
        if any(wins):
            tokens = sum(1 + max(pair) for pair in zip(known, offer.expected, strict=True))
            num = max(offer.num_drafts, 0 if all(wins) else num_known)
            rows.append((tokens / (scores[num] + offer.ms), index))
    return rows


def planted(choose, seed):
    """Compares a choice with its definition on planted acceptance and costs."""
    rng = random.Random(seed)
    num_slots = rng.randint(1, 4)
    known = [rng.choice((0.0, 0.0, rng.uniform(0, 5))) for _ in range(num_slots)]
    num_known = rng.randint(1, 5) if any(known) else 0
    offers = [
        Offer([rng.choice((0.0, rng.uniform(0, 3))) for _ in range(num_slots)], rng.randint(1, 5), rng.uniform(0.1, 8))
        for _ in range(rng.randint(1, 3))
    ]
    scores = tuple(itertools.accumulate([rng.uniform(1, 10), *(rng.uniform(0, 2) for _ in range(5))]))
    rows = wanted(known, num_known, offers, scores)
    best = max(rate for rate, _ in rows)
    taken = choose(known, num_known, offers, scores)
    assert {index: rate for rate, index in rows}[taken] == pytest.approx(best)
    # Without costs the most tokens win, and no one takes part who brings nothing.
    most = [sum(known), *(sum(map(max, known, offer.expected)) for offer in offers)]
    assert most[1 + choose(known, num_known, offers, ())] == pytest.approx(max(most))


@pytest.mark.parametrize("seed", range(60))
def test_the_most_tokens_a_millisecond_win(seed):
    planted(choose, seed)


def test_a_short_table_of_choices():
    model = Offer([2.0], 3, 4.0)  # 3 tokens in 15.5 ms
    assert choose([0.0], 0, [model], SCORES) == 0  # against 1 in 10
    assert choose([1.0], 4, [model], SCORES) == 0  # against 2 in 12
    assert choose([1.5], 4, [model], SCORES) == -1  # against 2.5 in 12
    assert choose([1.5], 4, [Offer([2.0], 3, 1.0)], SCORES) == 0
    assert choose([1.5, 0.0], 4, [Offer([2.0, 2.0], 3, 12.0)], SCORES) == -1
    assert choose([1.5, 0.0], 4, [Offer([1.0, 2.0], 3, 4.0)], SCORES) == 0  # one keeps its drafts, one gets others


MUTANTS = {
    "time does not count": ("tokens * least_ms > most_tokens * ms", "tokens > most_tokens"),
    "the next token does not count": ("next_tokens = len(known) if scores else 0", "next_tokens = 0"),
    "its runs cost nothing": ("len(scores) - 1)] + drafting_ms", "len(scores) - 1)]"),
    "drafts are added up": ("sum(max(pair) for pair in pairs)", "sum(map(sum, pairs))"),
    "known drafts are scored for nothing": ("ms_of(num_known, 0.0)", "ms_of(0, 0.0)"),
    "kept drafts are scored for nothing": ("num_known if keeps else 0)", "0)"),
    "the last of the better wins": ("best, most_tokens, least_ms = index, tokens, ms", "best = index"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_choices_are_noticed(name):
    right, wrong = MUTANTS[name]
    source = inspect.getsource(choice)
    assert source.count(right) == 1, name
    made = {"__name__": choice.__name__}
    exec(compile(source.replace(right, wrong), "mutant", "exec"), made)
    with pytest.raises(AssertionError):  # noqa: PT012
        for seed in range(60):
            planted(made["choose"], seed)


def test_reading_and_runs_cost_what_the_bundle_recorded_times_what_was_measured():
    costs = DrafterCosts([StepCosts(((1, 1.0), (11, 3.0)))])
    assert costs.recorded_ms(1, 2.0, 0) == (3.0, 0.0)
    assert costs.recorded_ms(1, 2.0, 10) == (3.0, 2.0)
    assert costs.ms(1, 2.0, 10) == 3 + 2 / READ_OVER
    assert DrafterCosts([StepCosts(((1, 1.0),))], drafts_per_run=3).recorded_ms(1, 2.0, 0)[0] == 1.0
    for _ in range(200):
        costs.observe(1, 2.0, 10, 10e-3)  # twice as long
    assert costs.ms(1, 2.0, 10) == pytest.approx(2 * (3 + 2 / READ_OVER), rel=1e-3)
    quick = DrafterCosts([StepCosts(((1, 1.0), (11, 3.0)))])
    for _ in range(10):
        quick.observe(1, 2.0, 0, 30e-3)  # ten times as long: recorded on another machine
    assert 20 < quick.ms(1, 2.0, 0) <= 30.1
    assert costs.ms(2, 2.0, 0) == DrafterCosts([StepCosts(((1, 1.0), (11, 3.0)))]).ms(2, 2.0, 0)  # another batch
    costs.observe(1, 2.0, 10, 10.0)  # held up by other processes
    assert costs.ms(1, 2.0, 10) < 2.1 * (3 + 2 / READ_OVER)


def test_a_first_run_does_not_count_and_what_is_not_used_is_forgotten():
    """Otherwise a drafter whose first run read its weights from disk would never run again."""
    costs = DrafterCosts([StepCosts(((1, 1.0),))])
    costs.observe(1, 2.0, 0, 1.0)  # memory is laid out
    assert costs.ms(1, 2.0, 0) == 3.0
    for _ in range(50):
        costs.observe(1, 2.0, 0, 30e-3)
    dear = costs.ms(1, 2.0, 0)
    assert dear > 20
    for _ in range(FORGOTTEN_STEPS - 1):
        costs.rest(1)
    costs.rest(2)  # another batch
    assert costs.ms(1, 2.0, 0) == dear
    costs.observe(1, 2.0, 0, 30e-3)
    for _ in range(FORGOTTEN_STEPS):
        assert costs.ms(1, 2.0, 0) > 20
        costs.rest(1)
    assert costs.ms(1, 2.0, 0) == 3.0
