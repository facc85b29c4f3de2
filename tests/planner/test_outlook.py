# SPDX-License-Identifier: Apache-2.0
"""Acceptance from each source, recorded traffic, the choice among rows, and the page."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from speccompile.core.sampling_params import SamplingParams
from speccompile.errors import RecipeError
from speccompile.planner import acceptance
from speccompile.planner.acceptance import (
    ASSUMED,
    Acceptance,
    assumed,
    expected_length,
    published,
    published_rows,
    rates_from_lengths,
    read_acceptance,
)
from speccompile.planner.candidates import Candidate
from speccompile.planner.costs import LOOP_S, RUN_S, WeightCounts
from speccompile.planner.machine import find_machine
from speccompile.planner.outlook import BREAK_EVEN_BATCHES, Row, best_row, choose, rows_of, speeds, step_work
from speccompile.planner.page import page_of_plan
from speccompile.planner.traffic import CONTEXT, Traffic, count_lookups, read_traffic
from speccompile.runtime.record import KIND
from tests.planner.test_costs import GRAPH, MACHINE

DRAFT = replace(GRAPH, name="draft", counts=WeightCounts(10**5, 10**5, 0), num_layers=1, cache_columns=0)
GRAPHS = {"target": GRAPH, "draft": DRAFT}
NGRAM = Candidate("ngram", {"method": "ngram"})
EAGLE3 = Candidate("head", {"method": "eagle3", "model": "somewhere"})


def text_of(histogram, by_position, num_steps=None):
    steps = sum(histogram) if num_steps is None else num_steps
    return {"stats": {"num_steps": steps, "acceptance_histogram": histogram, "acceptance_by_position": by_position}}


def test_stated_rates_are_a_range_by_position():
    assert expected_length((0.5,), 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert expected_length((0.8, 0.5), 2) == pytest.approx(1 + 0.8 + 0.4) and expected_length((0.8,), 0) == 1.0
    stated = read_acceptance("0.8,1")
    assert stated.low == pytest.approx((0.75, 0.95)) and stated.high == pytest.approx((0.85, 1.0))
    assert len(read_acceptance(",".join(["0.85"] * 60)).low) == 60  # longer than a file's name may be
    for wrong in ("1.5", "high", ""):
        with pytest.raises(RecipeError, match="rates from 0 to 1"):
            read_acceptance(wrong)


def test_rates_are_counted_in_results_of_three_commands(tmp_path):
    texts = [text_of([20, 40, 40], [0.8, 0.5]), text_of([60, 40], [0.4])]
    modes = {"modes": {"plain": {}, "speculative": {"acceptance": texts}}}
    of_kind = {"by_category": {"code": {"modes": {"ngram speculative": {"acceptance": texts[1:]}}}}}
    file = tmp_path / "out.json"
    for document in (texts, {"results": texts, "differences": []}, modes):
        file.write_text(json.dumps(document))
        counted = read_acceptance(str(file))
        assert counted.low[0] < 0.6 < counted.high[0] and counted.source == "counted in out.json"
        # The texts have 80 and 40 of 100: by the ratio of sums 0.6 +- 1.96 sqrt(2 (20^2 + 20^2)) / 200.
        assert counted.low[0] == pytest.approx(0.6 - 1.96 * 0.2) and counted.high[0] == pytest.approx(0.6 + 1.96 * 0.2)
        assert counted.low[1] < 0.5 < counted.high[1] and len(counted.low) == 2
    file.write_text(json.dumps({**modes, **of_kind}))
    code, other = (read_acceptance(str(file), kind) for kind in ("code", "chat"))
    assert code.low[0] < 0.4 < code.high[0] and len(code.low) == 1 and other.low == counted.low
    assert code.high[0] - code.low[0] == pytest.approx(2 * 1.96 * (0.4 * 0.6 / 100) ** 0.5)  # of a single text
    modes["modes"]["ngram speculative"] = {"acceptance": texts[1:]}  # of `bench --also`
    file.write_text(json.dumps(modes))
    assert read_acceptance(str(file), None, "ngram").low == code.low
    assert read_acceptance(str(file), None, "eagle3").low == read_acceptance(str(file)).low == counted.low
    for wrong in ('{"no": 1}', "[1]", "3", '{"modes": {"plain": {}}}'):
        file.write_text(wrong)
        with pytest.raises(RecipeError, match="acceptance_by_position"):
            read_acceptance(str(file))
    file.write_text(json.dumps([text_of([], [])]))
    with pytest.raises(RecipeError, match="no drafts in it"):
        read_acceptance(str(file))


def test_a_draft_that_a_lookup_does_not_make_counts_as_refused(tmp_path):
    file = tmp_path / "out.json"
    file.write_text(json.dumps([text_of([10, 20, 20], [0.8, 0.8], num_steps=200)]))  # 15 of 40 drafted one token alone
    found = read_acceptance(str(file))
    assert found.drafted == 1 and found.of_lookups.drafted == 50 / 200
    traffic = Traffic(given={"ngram": found, "head": found})
    assert traffic.acceptance(EAGLE3).low == found.low and found.low[0] < 0.8 < found.high[0]
    first, second = zip(traffic.acceptance(NGRAM).low, traffic.acceptance(NGRAM).high, strict=True)
    assert sum(first) / 2 == pytest.approx(40 / 200) and sum(second) / 2 == pytest.approx(20 / 40)


def test_every_published_length_has_a_source_and_can_be_one():
    rows = published_rows()
    assert {row["method"] for row in rows} >= {"eagle", "eagle3", "mtp", "dflash", "ngram"}
    for row in rows:
        assert row["source"] and row["model"] and row["kind"] and 0 <= row["temperature"] <= 1
        assert row["drafts"] == sorted(set(row["drafts"])) and len(row["drafts"]) == len(row["tokens"])
        assert all(1 < tokens <= num + 1 for num, tokens in zip(row["drafts"], row["tokens"], strict=True))


def test_lengths_become_rates_that_give_them_back():
    rates = rates_from_lengths([1, 2, 4], [1.8, 2.4, 3.0])
    assert [expected_length(rates, num) for num in (1, 2, 4)] == pytest.approx([1.8, 2.4, 3.0])
    assert rates[2] == rates[3] and rates_from_lengths([1, 2, 3], [1.8, 1.7, 2.4])[1:] == pytest.approx([0.5] * 2)


def test_published_acceptance_is_a_range_by_kind_and_temperature():
    rows = [row for row in published_rows() if row["method"] == "eagle3" and row["kind"] == "code"]
    found, firsts = published("eagle3", "code", 1.0), [row["tokens"][0] for row in rows]
    width = max(firsts) - min(firsts)
    assert found.lengths(1) == pytest.approx((min(firsts) - width, max(firsts) + width))
    assert found.source == "published, 4 of code, sampled"
    chat, one = published("eagle3", "chat", 0.0), published("eagle3", "chat", 1.0)
    assert chat.source == one.source == "published, 1 of chat, greedy" and chat.low[0] < chat.high[0]
    assert published("eagle3", "poems", None).source.startswith("published, 5 of chat/code, greedy/sampled")
    assert published("medusa", "chat", 0.0) is None
    assert published("self_draft", "chat", 0.0).source == "measured by us, 1 of chat, greedy"


def test_a_published_drafter_is_in_the_range_of_the_others(monkeypatch):
    rows, hits = published_rows(), []
    for left in [row for row in rows if row["kind"] == "code"]:
        monkeypatch.setattr(acceptance, "published_rows", lambda left=left: [row for row in rows if row != left])
        found = published(left["method"], "code", 1.0)
        for num, tokens in zip(left["drafts"], left["tokens"], strict=True):
            low, high = found.lengths(num)
            hits.append(low <= tokens <= high)
    assert len(hits) > 80 and sum(hits) / len(hits) > 0.95


def test_what_is_known_of_a_candidate():
    stated, own = Acceptance((0.3,), (0.4,), "stated"), Acceptance((0.7,), (0.8,), "own")
    medusa = Candidate("m", {"method": "medusa", "model": "somewhere"})
    several = Candidate("both", {"method": "hybrid", "drafters": [NGRAM.section, EAGLE3.section]})
    traffic = Traffic("chat", given={"": stated, "eagle3": own})
    assert traffic.acceptance(EAGLE3) is own and traffic.acceptance(medusa) is stated
    assert traffic.acceptance(NGRAM) is None and traffic.acceptance(several) is None
    assert Traffic("editing").acceptance(NGRAM).source == "published, 1 of editing, greedy"
    assert Traffic().acceptance(NGRAM).source == "published, 2 of mixed, greedy"
    assert Traffic().acceptance(medusa) == assumed() and assumed().low == (ASSUMED[0],)
    assert Traffic().acceptance(Candidate("suffix", {"method": "suffix"})) is None


def write_record(path, *texts, **sampling):
    lines = [{"kind": KIND, "speccompile": "1", "bundle": None}]
    for prompt, output in texts:
        request = {"prompt": prompt, "sampling": sampling, "num_outputs": 1, "num_images": 0, "speculation": "auto"}
        lines.append({"requests": [request], "outputs": [{"tokens": output, "finish_reason": "length"}]})
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_lookups_are_counted_in_recorded_texts(tmp_path, method):
    loop, fresh = [5, 6, 7] * 200, list(range(100, 300))
    found = count_lookups({"method": method}, [(loop[:12], loop[12:])])
    assert expected_length(found.low, 8) > 8.5 and found.source == "counted in 1 recorded texts"
    assert count_lookups({"method": method}, [(fresh[:20], fresh[20:])]).high == (0.0,)
    mixed = count_lookups({"method": method}, [(loop[:12], loop[12:50]), (fresh[:20], fresh[20:])])
    assert mixed.low[0] < 0.2 < mixed.high[0] and count_lookups({"method": method}, [([1], [2])]) is None
    record = write_record(tmp_path / "record.jsonl", (loop[:12], loop[12:]), ("a text", [1, 2]), temperature=0.7)
    traffic = read_traffic(record, None, {})
    assert (traffic.temperature, traffic.context, len(traffic.texts)) == (0.7, 600, 1)
    assert traffic.acceptance(Candidate(method, {"method": method})).low == found.low
    assert traffic.acceptance(EAGLE3) == published("eagle3", None, 0.7)


def test_recorded_drafts_are_those_of_a_step_by_step_count():
    # Endings 3 8, 8 1, 9 4 and 4 1 are new; after 1 2 came 3 8, of which 3 is kept; after 3 9 came 1, but now 4; the
    # last 1 2 drafts 3, as one more token is left for the target: 9 tokens in 7 steps, whatever the chain's length.
    text = ([1, 2, 3, 9, 1, 2, 3], [8, 1, 2, 3, 9, 4, 1, 2, 3, 9])
    found = count_lookups({"method": "ngram", "min_match": 2, "max_match": 2}, [text])
    assert found.low == found.high == (pytest.approx(9 / 7 - 1),) and found.drafted == 3 / 7


def test_traffic_is_a_kind_or_a_record(tmp_path):
    assert read_traffic(None, 0.5, {}) == Traffic(None, 0.5) and read_traffic("chat", None, {}).context == CONTEXT
    with pytest.raises(RecipeError, match=r"chat, code, editing, .* or a file of serve --record"):
        read_traffic("prose", None, {})
    with pytest.raises(RecipeError, match="or a file of serve --record"):
        read_traffic("prose" * 60, None, {})
    with pytest.raises(RecipeError, match="no text of token ids"):
        read_traffic(write_record(tmp_path / "record.jsonl", ("a text", [1, 2])), None, {})
    assert SamplingParams().temperature == 0  # of records that state none


def test_the_best_chain_and_the_batches_to_which_it_pays():
    row = best_row("drafted", GRAPHS, MACHINE, Acceptance((0.8,), (0.8,), "stated"), 1, 0)

    def speed(k, rate=0.8):
        engines_s = GRAPH.step_s(MACHINE, k + 1) + DRAFT.drafts_s(MACHINE, k, 1, 0)
        return expected_length((rate,), k) / (engines_s + MACHINE.host * (LOOP_S + GRAPH.host_s + k * RUN_S))

    stated = Acceptance((0.8,), (0.8,), "stated")
    plain_s = GRAPH.step_s(MACHINE, 1) + MACHINE.host * LOOP_S
    ((found, of_plain), _), _ = speeds(GRAPHS, (MACHINE, MACHINE), stated, 3, 1, 0)
    assert found == pytest.approx(speed(3)) and of_plain == pytest.approx(speed(3) * plain_s)
    assert speeds(GRAPHS, (MACHINE, MACHINE), stated, 0, 1, 0)[0][0] == pytest.approx((1 / plain_s, 1.0))
    seldom = replace(stated, drafted=0.25)  # as of lookups
    step_s = 0.25 * (GRAPH.step_s(MACHINE, 4) + MACHINE.host * (LOOP_S + GRAPH.host_s)) + 0.75 * plain_s
    (found, _), _ = speeds({"target": GRAPH}, (MACHINE, MACHINE), seldom, 3, 1, 0)[0]
    assert found == pytest.approx(expected_length((0.8,), 3) / step_s)
    assert row.tokens_per_s[0] < row.tokens_per_s[1] < speed(row.num_drafts) and row.of_plain[0] > 1
    assert row.break_even[0] == row.break_even[1] and row.break_even[0] in (2, 4, 8, 16)
    assert row.memory_bytes == 2 * (10**6 + 4096) and row.uncertain["drafts"] == 0 < row.uncertain["machine"]
    assert row.cells[-1].startswith("machine ") and row.cells[-2] == f"{row.break_even[0]}"
    wide = best_row("drafted", GRAPHS, MACHINE, Acceptance((0.1,), (0.9,), "stated"), 1, 0)
    assert wide.break_even[0] < wide.break_even[1] and wide.uncertain["drafts"] > 0.2
    assert wide.cells[-2] == f"0-{wide.break_even[1]}" and wide.of_plain[0] < 1 < wide.of_plain[1]
    plain = best_row("none", GRAPHS, MACHINE, assumed(), 4, 0)
    assert plain.num_drafts == 0 and plain.of_plain == (1.0, 1.0) and plain.break_even == (None, None)
    assert plain.cells[5] == plain.cells[8] == ""


def test_the_work_of_a_step_counts_experts_that_are_read():
    assert step_work(GRAPH, 4, 2) == (2e6 * 8, 1e6)
    mixture = replace(GRAPH, counts=WeightCounts(10**7, 10**7, 0, num_experts=9 * 10**6), num_experts=16, num_chosen=4)
    operations, read = step_work(mixture, 1, 1)
    assert operations == pytest.approx(2 * (1e6 + 9e6 / 4)) and read == pytest.approx(1e6 + 9e6 / 4)
    assert step_work(mixture, 64, 1)[1] == pytest.approx(1e7, rel=1e-3)


def row(method, batch, speed, token_ms):
    pair = (speed, speed)
    return Row(method, "int8", batch, 1, pair, (1.0, 1.0), token_ms, 1.0, 1.0, (None, None), {}, "", (1.0, 1.0, 1.0))


def test_the_choice_follows_latency_or_throughput():
    rows = [row("a", 1, 100, 10.0), row("b", 1, 90, 11.0), row("c", 8, 400, 20.0)]
    assert [choose(rows, *goal).method for goal in ((None, False), (None, True), (15.0, False), (25.0, False))] == [
        "a", "c", "a", "c",
    ]  # fmt: skip
    with pytest.raises(RecipeError, match=r"at least 10\.00 ms"):
        choose(rows, 5.0, False)
    with pytest.raises(RecipeError, match="fits into the memory"):
        choose([], None, False)


def test_where_drafts_pay_is_a_range():
    cases = {(None, None): ">512", (1, 1): "never", (8, 8): "8", (1, 32): "0-32", (16, None): "16+", (1, None): "0+"}
    one = replace(row("a", 1, 100, 10.0), uncertain={"drafts": 0.0})
    assert {ends: replace(one, break_even=ends).cells[-2] for ends in cases} == cases


@pytest.mark.parametrize("machine", [MACHINE, find_machine("H100-SXM")], ids=lambda machine: machine.name)
def test_the_page_is_whole_and_has_the_figures_of_the_rows(machine):
    known = {"none": assumed(), "a<b": Acceptance((0.6,), (0.9,), "stated & sure")}
    graphs = {"none": {"target": GRAPH}, "a<b": GRAPHS}
    rows = rows_of(graphs, machine, known, BREAK_EVEN_BATCHES, 100)
    page = page_of_plan("my <model>", machine, "m (x; not measured by us)", rows, rows[0])
    tree = ElementTree.fromstring(page.partition("\n")[2].replace('<meta charset="utf-8">', ""))
    assert not re.search(r"(src|href|url|@import|https?:)", page.replace("http://www.w3.org", ""))
    tables = [[["".join(cell.itertext()) for cell in line] for line in table] for table in tree.iter("table")]
    assert [tuple(line) for line in tables[-2][1:]] == [one.cells for one in rows]
    assert sorted(tables[-1][1:]) == [["a<b", "stated & sure"], ["none", assumed().source]]
    drawings = list(tree.iter("svg"))
    texts = ["".join(text.itertext()) for text in drawings[1].iter("text")]
    ratios = {one.batch: sum(one.of_plain) / 2 for one in rows if one.num_drafts}
    assert texts[10:] == ["a<b", *(f"{ratios[batch]:.2f}" for batch in BREAK_EVEN_BATCHES)]
    assert len(list(drawings[0].iter("circle"))) == len(rows) and "not measured by us" in page
    assert all(0 <= float(circle.get(axis)) <= 720 for circle in drawings[0].iter("circle") for axis in ("cx", "cy"))
    limits = {line[0]: line[1:] for line in tables[1][1:]}
    peak, bandwidth = machine.rates["int8"], machine.bandwidth
    assert float(limits["int8"][0]) == pytest.approx(peak / 1e12, rel=1e-2)
    assert float(limits["int8"][1]) == pytest.approx(bandwidth / 1e9, rel=1e-3)
    assert float(limits["int8"][2]) == pytest.approx(peak / (2 * bandwidth), rel=0.2)


def test_rows_that_do_not_fit_are_left_out_of_the_map():
    small = replace(MACHINE, memory_bytes=2 * 10**6 + 8 * 8192)
    rows = rows_of({"a": GRAPHS}, small, {"a": assumed()}, BREAK_EVEN_BATCHES, 0)
    page = page_of_plan("m", small, "m", rows, rows[0])
    assert [one.batch for one in rows] == [1, 2, 4, 8] and page.count("does not fit into the memory") == 6
