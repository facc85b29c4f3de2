# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from speccompile.certificate.greedy import check_greedy, check_reference, plain_texts
from speccompile.certificate.ties import find_divergences, first_difference, text_from_divergences
from tests.certificate.certificate_lab import PROMPTS, TARGET, StaleRow, WrongFollower, make_engine
from tests.mock_lm import VOCAB

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
