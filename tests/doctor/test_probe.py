# SPDX-License-Identifier: Apache-2.0
"""Which reading is named, from counts of accepted drafts."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from speccompile.doctor.probe import (
    GROUP_STARTS,
    MAX_ROUNDS,
    Convention,
    ProbeReport,
    accepted_drafts,
    compare_readings,
    difference,
    text_of,
)

pytestmark = pytest.mark.export

NUM_DRAFTS, TEXTS, STARTS = 4, 3, 64


def convention(name: str, stated: Any, *others: Any) -> Convention:
    return Convention(name, f"config.json ({name})", stated, others, f"Correct {name}: {{value}}.")


def drafter(truth: dict[str, Any], losses: dict[str, float], best: float = 0.8) -> Any:
    """Returns a measure of drafts that are accepted with `best`, and less for each value that is not `truth`'s."""

    def measure(readings: Sequence[Any]) -> list[list[np.ndarray]]:
        counts = []
        for reading in readings:
            share = best * float(np.prod([losses[n] for n, v in truth.items() if reading[n] != v and n in losses]))
            hits = np.random.default_rng(0).random((TEXTS, STARTS, NUM_DRAFTS)) < share
            counts.append([np.cumprod(text, 1).sum(1) for text in hits])
        return counts

    return measure


def probe(conventions: list[Convention], measure: Any) -> ProbeReport:
    return compare_readings(conventions, measure, NUM_DRAFTS)


ORDER, SHIFT = convention("order", "a", "b"), convention("shift", 0, 1, -1)


def test_a_file_that_is_right():
    report = probe([ORDER, SHIFT], drafter({"order": "a", "shift": 0}, {"order": 0.1, "shift": 0.5}))
    assert (report.verdict, report.meant, report.alike, report.findings) == ("as stated", {}, {}, ())
    assert [m.changed for m in report.readings] == [{}, {"order": "b"}, {"shift": 1}, {"shift": -1}]
    first, other = report.readings[:2]
    assert first.gain == first.standard_error == 0 and first.num_starts == TEXTS * STARTS
    assert other.gain == pytest.approx(other.mean_acceptance_length - first.mean_acceptance_length, abs=1e-3)
    assert other.by_position[0] == pytest.approx(0.08, abs=0.04)


def test_of_few_neighbouring_chains_no_error_is_known():
    report = probe([ORDER], lambda readings: [[np.arange(GROUP_STARTS) % 3] for _ in readings])
    assert report.verdict == "undecided" and [m.standard_error for m in report.readings] == [None, None]
    json.dumps(report.json_from_report(), allow_nan=False)


def test_an_error_is_named_with_what_to_do():
    report = probe([ORDER, SHIFT], drafter({"order": "b", "shift": 0}, {"order": 0.1, "shift": 0.5}))
    assert (report.verdict, report.meant) == ("otherwise", {"order": "b"})
    (finding,) = report.findings
    assert (finding.severity, finding.check, finding.where) == ("error", "probe", "config.json (order)")
    assert finding.got.startswith("order a, mean acceptance length 1.") and finding.expected.startswith("b, with which")
    assert finding.todo == "Correct order: b."


def test_two_errors_of_which_one_hides_the_other():
    losses = {"order": 0.3, "shift": 0.6}
    report = probe([SHIFT, ORDER], drafter({"order": "b", "shift": -1}, losses))
    assert report.meant == {"order": "b", "shift": -1} and len(report.findings) == 2


def test_at_most_so_many_errors():
    names = [f"c{i}" for i in range(MAX_ROUNDS + 1)]
    report = probe([convention(n, 0, 1) for n in names], drafter(dict.fromkeys(names, 1), dict.fromkeys(names, 0.7)))
    assert len(report.meant) == MAX_ROUNDS


def test_values_that_the_texts_cannot_tell_apart_are_said_to_be_alike():
    report = probe([ORDER, SHIFT], drafter({"order": "a", "shift": 0}, {"order": 0.1}))
    assert (report.verdict, report.alike) == ("as stated", {"shift": [1, -1]})


def counts_of(**values: Any) -> Any:
    """Returns a measure with the counts of each value of `shift`, by "s0", "s1" and "s_1"; the same in all texts."""
    names = {0: "s0", 1: "s1", -1: "s_1"}
    return lambda readings: [[np.asarray(values[names[r["shift"]]])] * TEXTS for r in readings]


def test_of_values_that_are_alike_the_first_is_named():
    """Both are surely better than 0, and -1 is better than 1 by a chance of one group in four."""
    zero, one = np.full(STARTS, 1), np.full(STARTS, 3)
    lucky = np.repeat([4, 3, 3, 3], STARTS // 4)
    assert lucky.mean() - one.mean() > 0.05
    assert probe([SHIFT], counts_of(s0=zero, s1=one, s_1=lucky)).meant == {"shift": 1}
    surely = np.full(STARTS, 4)
    assert probe([SHIFT], counts_of(s0=zero, s1=one, s_1=surely)).meant == {"shift": -1}


def test_a_gain_that_is_small_or_by_chance_names_nothing():
    zero = np.full(STARTS, 2)
    small = np.where(np.arange(STARTS) % 32 == 0, 3, 2)  # the same in every second group: 0.03 tokens, never less
    chance = np.repeat([4, 1, 2, 2], STARTS // 4)  # 0.25 tokens, of which one group has all
    worse = np.zeros(STARTS, dtype=np.int64)
    report = probe([SHIFT], counts_of(s0=zero, s1=small, s_1=worse))
    assert (report.verdict, report.alike) == ("as stated", {"shift": [1]})
    report = probe([SHIFT], counts_of(s0=zero, s1=worse, s_1=chance))
    assert (report.verdict, report.alike) == ("as stated", {"shift": [-1]})


@pytest.mark.parametrize(
    ("best", "reason"), [(0.01, "of first drafts are accepted"), (0.6, "no reading is better or worse")]
)
def test_nothing_is_claimed_where_nothing_shows(best, reason):
    report = probe([ORDER, SHIFT], drafter({"order": "b"}, {}, best))
    assert report.verdict == "undecided" and reason in report.reason and report.meant == {}
    (finding,) = report.findings
    assert finding.severity == "warning" and finding.got == report.reason and finding.where == "config.json"


def test_a_small_difference_by_chance_is_none():
    """Half of the groups of starts speak for one reading, half for the other."""
    one = [np.repeat([1, 3, 0, 2], GROUP_STARTS)]
    other = [np.repeat([2, 1, 1, 1], GROUP_STARTS)]
    mean, error = difference(one, other)
    # By hand: a group's difference to the mean is -1.25, 1.75, -1.25 or 0.75; sqrt(4 / 3 * 6.75) / 4.
    assert mean == 0.25 and error == pytest.approx(0.75)
    assert difference([np.array([1, 2])], [np.array([0, 0])]) == (1.5, float("inf"))


def test_accepted_drafts_end_at_the_first_miss():
    text = np.array([9, 1, 2, 3, 4, 5])
    drafts = np.array([[2, 3, 4], [3, 9, 5], [9, 4, 5]])
    assert accepted_drafts(drafts, text, np.array([1, 2, 2])).tolist() == [3, 1, 0]


def test_values_are_shown_as_json():
    assert [text_of(v) for v in ("a b", True, [1, 2], 10000.0)] == ["a b", "true", "[1, 2]", "10000.0"]
