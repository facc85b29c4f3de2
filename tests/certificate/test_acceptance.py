# SPDX-License-Identifier: Apache-2.0
import pytest

from speccompile.certificate.acceptance import Acceptance, check_acceptance, is_near, is_no_less, outcomes_of
from speccompile.certificate.results import Check, check_of, not_run, verdict_of


def acceptance(*steps, num=3):
    return Acceptance.of(outcomes_of(steps), num)


def test_shares_are_by_position_and_chains_that_end_early_are_not_tried():
    found = acceptance((3, 3), (3, 1), (3, 0), (1, 1), (0, 0))
    assert found.tried == (4, 2, 1) and found.kept == (3, 1, 1)
    assert found.shares == [0.75, 0.5, 1.0]
    assert found.length == pytest.approx(1 + 5 / 5)
    assert acceptance().length == 1 and acceptance().shares == [0, 0, 0]


def test_what_differs_by_two_percent_is_not_near():
    def chains(first, second, num=1000):
        return Acceptance(num, (num, first), (first, second))

    assert is_near(chains(600, 300), chains(600, 300), 0.02)
    assert is_near(chains(600, 300), chains(610, 306), 0.02)
    assert not is_near(chains(600, 300), chains(640, 300), 0.02)
    assert not is_near(chains(600, 300), chains(600, 370), 0.02)
    assert is_near(acceptance((3, 1), (3, 2)), acceptance((3, 2), (3, 1)), 0.02)


def test_one_chain_never_decides():
    few = Acceptance(20, (20, 10, 3), (10, 3, 1))
    assert is_near(few, Acceptance(20, (20, 10, 3), (10, 3, 2)), 0.04)
    assert not is_near(few, Acceptance(20, (20, 10, 3), (10, 7, 1)), 0.2)


def test_quantised_drafts_may_have_more_and_little_less():
    """The bundle and the loop, as seen with the example pair: int8 target, int4 draft."""
    loop = Acceptance(165, (165, 101, 63, 34), (101, 63, 34, 18))
    assert is_no_less(Acceptance(148, (148, 92, 69, 46), (92, 69, 46, 33)), loop, 0.15)
    assert not is_near(Acceptance(148, (148, 92, 69, 46), (92, 69, 46, 33)), loop, 0.15)
    assert is_no_less(Acceptance(175, (175, 100, 55, 27), (100, 55, 27, 10)), loop, 0.15)  # by chance, at the last one
    assert not is_no_less(
        Acceptance(240, (240, 100, 50, 26), (100, 50, 26, 14)), loop, 0.15
    )  # the first is wired wrongly
    assert not is_no_less(Acceptance(170, (170, 104, 66, 0), (104, 66, 0, 0)), loop, 0.15)  # there is no third
    assert is_no_less(Acceptance(9, (9, 0, 0, 0), (0, 0, 0, 0)), Acceptance(9, (9, 0, 0, 0), (0, 0, 0, 0)), 0.15)


def test_without_a_checkpoint_it_is_not_run():
    check = check_acceptance(None, [], [], None, "no checkpoint here")
    assert (check.status, check.summary) == ("not run", "no checkpoint here")


def test_one_failed_check_fails_the_certificate():
    good, bad = check_of("a", True, "", {}), check_of("b", False, "", {})
    assert verdict_of([good, not_run("c", "why")]) == "passed"
    assert verdict_of([good, bad]) == "failed"
    assert Check("a", "passed", "s", {"x": 1}, 0.123).json_from_check() == {
        "name": "a", "status": "passed", "summary": "s", "seconds": 0.12, "x": 1
    }  # fmt: skip
