# SPDX-License-Identifier: Apache-2.0
"""speccompile plan over the fakes of the pipeline and processes that only say how long they took."""

import contextlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from speccompile.backends.onnxruntime import kernel_library
from speccompile.cli import plan
from speccompile.errors import RuntimeFault
from speccompile.planner import measuring, trial
from speccompile.planner.forecast import GPU_BACKEND, settings_for
from speccompile.planner.machine import find_machine
from speccompile.recipe.model_recipe import ModelOptions
from tests.pipeline import fakes

DRAFTED = {"ngram": (1.5, 1.6), "suffix": (2.0, 1.25), "small": (3.0, 1.5)}
BROKEN = "suffix+small"
PLAIN_MS = 10.0


class FakeProcess:
    """A worker of which a step with drafts brings `DRAFTED[name][0]` tokens in `DRAFTED[name][1]` plain steps."""

    def __init__(self, job):
        self.name, self.modes = job["prefix"].strip(), [job["prefix"] + mode for mode in job["modes"]]
        self.text = job["prompts"][0][:1] * 12

    def run(self, mode, prompt):
        length, cost = DRAFTED[self.name] if mode.endswith("speculative") else (1.0, 1.0)
        steps = 12 / length
        return {"tokens": self.text, "total_s": steps * cost * PLAIN_MS / 1e3, "prefill_s": 0.0, "num_steps": steps,
                "first_token_s": 0.0, "num_accepted": 12 - steps, "outside_s": 0.0, "peak_rss_bytes": 5 << 20,
                "wait_share": 0.0}  # fmt: skip


@pytest.fixture
def processes(monkeypatch):
    """Starts no process; returns the jobs. `BROKEN` cannot be loaded."""
    jobs = []

    @contextlib.contextmanager
    def open_workers(batch, leave_out):
        jobs.extend(batch)
        for job in batch:
            if job["prefix"].strip() == BROKEN:
                leave_out(job, RuntimeFault("graph", "no room", "room", "Make some."))
        yield [FakeProcess(job) for job in batch if job["prefix"].strip() != BROKEN]

    monkeypatch.setattr(trial, "open_workers", open_workers)
    return jobs


@pytest.fixture
def models(tmp_path):
    return fakes.make_checkpoint(tmp_path / "big"), fakes.make_checkpoint(tmp_path / "small", hidden=4, layers=1)


def prompts_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": [3, 4], "category": "code"}\n{"prompt": [5, 6], "category": "chat"}\n')
    return file


def test_the_fastest_is_named_with_its_reason_and_its_recipe_builds(run, models, processes, tmp_path):
    target, small = models
    flags = ("--try", "--prompts", prompts_file(tmp_path), "--speculator", small, "--max-new-tokens", 12)
    names = f"ngram,suffix,small,{BROKEN}"
    code, out, err = run("plan", target, *flags, "--methods", names, "--out", "best.yaml")
    assert code == 0, err
    table = [line.split()[0] for line in out.splitlines()[2:6]]
    assert table == ["small", "suffix", "none", "ngram"]  # by tokens/s
    assert "small brings 3.00 tokens a step in the time of 1.50 plain steps: x2.00 of plain decoding." in out
    assert "The next, suffix, has x1.60." in out
    assert f"left out: {BROKEN}: graph: got no room" in out
    assert {job["bundle"] for job in processes if job["prefix"] in ("none ", "ngram ", "suffix ")} == {
        processes[0]["bundle"]
    }
    assert [job["modes"] for job in processes[:2]] == [["plain"], ["plain", "speculative"]]
    recipe = yaml.safe_load(Path("best.yaml").read_text())
    assert recipe["speculator"]["method"] == "draft_model" and recipe["speculator"]["model"] == str(small)
    assert "x2.00 of plain" in Path("best.yaml").read_text().splitlines()[0]
    assert run("build", "best.yaml", "-o", "made")[0] == 0


def test_rows_have_quotients_in_one_process_times_the_plain_speed_of_all(run, models, processes, tmp_path):
    target, small = models
    flags = ("--try", "--prompts", prompts_file(tmp_path), "--speculator", small, "--methods", "small,suffix")
    code, out, err = run("plan", target, *flags, "--repeats", 2, "--json")
    assert code == 0, err
    report = json.loads(out)
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["small", "suffix", "none"]
    assert rows["small"]["tokens_per_s"] == pytest.approx(200.0)
    assert rows["small"]["step_ms"] == pytest.approx(15.0) and rows["none"]["step_ms"] == pytest.approx(10.0)
    assert rows["suffix"]["by_category"] == {"code": pytest.approx(1.6), "chat": pytest.approx(1.6)}
    assert rows["suffix"]["of_plain_spread"] == pytest.approx(0.0) and rows["suffix"]["num_different"] == 0
    assert report["left_out"] == {} and report["took_turns"]


def test_a_recipe_is_a_candidate_itself_and_plain_decoding_may_win(run, recipe, processes, tmp_path, monkeypatch):
    monkeypatch.setitem(DRAFTED, "recipe", (2.0, 2.5))
    flags = ("--try", "--prompts", prompts_file(tmp_path), "--methods", "recipe", "--out", "best.yaml")
    code, out, err = run("plan", recipe, *flags)
    assert code == 0, err
    assert "Plain decoding: no drafter is faster here. The best, recipe brings 2.00 tokens a step" in out
    assert yaml.safe_load(Path("best.yaml").read_text())["speculator"] == {"method": "none"}


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--try", "--methods", "eagle9"), 2, "some of none, self_draft, ngram, suffix, suffix+self_draft"),
        (("--try", "--methods", "none"), 2, "a method to compare it with"),
        (("--try", "--spec-method", "ngram"), 2, "give drafters as --speculator"),
        (("--try", "--machine", "H100-SXM"), 2, "--try measures here"),
        (("--try", "--temperature", "0"), 2, "--try measures here"),
        (("--try", "--context", "99"), 2, "--try measures here"),
        (("--try", "--batches", "4"), 2, "--try measures here"),
        (("--repeats", "1"), 2, "without --try nothing is decoded"),
        (("--prompts", "no.jsonl"), 2, "without --try nothing is decoded"),
        (("--measure", "--machine", "H100-SXM"), 2, "--measure measures this machine"),
        (("--try", "--out", "no/best.yaml"), 6, "no folder"),
        (("--try", "--max-new-tokens", "1"), 2, "greater than or equal to 2"),
        (("--try", "--prompts", "no.jsonl"), 8, "a file of JSON lines"),
        (("--methods", "eagle9"), 2, "some of none, self_draft"),
        (("--traffic", "no"), 2, "chat, code, editing"),
        (("--context", "65"), 2, "at most 64, which the caches hold"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_built_or_measured(run, models, monkeypatch, flags, code, words):
    monkeypatch.setattr(measuring, "measure_machine", lambda *_, **__: pytest.fail("the machine is measured"))
    got, _, err = run("plan", models[0], *flags)
    assert got == code and words in err and "candidate" not in err


def test_texts_that_end_at_once_have_no_speed(run, models, processes, tmp_path, monkeypatch):
    real = FakeProcess.run
    short = {"tokens": [3], "num_first_tokens": 1, "num_steps": 0, "num_accepted": 0}
    monkeypatch.setattr(FakeProcess, "run", lambda *given: {**real(*given), **short})
    code, _, err = run("plan", models[0], "--try", "--prompts", prompts_file(tmp_path), "--methods", "ngram")
    assert code == 8 and "texts that end with their first token" in err and "--prompts" in err


def test_within_the_noise_fewer_parts_are_chosen():
    row = {"tokens_per_step": 2.0, "step_ms": 1.5, "of_plain": 1.3, "of_plain_spread": 0.4, "num_parts": 2}
    plain = {"name": "none", "step_ms": 1.0, "of_plain": 1.0, "of_plain_spread": None, "num_parts": 0}
    rows = [{"name": "a", **row}, {"name": "b", **row, "of_plain": 1.2, "num_parts": 1}, plain]
    assert trial.reason_from_rows(rows) == (
        "a brings 2.00 tokens a step in the time of 1.50 plain steps: x1.30 of plain decoding, which is within the "
        "noise (more --repeats or prompts would tell). The next, b, has x1.20, no difference within the noise. none "
        "has fewer parts and is no slower within the noise: the choice."
    )
    for spread, chosen in ((0.4, "none"), (0.06, "b"), (0.04, "a"), (None, "a")):
        assert trial.choose_row([{**one, "of_plain_spread": spread} for one in rows[:2]] + [plain])["name"] == chosen
    with pytest.raises(RuntimeFault, match="one beside plain decoding"):
        trial.reason_from_rows(rows[2:])


def test_methods_are_predicted_for_a_machine_and_the_best_recipe_builds(run, models):
    target, small = models
    flags = ("--speculator", small, "--machine", "EPYC-9654", "--acceptance", "0.3", "--acceptance", "ngram=0.9,0.8")
    code, out, err = run("plan", target, *flags, "--batches", "4,1", "--out", "best.yaml")
    assert code == 0, err
    assert "predicted for EPYC-9654 (AMD EPYC 9004 data sheet" in out and "not measured by us" in out
    assert "; 64 tokens a sequence; " in out  # the caches hold no more
    assert "acceptance of small: stated, within 5%" in out and "acceptance of ngram: stated" in out
    methods = {line.split()[0] for line in out.splitlines() if re.search(" (int8|float32|int4) +[14] ", line)}
    assert {"none", "ngram", "small", "self_draft"} >= methods > {"ngram"}
    assert re.search(r"^best: ngram, up to \d drafts, \w+, batch 1: ", out, re.MULTILINE)
    recipe = yaml.safe_load(Path("best.yaml").read_text())
    assert recipe["speculator"]["method"] == "ngram" and recipe["engine"]["max_batch_size"] == 1
    assert run("build", "best.yaml", "-o", "made")[0] == 0
    code, out, _ = run("plan", target, *flags, "--json", "--throughput", "--quantization", "int8")
    report = json.loads(out)
    assert report["best"]["batch"] == 32 and {row["precision"] for row in report["rows"]} == {"int8"}
    assert report["left_out"].keys() >= {"suffix", "suffix+small"}
    wrongs = [("--machine", "H1"), ("--batches", "0"), ("--latency", "1e-9"), ("--traffic", "x")]
    wrongs += [("--acceptance", "2"), ("--acceptance", "eagel3=0.9")]
    for wrong in (*wrongs, ("--latency", "9", "--throughput")):
        assert run("plan", target, "--machine", "EPYC-9654", *wrong)[0] == 2


def test_a_form_of_two_names_has_one_row(run, models, monkeypatch):
    flags = ("--machine", "EPYC-9654", "--acceptance", "0.8", "--batches", "1", "--json")
    code, alone, err = run("plan", models[0], *flags, "--quantization", "int8")
    assert code == 0, err
    monkeypatch.setattr("speccompile.planner.forecast.forms", lambda source, model: ["int8", "int8"])
    _, twice, _ = run("plan", models[0], *flags)
    assert json.loads(twice)["rows"] == json.loads(alone)["rows"] != []


def test_a_recipe_has_the_form_that_it_names(run, recipe):
    flags = ("--machine", "EPYC-9654", "--acceptance", "0.8", "--batches", "1", "--json")

    def forms():
        return {row["precision"] for row in json.loads(run("plan", recipe, *flags)[1])["rows"]}

    assert len(forms()) > 1
    section = yaml.safe_load(recipe.read_text())
    for form, wanted in (("int8", {"int8"}), ("none", {"float32"})):
        section["target"]["quantization"] = form
        recipe.write_text(yaml.safe_dump(section))
        assert forms() == wanted


@pytest.mark.parametrize(("device", "settings"), [("auto", (GPU_BACKEND,)), ("cpu", (GPU_BACKEND,)), ("cuda", ())])
def test_a_recipe_for_gpus_keeps_its_backend(recipe, device, settings):
    section = yaml.safe_load(recipe.read_text())
    section["engine"]["device"] = device
    recipe.write_text(yaml.safe_dump(section))
    assert settings_for(find_machine("H100-SXM"), str(recipe), ModelOptions()).settings == settings
    assert settings_for(find_machine("EPYC-9654"), str(recipe), ModelOptions()).settings == ()


def test_a_page_and_published_acceptance(run, models):
    flags = (
        "--methods",
        "ngram",
        "--machine",
        "EPYC-9654",
        "--traffic",
        "editing",
        "--temperature",
        "0",
        "--batches",
        "2",
    )
    code, out, err = run("plan", models[0], *flags, "--html", "plan.html")
    assert code == 0, err
    assert "acceptance of ngram: published, 1 of editing, greedy" in out
    assert "page: plan.html" in out and "pays" in out and "uncertain" in out
    page = Path("plan.html").read_text()
    assert "not measured by us" in page and page.count("<svg") == 2 and ">512</text>" in page


def test_a_file_of_results_may_have_an_equals_sign_in_its_name(tmp_path):
    stats = {"num_steps": 4, "acceptance_histogram": [2, 2], "acceptance_by_position": [0.5]}
    (tmp_path / "a=b.json").write_text(json.dumps([{"stats": stats}]))
    given = [str(tmp_path / "a=b.json"), f"ngram={tmp_path / 'a=b.json'}", "suffix=0.5"]
    assert list(plan._read_traffic(None, None, given[:1]).given) == [""]
    assert list(plan._read_traffic(None, None, given[1:]).given) == ["ngram", "suffix"]


def test_this_machine_is_measured_once_and_kept(run, models, monkeypatch):
    calls = []

    def times(stack, threads, probe, folder):
        calls.append(stack)
        return {count: ((1e-4, 1e-4), 1e-3 * (1 + count / 8)) for count in stack.rows}

    monkeypatch.setattr(measuring, "times_by_rows", times)
    monkeypatch.setattr(measuring, "Probe", lambda *_: SimpleNamespace(usual_s=1e-4, is_usual=lambda beside: True))
    monkeypatch.setattr(measuring, "time", SimpleNamespace(monotonic=lambda: 1e3 * len(calls)))
    monkeypatch.setattr(measuring, "_SIZES", (1, 2))
    once = 8 * 2 + 1  # the kinds in two sizes, and launches
    monkeypatch.setattr(kernel_library, "find_library", lambda: Path("kernels.so"))
    for num in (once, once):
        code, out, err = run("plan", models[0], "--threads", 1, "--methods", "self_draft")
        assert code == 0, err
        assert "predicted for this (measured on " in out and "not measured by us" not in out and len(calls) == num
    assert run("plan", "--measure", "--threads", 1)[0] == 0 and len(calls) == 2 * once
    told = json.loads(run("plan", "--measure", "--threads", 1, "--json")[1])
    assert told["name"] == "this" and told["measured"].keys() >= {"float32", "int4"}
    monkeypatch.setattr(kernel_library, "find_library", lambda: None)
    code, _, err = run("plan", "--measure", "--threads", 1)
    assert code == 6 and "no library of CPU kernels" in err
