# SPDX-License-Identifier: Apache-2.0


import numpy as np
import pytest

from speccompile.certificate.acceptance import (
    Acceptance,
    FirstDrafts,
    check_acceptance,
    is_better,
    is_near,
    is_no_less,
    outcomes_of,
)
from speccompile.certificate.caches import check_caches
from speccompile.certificate.greedy import check_greedy, check_reference, plain_texts
from speccompile.certificate.results import Check, DraftCounts, check_of, not_run, verdict_of
from speccompile.certificate.ties import find_divergences, first_difference, text_from_divergences
from speccompile.speculators.none.config import NoneProposer
from tests.certificate.certificate_lab import PROMPTS, TARGET, StaleRow, StrictEngine, WrongFollower, make_engine
from tests.certificate.shifting import check_that_a_shift_shows
from tests.mock_lm import VOCAB


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


@pytest.mark.parametrize("tree", ["chain", "auto"])
def test_without_a_checkpoint_drafts_are_compared_with_shifted_ones(tree):
    check_that_a_shift_shows(make_engine(tree=tree), PROMPTS, 40)
    engine = make_engine(tree=tree)
    check = check_acceptance(engine, PROMPTS, [[0] * 40] * 4, None, "no checkpoint here")
    assert "keep a draft" in check.summary and "no plain loop in torch: no checkpoint here" in check.summary


def test_a_bundle_that_drafts_nothing_and_one_that_drafts_little_have_passed_nothing():
    engine = make_engine()
    few = check_acceptance(engine, PROMPTS[:1], [[0] * 9], None, "why")
    assert few.status in ("not run", "failed") and not few.json_from_check()["has_enough_drafts"]
    engine.proposer = NoneProposer()
    none = check_acceptance(engine, PROMPTS, [[0] * 9] * 4, None, "why")
    assert (none.status, none.summary) == ("not run", "the bundle drafts nothing")


def test_drafts_is_better_where_no_chance_explains_it():
    assert is_better(FirstDrafts(100, 10), FirstDrafts(100, 0))
    assert not is_better(FirstDrafts(100, 3), FirstDrafts(100, 0))
    assert not is_better(FirstDrafts(100, 0), FirstDrafts(100, 0))
    assert not is_better(FirstDrafts(0, 0), FirstDrafts(100, 0)) and not is_better(FirstDrafts(9, 9), FirstDrafts(0, 0))


@pytest.mark.parametrize(("least", "status"), [(100, "passed"), (99, "not run"), (0, "not run")])
def test_a_run_with_too_few_drafts_makes_a_check_not_run(least, status):
    counts = DraftCounts({"many": (1000, 90), "few": (least, 80)})
    check = check_of("a", True, "all equal", {"x": 1}, counts)
    assert check.status == status and check_of("a", False, "one differs", {}, counts).status == "failed"
    assert ("few: " in check.summary and "many: " not in check.summary) == (least < 100)
    found = check.json_from_check()
    assert (found["num_draft_tokens"], found["num_draft_steps"]) == (1000 + least, 170)
    assert found["has_enough_drafts"] == (least >= 100) and found["x"] == 1


def test_one_failed_check_fails_the_certificate():
    good, bad = check_of("a", True, "", {}), check_of("b", False, "", {})
    assert verdict_of([good, good]) == "passed"
    assert verdict_of([good, not_run("c", "why")]) == "incomplete"
    assert verdict_of([good, bad, not_run("c", "why")]) == "failed"
    assert Check("a", "passed", "s", {"x": 1}, 0.123).json_from_check() == {
        "name": "a", "status": "passed", "summary": "s", "seconds": 0.12, "x": 1
    }  # fmt: skip


NUM = 40


def greedy(kind=None, tree="chain"):
    engine = make_engine(*([kind] if kind else []), tree=tree)
    return check_greedy(engine, PROMPTS, plain_texts(engine, PROMPTS, NUM), NUM)


def last_logits(tokens):
    return TARGET.logits(np.array(tokens))


@pytest.mark.parametrize("tree", ["chain", "auto"])
def test_texts_with_drafts_equal_plain_ones(tree):
    check = greedy(tree=tree)
    assert check.status == "passed" and "all equal" in check.summary
    runs = check.facts["runs"]
    assert [run["num_equal"] for run in runs] == [len(PROMPTS)] * 5
    assert runs[0]["num_accepted"] > 10 and runs[3]["num_draft_tokens"] == 0
    assert runs[4]["run"].startswith("drafts, sampled") and runs[4]["num_draft_tokens"] > 10


def test_a_wrong_token_after_drafts_fails():
    check = greedy(WrongFollower)
    assert check.status == "failed"
    assert "no tie: prompt" in check.summary
    shown = [d for run in check.facts["runs"][:4] for d in run["divergences"]]
    assert (
        check.facts["runs"][4]["divergences"] and shown and all(d["gap"] is not None and not d["is_tie"] for d in shown)
    )


def test_a_stale_cache_row_fails():
    assert greedy(StaleRow, tree="auto").status == "failed"


def test_plain_texts_are_the_models_own():
    assert plain_texts(make_engine(), PROMPTS, NUM) == [TARGET.greedy(prompt, NUM) for prompt in PROMPTS]


def test_a_gap_within_rounding_is_a_tie():
    prompt, wanted = [1, 2], [3, 4, 5]
    row = np.zeros(VOCAB)

    def logits_after(tokens):
        assert tokens == [1, 2, 3]
        return row

    for gap, is_tie in ((5e-5, True), (0.3, False)):
        row[4], row[7] = gap, 0.0
        [found] = find_divergences([prompt], [wanted], [[3, 7, 5]], logits_after)
        assert (found.position, found.wanted, found.got, found.is_tie) == (1, 4, 7, is_tie)
        assert found.gap == pytest.approx(gap)
    [found] = find_divergences([prompt], [wanted], [[3, 4]], logits_after)
    assert (found.gap, found.is_tie, found.got) == (None, False, -1)
    assert "unknown" in text_from_divergences([found])
    assert first_difference([1], [1]) is None and text_from_divergences([]) == ""


def test_the_reference_decides_where_numbers_are_exact():
    plain = [TARGET.greedy(prompt, NUM) for prompt in PROMPTS]
    assert check_reference(PROMPTS, plain, plain, last_logits, is_exact=True).status == "passed"
    other = [list(text) for text in plain]
    other[1][5] = (other[1][5] + 1) % VOCAB
    failed = check_reference(PROMPTS, other, plain, last_logits, is_exact=True)
    assert failed.status == "failed" and failed.facts["num_equal"] == len(PROMPTS) - 1
    stated = check_reference(PROMPTS, other, plain, last_logits, is_exact=False)
    assert stated.status == "passed" and "may differ" in stated.summary


NUM_CACHED = 30


class HiddenRows(StrictEngine):
    """Does not show its caches."""

    def read_caches(self, slot, rows):
        return None


class HiddenStale(StaleRow):
    """Does not show that its rows are stale."""

    def read_caches(self, slot, rows):
        return None


def check(kind):
    engine = make_engine(kind)
    plain = plain_texts(make_engine(), PROMPTS, NUM_CACHED)
    return check_caches(engine, PROMPTS, plain)


@pytest.mark.parametrize("kind", [StrictEngine, HiddenRows])
def test_rows_are_those_of_a_fresh_prefill(kind):
    found = check(kind)
    assert found.status == "passed", found.summary
    assert found.facts["num_sequences"] == 3 and found.facts["num_accepted"] > 20
    assert found.facts["row_deviation"] == found.facts["logit_deviation"] == 0
    assert ("not shown" in found.summary) == (kind is HiddenRows)
    assert (
        found.facts["chain_deviation"] == 0
        and f"chains along {len(PROMPTS)} texts are those of single steps in bits" in found.summary
    )


def test_a_step_of_one_row_with_other_numbers_is_stated_and_fails_where_it_is_far_off():
    for share, status in ((1e-4, "passed"), (0.5, "failed")):

        class OtherSingles(StrictEngine):
            share_ = share

            def _tail(self, feeds, tokens, logits, scored):
                outputs = super()._tail(feeds, tokens, logits, scored)
                if tokens.shape[1] == 1:
                    outputs["logits"] = outputs["logits"] * (1 + self.share_)
                return outputs

        engine = make_engine(OtherSingles)
        found = check_caches(engine, PROMPTS, plain_texts(make_engine(), PROMPTS, NUM_CACHED))
        assert found.status == status and found.facts["chain_deviation"] > share / 10
        assert "along 4 texts are those of single steps but for" in found.summary


@pytest.mark.parametrize("kind", [StaleRow, HiddenStale])
def test_a_stale_row_fails(kind):
    found = check(kind)
    assert found.status == "failed"
    assert found.facts["logit_deviation"] > 0.01 and (found.facts["row_deviation"] > 0.01) == (kind is StaleRow)


def test_an_engine_that_shows_nothing_is_not_judged(monkeypatch):
    monkeypatch.setattr("speccompile.certificate.caches.gives_logits", lambda engine: False)
    assert check(HiddenRows).status == "not run"
