# SPDX-License-Identifier: Apache-2.0
"""Acceptance and speed by category and by context length, over an engine in numpy."""

import io
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from speccompile.benchmark.rounds import run_rounds
from speccompile.benchmark.samples import (
    TEXTS,
    Sample,
    figures_by_group,
    groups_from_samples,
    read_lengths,
    samples_from_prompts,
)
from speccompile.benchmark.summary import summary_from_runs
from speccompile.benchmark.tables import figure, print_report
from speccompile.benchmark.worker import decode_with
from speccompile.cli.bench import read_categories
from speccompile.cli.main import main
from speccompile.cli.prompts import read_requests
from speccompile.common.chat_prompts import read_chats
from speccompile.errors import RuntimeFault
from tests.lab.engines import mock_engine
from tests.mock_lm import MockLM

CATEGORIES = {"code", "chat", "math", "json", "copy-edit"}
MODES = ["plain", "speculative"]
NUM_TOKENS = 16


class InProcess:
    """What `benchmark.rounds.Worker` is, around an engine of this process."""

    modes = MODES

    def __init__(self, prompts: list[list[int]]) -> None:
        target = MockLM(seed=21)
        sizes = {"slots": 1, "max_seq": 96, "chunk": 128}
        engine = mock_engine(target, target.blurred(22, 0.7), "draft_model", num_draft_tokens=4, **sizes)
        self._decode = decode_with(engine)
        self._prompts = prompts

    def run(self, mode: str, prompt: int) -> dict[str, Any]:
        return {**self._decode(mode, self._prompts[prompt], NUM_TOKENS), "peak_rss_bytes": None}


def test_figures_of_groups_are_those_of_their_prompts_alone():
    rng = np.random.default_rng(3)
    prompts = [Sample(rng.integers(0, 24, 6 + n).tolist(), "code" if n % 2 else "json") for n in range(4)]
    lengths = [8, 40]
    samples = samples_from_prompts(prompts, lengths)
    ids = [sample.ids for sample in samples]
    runs = run_rounds([InProcess(ids)], len(ids), 2)
    groups = groups_from_samples(samples, lengths)
    assert groups["by_category"] == {"json": [0, 2, 4, 6], "code": [1, 3, 5, 7]}
    assert groups["by_context"] == {"8": [0, 1, 2, 3], "40": [4, 5, 6, 7]}
    reference = [result["tokens"] for result in runs["plain"][0]]
    reference[5] = [-1]  # of "code" and "40"
    figures = figures_by_group(runs, groups, reference, ())
    for members, told in ((groups[kind][name], figures[kind][name]) for kind in groups for name in groups[kind]):
        results = [one[i] for one in runs["speculative"] for i in members]
        steps, accepted = (sum(result[key] for result in results) for key in ("num_steps", "num_accepted"))
        row = told["modes"]["speculative"]
        assert row["mean_acceptance_length"] == pytest.approx(1 + accepted / steps) and accepted > 0
        assert told["modes"]["plain"]["mean_acceptance_length"] == 1
        kept = sum(i * num for text in row["acceptance"] for i, num in enumerate(text["stats"]["acceptance_histogram"]))
        assert kept == sum(runs["speculative"][-1][i]["num_accepted"] for i in members)
        assert row["num_equal"] == len(members) - (5 in members)
        assert row["num_tokens"] == NUM_TOKENS * len(members) and told["num_prompts"] == len(members)
        seconds = [sum(one[i]["total_s"] - one[i]["prefill_s"] for i in members) for one in runs["speculative"]]
        assert row["tokens_per_s"] == pytest.approx(
            np.median([(row["num_tokens"] - len(members)) / s for s in seconds])
        )
    # The groups of a kind hold every prompt once: tokens of all add up to the whole.
    whole = summary_from_runs(runs)["modes"]["speculative"]["num_tokens"]
    for kind in figures:
        assert sum(group["modes"]["speculative"]["num_tokens"] for group in figures[kind].values()) == whole


def test_contexts_are_the_last_tokens_of_alike_prompts():
    prompts = [Sample([1, 2, 3], "a"), Sample([4, 5], "a"), Sample([7], "b")]
    assert samples_from_prompts(prompts, []) == prompts
    made = samples_from_prompts(prompts, [2, 7])
    assert [s.ids for s in made[:3]] == [[2, 3], [4, 5], [7, 7]]
    assert [s.ids for s in made[3:]] == [[4, 5, 4, 5, 1, 2, 3], [2, 3, 1, 2, 3, 4, 5], [7] * 7]
    assert [s.category for s in made] == ["a", "a", "b"] * 2
    with pytest.raises(RuntimeFault, match="a prompt of no tokens"):
        samples_from_prompts([Sample([], None)], [4])


def test_without_lengths_buckets_are_powers_of_two_and_categories_may_be_missing():
    samples = [Sample([0] * n, None) for n in (5, 32, 33, 64, 130)]
    groups = groups_from_samples(samples, [])
    assert groups == {"by_category": {}, "by_context": {"up to 32": [0, 1], "up to 64": [2, 3], "up to 256": [4]}}


def test_texts_of_ours_are_of_five_categories():
    counts = Counter(request.category for request in read_categories("all", False))
    assert set(counts) == CATEGORIES and set(counts.values()) == {6}
    assert {r.category for r in read_categories("json, math", False)} == {"json", "math"}
    texts = [request.prompt for request in read_requests(TEXTS)]
    assert len(set(texts)) == 30 and all(isinstance(text, str) and 40 < len(text) < 600 for text in texts)
    for wanted in ("poetry", "", "code,poetry"):
        with pytest.raises(RuntimeFault, match=r"some of code, chat, math, json, copy-edit.*without a chat template"):
            read_categories(wanted, False)


def test_a_model_with_a_template_gets_conversations():
    found = read_categories("all", True)
    assert len(found) == len(read_chats()) and all(request.messages for request in found)
    names = list(dict.fromkeys(request.category for request in found))
    assert names == ["code", "dialogue", "maths", "rewriting", "languages"]
    with pytest.raises(RuntimeFault, match=r"some of code, dialogue, maths, rewriting, languages.*with a "):
        read_categories("json", True)


@pytest.mark.parametrize(("names", "has_template"), [("code,json", False), ("maths,code", True)])
def test_limits_count_within_a_category(names, has_template):
    found = read_categories(names, has_template, 2)
    first, second = sorted(names.split(","))
    assert [request.category for request in found] == [first, first, second, second]


@pytest.mark.parametrize("given", [(), ("--prompts", "x", "--categories", "all")])
def test_prompts_are_of_one_source(given, capsys):
    assert main(["bench", "bundle", *given]) == 2
    assert "give either --prompts or --categories" in capsys.readouterr().err


def test_lengths_leave_room_for_the_new_tokens():
    assert read_lengths(None, 64, 16) == []
    assert read_lengths("32, 8,8", 64, 16) == [8, 32]
    for text in ("49", "0", "a", "", "-3"):
        with pytest.raises(RuntimeFault, match=r"whole numbers from 1 to 48.*64 rows and 16 are new"):
            read_lengths(text, 64, 16)


def test_a_file_of_prompts_may_have_categories(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ({"prompt": "x", "category": "mine"}, {"prompt": "y"})))
    assert [request.category for request in read_requests(path)] == ["mine", None]
    path.write_text('{"prompt": "x", "category": 3}')
    with pytest.raises(RuntimeFault, match=r"p\.jsonl:1 \(category\): got 3; expected the name of a kind of text"):
        read_requests(path)


def report_of(names: tuple[str, ...], groups: list[str]) -> dict[str, Any]:
    runs = {name: [[one_result(0.03 + 0.001 * turn)] * 2 for turn in range(-2, 3)] for name in names}
    members = {"by_category": {name: [at] for at, name in enumerate(groups)}, "by_context": {"up to 32": [0, 1]}}
    found = {**summary_from_runs(runs), **figures_by_group(runs, members, None, ())}
    record = {"reference": {"not_run": "no"}, "left_out": {"openvino int4": "no kernel"}, "warnings": ["busy"]}
    return {**found, **record, "environment": {"repeats": 5}}


def one_result(total_s: float) -> dict[str, Any]:
    return {"tokens": [1] * 50, "total_s": total_s, "prefill_s": 0.0, "first_token_s": 0.1, "num_steps": 25,
            "num_accepted": 25, "outside_s": 0.001, "peak_rss_bytes": 1}  # fmt: skip


def test_every_mode_is_a_row_and_nothing_is_cut_in_80_columns():
    names = ("plain", "speculative", "transformers", "transformers-assisted", "draft_model plain", "ngram speculative")
    report = report_of(names, ["copy-edit", "json"])
    out = io.StringIO()
    print_report(Console(file=out, width=80), report)
    told = out.getvalue()
    tables = told[: told.index("Medians of")].splitlines()
    assert "…" not in told and all(len(line) <= 80 for line in tables)
    speed = f" {figure(50 / 0.03, None)} ±"
    before = [line.partition(speed)[0].rstrip() for line in tables if speed in line]
    for name in names:  # of all prompts and of two categories: a row each
        assert sum(text == name or text.endswith(f" {name}") for text in before) >= 3, name
    assert "copy-edit" in told and "context" not in told  # of one context there is no table
    assert "left out: openvino int4: no kernel" in told and told.rstrip().endswith("busy")
