# SPDX-License-Identifier: Apache-2.0
import pytest

from speccompile.certificate.caches import check_caches
from speccompile.certificate.greedy import plain_texts
from tests.certificate.certificate_lab import PROMPTS, StaleRow, StrictEngine, make_engine

NUM = 30


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
    plain = plain_texts(make_engine(), PROMPTS, NUM)
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
        found = check_caches(engine, PROMPTS, plain_texts(make_engine(), PROMPTS, NUM))
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
