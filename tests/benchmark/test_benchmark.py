# SPDX-License-Identifier: Apache-2.0
import io
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from speccompile.benchmark import measure, plot, rounds
from speccompile.benchmark import reference as benchmark_reference
from speccompile.benchmark.reference import find_reference, not_run, reference_of_round
from speccompile.benchmark.rounds import open_workers, run_rounds
from speccompile.benchmark.samples import Sample
from speccompile.benchmark.summary import QUANTILES, ratio_of_rounds, spread_of, summary_from_runs
from speccompile.benchmark.tables import equal_texts, figure, print_report
from speccompile.bundle.manifest_records import TargetRecord
from speccompile.errors import RecipeError, RuntimeFault

SECONDS = {"plain": 0.2, "speculative": 0.1}  # per token

WORKER = """
import json, sys
job = json.loads(sys.stdin.readline())
if job["modes"] == ["broken"]:
    sys.exit("cannot load it")
if job["modes"] == ["raises"]:
    def load():
        raise ValueError("no such kernel")
    load()
if job["modes"] == ["refuses"]:
    print(json.dumps({"error": dict(where="--also", got="eagle3", expected="a graph", todo="Build it.")}), flush=True)
    sys.exit()
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    mode, prompt = json.loads(line)
    n = prompt + 2
    print(json.dumps({"tokens": [n] * n, "total_s": job["s"][mode] * n + 0.5, "prefill_s": 0.5, "num_steps": 1,
                      "first_token_s": 0.6 + prompt / 10, "num_accepted": n - 1, "outside_s": 0.1,
                      "peak_rss_bytes": 7}), flush=True)
"""


@pytest.fixture
def fake_worker(monkeypatch):
    real = rounds.subprocess.Popen
    monkeypatch.setattr(rounds.subprocess, "Popen", lambda command, **kw: real([sys.executable, "-c", WORKER], **kw))


@pytest.mark.parametrize("groups", [[["plain"], ["speculative"]], [["plain", "speculative"]]])
def test_modes_take_turns_and_their_ratio_leaves_the_prefill_out(fake_worker, groups):
    turns = []
    with open_workers([{"modes": modes, "s": SECONDS} for modes in groups]) as workers:
        runs = run_rounds(workers, 2, 2, turns.append)
        processes = [worker._process for worker in workers]
    assert turns == ["plain", "speculative", "speculative", "plain"] * 1 + [
        "speculative",
        "plain",
        "plain",
        "speculative",
    ]
    assert all(process.returncode is not None for process in processes)
    report = summary_from_runs(runs)
    plain, fast = report["modes"]["plain"], report["modes"]["speculative"]
    assert plain["tokens_per_s_all"] == pytest.approx([5.0, 5.0])
    assert fast["tokens_per_s"] == pytest.approx(10.0)
    assert fast["tokens_per_s_with_prefill"] == pytest.approx(5 / 1.5)
    assert fast["first_token_ms"] == pytest.approx(650)
    assert report["ratios"] == {"speculative/plain": pytest.approx(2.0)}
    assert fast["of_plain"] == pytest.approx(2.0) and fast["of_plain_spread"] == pytest.approx(0.0)
    assert fast["mean_acceptance_length"] == 1 + 3 / 2
    assert fast["num_equal_to_plain"] == 2 and plain["num_equal_to_plain"] is None
    assert fast["outside_engine_share"] == pytest.approx(0.4)


def result(tokens, total_s=1.0):
    return {"tokens": tokens, "total_s": total_s, "prefill_s": 0, "num_steps": 1, "num_accepted": 0, "outside_s": None,
            "first_token_s": 0.1, "peak_rss_bytes": 1}  # fmt: skip


def test_texts_are_compared_with_the_reference_alone():
    runs = {"plain": [[result([1, 2]), result([3, 4, 5])]], "speculative": [[result([1, 2]), result([3, 4, 5])]]}
    modes = summary_from_runs(runs, [[1, 2, 9], [3, 8, 5]], [9])["modes"]
    for row in modes.values():  # plain decoding of the same bundle decides over nothing
        assert (row["num_equal"], row["num_texts"], row["mean_first_difference"]) == (1, 2, 1.0)
        assert equal_texts(row) == "1/2 (1)"
    assert modes["speculative"]["num_equal_to_plain"] == 2
    assert modes["plain"]["outside_engine_share"] is None


def test_without_a_reference_nothing_is_said_about_equality():
    row = summary_from_runs({"plain": [[result([1])]], "speculative": [[result([1])]]})["modes"]["speculative"]
    assert row["num_equal"] is None and equal_texts(row) == "not run"


def test_a_text_is_equal_where_it_is_in_every_round():
    rounds = [[result([1, 2]), result([3, 4])], [result([1, 7]), result([3, 4])], [result([5, 2]), result([3])]]
    row = summary_from_runs({"plain": rounds}, [[1, 2], [3, 4]])["modes"]["plain"]
    assert row["of_plain"] is None  # it is plain decoding itself
    assert row["num_equal"] == 0 and row["mean_first_difference"] == 0.5  # of the earliest in any round: 0 and 1


def test_a_ratio_is_the_quotient_of_the_columns_beside_it():
    plain, fast = [460.0, 520.0, 400.0], [573.0, 470.0, 700.0]
    runs = {
        name: [[result([1] * 100, total_s=100 / speed)] for speed in speeds]
        for name, speeds in (("plain", plain), ("speculative", fast))
    }
    report = summary_from_runs(runs)
    row = report["modes"]["speculative"]
    assert report["ratios"]["speculative/plain"] == row["of_plain"] == pytest.approx(573 / 460)
    ratio = ratio_of_rounds(fast, plain)
    assert ratio.spread == row["of_plain_spread"] == pytest.approx(spread_of([573 / 460, 470 / 520, 700 / 400]))
    assert ratio.is_noise and not ratio_of_rounds([150.0, 151.0], [100.0, 100.0]).is_noise
    assert not ratio_of_rounds([1.0], [1.0]).is_noise and spread_of([3.0]) is None  # one round says nothing


def test_the_spread_is_a_confidence_interval_of_a_median():
    assert spread_of([1.0, 2.0, 3.0]) == pytest.approx(4.30 * 1.2533 / 3**0.5)
    assert list(QUANTILES) == sorted(QUANTILES, reverse=True)
    scipy_stats = pytest.importorskip("scipy.stats")
    for at in (0, 1, 8, 17):
        assert QUANTILES[at] == pytest.approx(scipy_stats.t.ppf(0.975, at + 1), abs=0.006)


@pytest.mark.parametrize(
    ("value", "spread", "text"),
    [(1234.5, 12.3, "1234 ±12"), (99.94, 3.26, "99.9 ±3.3"), (9.876, None, "9.88"), (0.5, 0.1, "0.50 ±0.10")],
)
def test_a_figure_has_as_many_digits_as_are_of_use(value, spread, text):
    assert figure(value, spread) == text


def test_unknown_modes_are_wrong_usage_by_the_name_of_the_option():
    bundle = SimpleNamespace(recipe=SimpleNamespace(method="ngram", target=TargetRecord(model="none")))
    for wanted in ("plan", "plain,plain", ","):
        with pytest.raises(RecipeError, match="expected some of plain, speculative, transformers") as caught:
            measure.choose_modes(wanted, bundle, None)
        assert (caught.value.where, caught.value.exit_code) == ("--modes", 2)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("broken", "bench mode broken: got exit code 1: cannot load it; expected a result."),
        ("raises", "bench mode raises: got exit code 1: ValueError: no such kernel; expected a result."),
        ("refuses", "--also: got eagle3; expected a graph. Build it."),
    ],
)
def test_a_worker_that_dies_says_why_and_the_others_are_ended(fake_worker, mode, message):
    jobs = [{"modes": ["plain"], "s": SECONDS}, {"modes": [mode], "s": SECONDS}]
    with pytest.raises(RuntimeFault) as caught, open_workers(jobs):
        pass
    assert str(caught.value).startswith(message)


def test_methods_of_also_are_checked_before_anything_is_loaded():
    assert measure.read_methods(" ngram, suffix") == ["ngram", "suffix"] and measure.read_methods(None) == []
    with pytest.raises(RecipeError, match="eagle4"):
        measure.read_methods("ngram,eagle4")
    for names in ("ngram,ngram", "none"):
        with pytest.raises(RuntimeFault, match=r"--also: got .*; expected speculation methods, each once"):
            measure.read_methods(names)


@pytest.fixture
def bundle(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    recipe = SimpleNamespace(method="ngram", target=TargetRecord(model=str(tmp_path / "model")))
    return SimpleNamespace(recipe=recipe, manifest={"recipe": {"target": {}}})


@pytest.fixture
def job(bundle):
    return {"prompts": [[1], [2]], "max_new_tokens": 4, "eos_token_ids": [9], "target": bundle.recipe.target.model,
            "lora": None, "s": {"transformers": 0.1}}  # fmt: skip


@pytest.fixture
def cached(fake_worker, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(benchmark_reference.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(benchmark_reference, "version", lambda name: "1.0")


def test_the_reference_is_decoded_once_and_again_when_something_changed(cached, bundle, job, tmp_path):
    told = []
    first = find_reference(bundle, job, told.append)
    assert first.texts == [[2, 2], [3, 3, 3]] and told == [0, 1] and first.record["source"] == "run"
    again = find_reference(bundle, {**job, "s": None}, told.append)
    assert again.texts == first.texts and told == [0, 1] and again.record["source"] == "cache"
    for changed in ({"prompts": [[1], [3]]}, {"max_new_tokens": 5}, {"eos_token_ids": []}):
        assert find_reference(bundle, {**job, **changed}).record["source"] == "run"
    (tmp_path / "model/config.json").write_text('{"changed": 1}')
    assert find_reference(bundle, job).record["source"] == "run"


def test_a_reference_that_cannot_be_run_is_no_reference(cached, bundle, job, monkeypatch):
    broken = find_reference(bundle, {**job, "s": {}})  # the worker ends with a KeyError
    assert broken.texts is None and "KeyError: 'transformers'" in broken.record["not_run"]
    bundle.manifest["recipe"]["target"]["num_layers"] = 2  # the checkpoint has more: its texts are another model's
    assert "fewer layers" in find_reference(bundle, job).record["not_run"]
    bundle.recipe = SimpleNamespace(method="ngram", target=TargetRecord(model="/gone"))
    bundle.manifest["recipe"]["target"].clear()
    assert find_reference(bundle, job).record["not_run"] == "the checkpoint /gone is not at hand"
    monkeypatch.setattr(benchmark_reference.importlib.util, "find_spec", lambda name: None)
    assert "torch and transformers not installed" in find_reference(bundle, job).record["not_run"]
    assert reference_of_round([{"tokens": [4]}]).texts == [[4]]


def report_of(speeds, reference=None, **row):
    rounds = {name: [[result([1] * 50, total_s=50 / s)] for s in values] for name, values in speeds.items()}
    found = summary_from_runs(rounds, reference)
    for mode in found["modes"].values():
        mode.update(row)
    record = not_run("no package").record if reference is None else reference_record()
    environment = {"repeats": len(next(iter(speeds.values()))), "cpu": "C", "threads": 2}
    return {**found, "environment": environment, "reference": record, "left_out": {}, "warnings": []}


def reference_record():
    return {"engine": "transformers", "dtype": "float32", "versions": {"transformers": "5"}, "source": "run"}


def printed(report, width=80):
    out = io.StringIO()
    print_report(Console(file=out, width=width), report)
    return out.getvalue()


def test_the_report_says_what_is_noise_and_what_was_not_run():
    told = printed(report_of({"plain": [100.0, 90.0, 110.0], "speculative": [104.0, 101.0, 95.0]}))
    assert "speculative: no difference from plain decoding within the noise (x1.01" in told
    assert "texts: not run: no package" in told and "Medians of 3 rounds" in told
    told = printed(report_of({"plain": [100.0, 101.0, 99.0], "speculative": [201.0, 202.0, 198.0]}, [[1] * 50]))
    assert "noise" not in told and "x2.01 ±0.0" in told
    assert "1/1" in told and "texts: equal to transformers 5's greedy ones in float32" in told
    assert "nothing is known of the noise" in printed(report_of({"plain": [100.0]}))


def test_a_speculative_text_that_is_not_its_plain_one_is_told():
    report = report_of({"plain": [100.0], "speculative": [100.0]})
    report["modes"]["speculative"] |= {"num_equal_to_plain": 0, "drafts": "drafts off: they are dear"}
    assert "\nspeculative: drafts off: they are dear\n" in printed(report)
    assert "speculative: 1 of 1 texts differ from its own plain decoding's" in printed(report)


@pytest.mark.usefixtures("with_wait_share")
def test_a_busy_machine_is_told():
    modes = {"plain": {"wait_share": 0.31}, "openvino fp32 plain": {"wait_share": None}}
    environment = {"num_cores": 2, "load_average_after": [7.25, 1.0, 1.0], "recipe": {"engine": {}}}
    [line] = measure._warnings(environment, modes)
    assert line.startswith("threads that decode waited for a CPU in 31% of their time (2 cores, load average 7.2): ")
    assert measure._warnings({**environment, "load_average_after": None}, {"plain": {"wait_share": 0.05}}) == []


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_plot_has_a_panel_for_each_group(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    report = report_of({"plain": [100.0, 101.0], "speculative": [120.0, 130.0]})
    report["by_context"] = {"128": {"modes": report["modes"]}, "384": {"modes": report["modes"]}}
    file = tmp_path / f"plot{suffix}"
    plot.check_plot(file)
    plot.draw_report(report, file)
    content = file.read_bytes()
    if suffix == ".png":
        assert content.startswith(b"\x89PNG")
    else:
        assert all(f">{word}<".encode() in content for word in ("plain", "speculative", "384 tokens of context"))


def test_a_plot_that_cannot_be_drawn_is_refused_at_once(tmp_path, monkeypatch):
    with pytest.raises(RuntimeFault, match=r"--plot: got .*a\.pdf; expected a name that ends in \.svg or \.png"):
        plot.check_plot(tmp_path / "a.pdf")
    with pytest.raises(RuntimeFault, match=r"no folder .*none"):
        plot.check_plot(tmp_path / "none/a.svg")
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeFault, match=r"no package matplotlib; expected matplotlib\. Install it: pip"):
        plot.check_plot(tmp_path / "a.svg")
    plot.check_plot(None)


@pytest.mark.parametrize(
    ("section", "method", "draft"),
    [
        ({"method": "draft_model", "model": "small", "lora": "l"}, None, ("small", "l")),
        ({"method": "draft_model", "model": "small"}, "ngram", (None, None)),
        ({"method": "eagle3", "model": "head"}, None, (None, None)),
        (
            {"method": "hybrid", "drafters": [{"method": "suffix"}, {"method": "draft_model", "model": "small"}]},
            None,
            ("small", None),
        ),
    ],
)
def test_assistants_are_draft_models_alone(section, method, draft):
    target = SimpleNamespace(model="large", lora=None)
    recipe = SimpleNamespace(speculator=section, method=section["method"], target=target)
    bundle = SimpleNamespace(recipe=recipe, path="made", eos_token_ids=(1,))
    job = measure.job_of_bundle(bundle, method, [Sample([2], None)], measure.Settings(threads=1))
    assert (job["draft"], job["draft_lora"]) == draft
