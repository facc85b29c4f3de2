# SPDX-License-Identifier: Apache-2.0
"""The acceptance rules by enumeration, see `rules_lab`: the emitted tokens have the target's distribution to 1e-12."""

import numpy as np
import pytest

from tests.core.rules_lab import (
    CHAIN,
    PAIRS,
    SIBLINGS,
    TREE,
    TWO_PATHS,
    WIDE,
    Form,
    OneHot,
    OneNumber,
    Ones,
    Rule,
    WithoutReplacement,
    enumerated,  # noqa: F401
    mutate,
)

pytestmark = pytest.mark.usefixtures("enumerated")
DRAWN, MATCHED = {"by_match": False}, {"by_match": True}
RACED = {**MATCHED, "races": True, "drafts_share": "next"}


class Stopping(Rule):
    stops = True


def worst(form: Form, rule: type[Rule] = Rule, **options: object) -> float:
    return max(rule(*pair, form, **options).distance()[0] for pair in PAIRS)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", [CHAIN, SIBLINGS, (-1, 0, 0, 0), TREE, WIDE, TWO_PATHS], ids=str)
def test_drawn_drafts_leave_the_targets_distribution(form):
    assert worst(form, **DRAWN) < 1e-12


def test_a_chain_may_end_after_any_draft():
    assert worst(CHAIN, Stopping, **DRAWN) < 1e-12


def test_two_paths_keep_more_than_one():
    for pair in PAIRS:
        one, two = (Rule(*pair, form, **DRAWN).distance()[1] for form in (CHAIN[:3], TWO_PATHS))
        assert two > one


@pytest.mark.parametrize("form", [CHAIN, TREE], ids=str)
@pytest.mark.parametrize("share", ["", "next"])
@pytest.mark.parametrize("races", [True, False])
def test_drafts_that_are_matched_leave_it_whatever_they_know(form, share, races):
    """Own numbers, or those that give the target's token: in a race, or by the inverse distribution function."""
    assert worst(form, by_match=True, races=races, drafts_share=share) < 1e-12


@pytest.mark.parametrize("form", [CHAIN[:3], SIBLINGS], ids=str)
def test_a_lookups_drafts_may_be_told_as_one_hot(form):
    assert worst(form, OneHot, **DRAWN) < 1e-12


def test_a_block_keeps_what_the_theory_says():
    """Sun et al.'s example: 11/9 drafts of two are kept; a rule that decides draft by draft keeps 10/9."""
    target, draft = (lambda _: np.array([1 / 3, 2 / 3, 0])), (lambda _: np.array([2 / 3, 1 / 3, 0]))
    form = CHAIN[:3]
    assert Rule(target, draft, form, **DRAWN).distance() == pytest.approx((0, 11 / 9), abs=1e-12)
    for dist_after in (target, lambda _: np.array([0.0, 1.0, 0.0])):  # the draft is the target, and greedy
        assert Rule(dist_after, dist_after, form, **DRAWN).distance() == pytest.approx((0, 2), abs=1e-12)


def test_a_race_keeps_what_the_theory_says():
    """Daliri et al. 2024: both races have the same winner with this probability; of two siblings one is it oftener."""
    for target_after, draft_after in PAIRS:
        target, draft = target_after(()), draft_after(())
        ratio = np.maximum(target[None] / target[:, None], draft[None] / draft[:, None])
        match = (1 / ratio.sum(axis=1)).sum()
        assert Rule(target_after, draft_after, CHAIN[:2], **RACED).distance()[1] == pytest.approx(match, abs=1e-12)
        assert Rule(target_after, draft_after, SIBLINGS, **RACED).distance()[1] > match
        assert Rule(target_after, target_after, CHAIN, **RACED).distance()[1] == pytest.approx(3, abs=1e-12)


CAPPED = "out=(mass > 0).astype(np.float64), where=mass < drafted)"
UNCAPPED = "out=np.zeros(batch), where=drafted > 0)"
SCALED, REST = "scaled = weights[:, :, None]", "residual(scaled[slot, kept[slot]], draft_probs[slot, kept[slot] + 1])"
ENDS = "np.where(index == ends[:, None], weights, passes)"
BLOCKS = {
    "stops at the first prefix that fails": {
        "kept: Ints = np.where(is_passed, index, 0).max(axis=1)": (
            "kept = np.cumprod(is_passed[:, 1:], axis=1).sum(axis=1).astype(np.int64)"
        )
    },
    "residual without the weight": {"residual(scaled[": "residual(target_probs["},
    "no look-ahead": {ENDS: "weights"},
    "weights are not capped": {CAPPED: UNCAPPED},
    "weights are capped at the end alone": {CAPPED: UNCAPPED, SCALED: f"weights = np.minimum(weights, 1); {SCALED}"},
    "the whole chain passes as a prefix does": {ENDS: "passes"},
    "the next token is the target's own": {REST: "target_probs[slot, kept[slot]]"},
    "a prefix of full weight does not pass": {"out=np.ones_like(sums)": "out=np.zeros_like(sums)"},
}
NEXT = "chosen[np.arange(len(slots)), kept], 1]"
SLOTS: dict[str, tuple[Form, dict[str, object], dict[str, str]]] = {
    "a block's next token is drawn with the number that refused a draft": (
        CHAIN[:3],
        DRAWN,
        {NEXT: "chosen[0, np.minimum(kept + 1, ends)], 0]"},
    ),
    "a tree's next token is drawn with the number that refused a draft": (
        SIBLINGS,
        DRAWN,
        {NEXT: "chosen[0, ends], 0]"},
    ),
    "the residual of the draft's own distribution": (
        SIBLINGS,
        DRAWN,
        {"rows, probs,": "rows, draft_probs[0, chosen],"},
    ),
    "a race runs with its parent's times": (
        CHAIN[:3],
        RACED,
        {"uniforms[slots, last[slots]])": "uniforms[slots, np.maximum(last[slots] - 1, 0)])"},
    ),
    "a match on another path is kept": ((-1, 0, 0, 1), RACED, {"links[slots] == last": "links[slots] >= last"}),
    "a draft that lost is taken out, and another race decides": (
        CHAIN[:2],
        RACED,
        {
            "        slots = slots[is_kept]": (
                "        if not is_kept[0] and not last[0]:\n"
                "            row = np.where(np.arange(3) == tokens[0, 1], 0, rows_at(slots, last))\n"
                "            following = race(row, uniforms[:, 1])\n"
                "        slots = slots[is_kept]"
            )
        },
    ),
}


@pytest.mark.mutant
@pytest.mark.parametrize("mutant", BLOCKS)
def test_a_wrong_block_rule_is_noticed(mutant, monkeypatch):
    """Among them are the two forms of hierarchical decoding (arXiv 2601.05724) without the running cap."""
    mutate("keep_block", BLOCKS[mutant], monkeypatch)
    assert worst(CHAIN[:3], **DRAWN) > 1e-3


@pytest.mark.mutant
@pytest.mark.parametrize("mutant", SLOTS)
def test_a_wrong_walk_is_noticed(mutant, monkeypatch):
    form, options, changes = SLOTS[mutant]
    assert worst(form, **options) < 1e-12
    mutate("decide", changes, monkeypatch)
    assert worst(form, **options) > 1e-3


NUM, BEST = "is_child.sum(axis=1))", "np.where(is_child, classes, -1)"
CHOICES = {
    "verified as if it had not been chosen": ("choose_paths", NUM, "np.ones_like(some))"),
    "one draw too many is counted": ("choose_paths", NUM, "is_child.sum(axis=1) + 1)"),
    "equal siblings are counted once": ("choose_paths", NUM, "np.array([len(set(drawn[is_child].tolist()))]))"),
    "the lowest class is chosen": ("choose_paths", BEST, "np.where(is_child, -classes, -9)"),
    "the most probable draft is chosen": ("choose_paths", BEST, "np.where(is_child, drafted, -1)"),
    "masses of single classes": ("chosen_probs", "classes > c", "classes == c + 1"),
    "factors are not by class": (
        "chosen_probs",
        "np.take_along_axis(factors",
        "factors[:, :1] + 0 * np.take_along_axis(factors",
    ),
}


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", CHOICES)
def test_a_wrong_choice_is_noticed(wrong, monkeypatch):
    function, right, changed = CHOICES[wrong]
    mutate(function, {right: changed}, monkeypatch)
    assert worst(SIBLINGS, **DRAWN) > 1e-3


WRONG: dict[str, tuple[Form, type[Rule], dict[str, object]]] = {
    "a block is drawn with the numbers that decide over it": (CHAIN[:3], Rule, {**DRAWN, "drafts_share": "accept"}),
    "a block is drawn with the numbers of the next tokens": (CHAIN[:3], Rule, {**DRAWN, "drafts_share": "next"}),
    "a tree is drawn with the numbers that decide over it": (SIBLINGS, Rule, {**DRAWN, "drafts_share": "accept"}),
    "a tree is drawn with the numbers of the next tokens": (SIBLINGS, Rule, {**DRAWN, "drafts_share": "next"}),
    "drafts of a race are verified as drawn, and recovered by it": (CHAIN[:3], Rule, {**RACED, **DRAWN}),
    "a lookup's drafts have probability one in a block": (CHAIN[:3], Ones, DRAWN),
    "a lookup's drafts have probability one in a tree": (SIBLINGS, Ones, DRAWN),
    "siblings are drawn without replacement": (SIBLINGS, WithoutReplacement, DRAWN),
    "siblings are drawn with one number": (SIBLINGS, OneNumber, DRAWN),
}


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_drafts_are_noticed(wrong):
    form, rule, options = WRONG[wrong]
    assert worst(form, rule, **options) > 1e-3


class Cut(Rule):
    drops_impossible = True


@pytest.mark.mutant
def test_drawn_drafts_may_not_be_cut_before_one_that_is_impossible():
    """As a grammar's mask might: the cut tells what was drawn. The draft must stay, as one that is refused."""

    def target(prefix: tuple[int, ...]) -> np.ndarray:
        return np.array([0.7, 0.3, 0])

    def draft(prefix: tuple[int, ...]) -> np.ndarray:
        return np.array([0.4, 0.3, 0.3])

    for form in (CHAIN[:2], SIBLINGS):
        assert Rule(target, draft, form, **DRAWN).distance()[0] < 1e-12
    wrong = Cut(target, draft, CHAIN[:2], **DRAWN)
    assert wrong.distance()[0] == pytest.approx(0.7 - 0.61, abs=1e-12)
