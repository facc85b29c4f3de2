# SPDX-License-Identifier: Apache-2.0
import sys
from types import SimpleNamespace

import pytest
import typer

from speccompile.cli import bench, bench_rounds
from speccompile.cli.bench_rounds import open_workers, run_rounds, summary_from_runs
from speccompile.errors import RuntimeFault
from speccompile.runtime.records import TargetRecord

SECONDS = {"plain": 0.2, "speculative": 0.1}  # per token

WORKER = """
import json, sys
job = json.loads(sys.stdin.readline())
if job["modes"] == ["broken"]:
    sys.exit("cannot load it")
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
    real = bench_rounds.subprocess.Popen
    monkeypatch.setattr(
        bench_rounds.subprocess, "Popen", lambda command, **kw: real([sys.executable, "-c", WORKER], **kw)
    )


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
    assert fast["mean_acceptance_length"] == 1 + 3 / 2
    assert fast["exact"] is True and fast["exact_against"] == "plain"
    assert fast["outside_engine_share"] == pytest.approx(0.4)


def test_a_mode_that_differs_is_not_exact():
    def result(tokens):
        return {"tokens": tokens, "total_s": 1, "prefill_s": 0, "num_steps": 1, "num_accepted": 0, "outside_s": None,
                "first_token_s": 0.1, "peak_rss_bytes": 1}  # fmt: skip

    report = summary_from_runs({"transformers": [[result([1]), result([2])]], "plain": [[result([1]), result([3])]]})
    assert report["modes"]["plain"]["exact"] is False
    assert report["modes"]["plain"]["exact_share"] == 0.5
    assert report["modes"]["transformers"]["exact"] is True
    assert report["modes"]["plain"]["outside_engine_share"] is None


def test_unknown_modes_are_wrong_usage_by_the_name_of_the_option():
    bundle = SimpleNamespace(recipe=SimpleNamespace(method="ngram", target=TargetRecord(model="none")))
    for wanted in ("plan", "plain,plain", ","):
        with pytest.raises(typer.BadParameter, match="expected some of plain, speculative") as caught:
            bench._choose_modes(wanted, bundle, None)
        assert caught.value.param_hint == "--modes"


def test_a_worker_that_dies_says_why_and_the_others_are_ended(fake_worker):
    jobs = [{"modes": ["plain"], "s": SECONDS}, {"modes": ["broken"], "s": SECONDS}]
    with pytest.raises(RuntimeFault, match="bench mode broken: got exit code 1: cannot load it"), open_workers(jobs):
        pass


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
    job = bench._job(["plain"], bundle, method, 1, [[2]], 4, 4)
    assert (job["draft"], job["draft_lora"]) == draft
