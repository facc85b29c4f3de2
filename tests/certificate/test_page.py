# SPDX-License-Identifier: Apache-2.0
import re
from types import SimpleNamespace

import pytest

from speccompile.certificate.page import CHECKS, html_from_certificate, text_from_fact, words_from_key
from speccompile.certificate.results import Check, certificate_from_checks
from speccompile.certificate.verify import STEPS

CERTIFICATE = {
    "verdict": "incomplete",
    "speccompile_version": "1",
    "created_at": "2026-11-26",
    "bundle": {"digest": "ab" * 32, "files": {"graphs/target/graph.onnx": "cd" * 32}},
    "versions": {"numpy": "2"},
    "checks": [
        {
            "name": "sampled",
            "status": "passed",
            "summary": "as <it> should",
            "seconds": 12.3456789,
            "num_draft_tokens": 1234,
            "num_draft_steps": 400,
            "least_draft_tokens_of_a_run": 100,
            "has_enough_drafts": True,
            "temperature": 1.0,
            "prompt": [1, 2, 3],
            "runs": [
                {"run": "plain", "p_value": 0.12345678901234567, "num_draft_tokens": 0, "divergences": []},
                {"run": "drafts", "p_value": 1.2345678901234567e-07, "num_draft_tokens": 1234, "divergences": []},
            ],
        },
        {
            "name": "acceptance",
            "status": "not run",
            "summary": "too few drafts",
            "seconds": 0.1,
            "loop": {"bound": 0.02, "engine": {"length": 2.3456789, "kept": [3, 1]}},
        },
        {"name": "distance", "status": "not run", "summary": "no checkpoint", "seconds": 0.0},
    ],
}


@pytest.fixture(scope="module")
def page():
    return html_from_certificate(CERTIFICATE)


def test_the_summary_comes_first_with_the_drafts_that_each_check_scored(page):
    first = page[: page.index("<h2>")]
    assert "Certificate: incomplete" in first and "3 checks: 1 passed, 2 not run." in first
    assert "1234 in 400 steps" in first and first.count("none needed") == 2
    assert "as &lt;it&gt; should" in first and "12.3" in first


def test_names_are_words_and_numbers_have_three_digits(page):
    assert set(CHECKS) == set(STEPS)
    assert "0.123" in page and "1.23e-07" in page and "2.35" in page and not re.search(r"\d\.\d{4,}", page)
    body = re.sub(r"<style>.*</style>", "", page, flags=re.S)
    assert not re.search(r"\b(num|is|has)_|p_value|draft_tokens|[{}\[\]]", body)
    assert "the plain loop in torch: engine" in page and "length 2.35; kept 3, 1" in page
    assert "divergences" not in page  # there are none
    assert (words_from_key("num_steps"), text_from_fact([True, None, 0.5])) == ("steps", "yes, none, 0.5")


def test_a_phone_gets_rows_as_lists_of_titles_and_values(page):
    assert "<meta name=viewport content='width=device-width, initial-scale=1'>" in page
    assert "@media (max-width: 48rem)" in page and "table, tr, td { display: block; max-width: 100% }" in page
    assert "overflow-wrap: anywhere" in page and "white-space: nowrap" in page
    assert '<td data-of="result">passed</td>' in page and '<td class=n data-of="seconds">12.3</td>' in page


def test_a_certificate_is_json_where_a_number_is_infinite():
    bundle = SimpleNamespace(manifest={"digest": "ab", "files": {}})
    made = certificate_from_checks(bundle, [Check("caches", "failed", "", {"row_deviation": float("inf")})], {})
    assert made["checks"][0]["row_deviation"] is None
