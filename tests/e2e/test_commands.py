# SPDX-License-Identifier: Apache-2.0
"""generate and bench on a real bundle, as scripts call them."""

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

import speccompile
from speccompile.benchmark.measure import Settings
from speccompile.benchmark.reference import find_reference
from speccompile.benchmark.samples import Sample
from speccompile.bundle.bundle import read_bundle
from speccompile.bundle.format import digest_from_manifest
from speccompile.certificate.checkpoint import open_reference
from speccompile.cli.main import app
from speccompile.core.sampling import SamplingParams
from speccompile.errors import BundleError, SpecCompileError
from speccompile.planner.candidates import Candidate
from speccompile.planner.trial import build_candidates, try_candidates
from speccompile.serving.openai.server import OpenAIServer, ServerOptions


def run(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    rows = [
        {"prompt": "def add(a, b):", "id": 1},
        {"prompt": "class Stack:\n", "temperature": 0.8, "seed": 5, "max_new_tokens": 12},
        {"prompt": "import os\n", "stop": "\n", "top_k": 3},
    ]
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("batch_size", [1, 8])
def test_generate_writes_results_in_order_and_lines_win_over_options(pair, prompts, tmp_path, batch_size):
    out = tmp_path / "out.json"
    flags = ["--max-new-tokens", 24, "--top-p", 0.9, "--batch-size", batch_size]
    told = run("generate", pair, "--prompts", prompts, *flags, "--json", out, "--stats").output
    assert re.search(r"^drafts (on|off): ", told, re.MULTILINE)  # measured times decide which
    plain = run("generate", pair, "--prompts", prompts, *flags, "--json", out, "--stats", "--plain").output
    assert "drafts off: speculation is off" in plain
    run("generate", pair, "--prompts", prompts, *flags, "--json", out)
    results = json.loads(out.read_text())
    engine = speccompile.load(pair, verify=False)
    wanted = engine.generate(
        ["def add(a, b):", "class Stack:\n", "import os\n"],
        [
            SamplingParams(max_new_tokens=24, top_p=0.9),
            SamplingParams(max_new_tokens=12, top_p=0.9, temperature=0.8, seed=5),
            SamplingParams(max_new_tokens=24, top_p=0.9, top_k=3, stop=("\n",)),
        ],
    )
    for got, want in zip(results, wanted, strict=True):
        assert (got["text"], got["tokens"], got["finish_reason"]) == (want.text, want.tokens, want.finish_reason)
        keys = {"num_steps", "num_draft_tokens", "num_accepted", "mean_acceptance_length", "acceptance_by_position"}
        assert keys | {"time_ms"} <= got["stats"].keys()
    assert [len(r["tokens"]) for r in results[:2]] == [24, 12]
    assert results[0]["stats"]["num_draft_tokens"] > 0


def test_plain_has_the_same_greedy_text_and_no_drafts(pair, tmp_path):
    texts = []
    for flags in ([], ["--plain"], ["--method", "ngram"]):
        run(
            "generate",
            pair,
            "--prompt",
            "def add(a, b):",
            "--max-new-tokens",
            24,
            *flags,
            "--json",
            tmp_path / "o.json",
        )
        [result] = json.loads((tmp_path / "o.json").read_text())
        texts.append(result["text"])
        assert (result["stats"]["num_draft_tokens"] == 0) == ("--plain" in flags)
    assert texts[0] == texts[1] == texts[2]


def test_generate_prints_prompt_and_text(pair):
    output = run("generate", pair, "--prompt", "def add(a, b):", "--max-new-tokens", 8, "--json", "-").stdout
    [result] = json.loads(output)
    assert run("generate", pair, "--prompt", "def add(a, b):", "--max-new-tokens", 8).stdout == (
        f"def add(a, b):{result['text']}\n"
    )


def test_wrong_use_has_its_exit_code(pair, tmp_path):
    runner = CliRunner()
    assert runner.invoke(app, ["generate", str(pair)]).exit_code == 2
    assert runner.invoke(app, ["generate", str(pair), "--prompt", "a", "--prompts", "b"]).exit_code == 2
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"prompt": ""}\n')
    from speccompile.cli.main import main

    assert main(["generate", str(pair), "--prompts", str(empty)]) == 8
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 7


def test_bench_measures_modes_in_one_run(pair, prompts, tmp_path):
    out = tmp_path / "bench.json"
    flags = ["--max-new-tokens", 16, "--limit", 2, "--repeats", 2, "--threads", 1]
    run("bench", pair, "--prompts", prompts, *flags, "--modes", "plain,speculative,transformers", "--json", out)
    report = json.loads(out.read_text())
    assert set(report["modes"]) == {"plain", "speculative", "transformers"}
    for mode in report["modes"].values():
        assert mode["tokens_per_s"] > 0 and len(mode["tokens_per_s_all"]) == 2
        assert mode["num_equal"] == mode["num_texts"] == 2
    assert report["reference"]["source"] == "transformers" and report["reference"]["dtype"] == "float32"
    lengths = {name: mode["mean_acceptance_length"] for name, mode in report["modes"].items()}
    assert lengths["plain"] == lengths["transformers"] == 1.0 <= lengths["speculative"]  # measured times decide
    assert set(report["ratios"]) == {"speculative/plain", "speculative/transformers", "plain/transformers"}
    environment = report["environment"]
    assert environment["threads"] == 1 and environment["num_prompts"] == 2 and environment["versions"]["onnxruntime"]


@pytest.fixture
def synthetic(pair, tmp_path):
    """Returns the example pair's bundle with synthetic acceptance."""
    folder = shutil.copytree(pair, tmp_path / "synthetic")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["recipe"]["engine"]["synthetic_acceptance"] = [1.0, 0.0]
    manifest["digest"] = digest_from_manifest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_synthetic_acceptance_is_measured_marked_and_not_served(pair, synthetic, prompts, tmp_path):
    out = tmp_path / "out.json"
    flags = ["--prompts", prompts, "--max-new-tokens", 16, "--json", out]
    assert "warning: acceptance is synthetic" in run("generate", synthetic, *flags).output
    stats = [row["stats"] for row in json.loads(out.read_text())]
    assert all(row["synthetic_acceptance"] == [1.0, 0.0] for row in stats)
    assert {rate for row in stats for rate in row["acceptance_by_position"][:2]} <= {1.0, 0.0}
    bench = ["--limit", 1, "--repeats", 1, "--threads", 1, "--modes", "plain,speculative", "--no-reference"]
    assert "acceptance is synthetic" in " ".join(run("bench", synthetic, *flags, *bench).output.split())
    report = json.loads(out.read_text())
    assert report["environment"]["recipe"]["engine"]["synthetic_acceptance"] == [1.0, 0.0]
    assert any("these texts are not the target's" in warning for warning in report["warnings"])
    for command in (["serve", synthetic, "--port", 0], ["verify", synthetic], ["chat", synthetic]):
        refused = CliRunner().invoke(app, [str(a) for a in command])
        assert isinstance(refused.exception, BundleError), command
        assert "synthetic_acceptance" in str(refused.exception)
    for bundle, mark in ((synthetic, "synthetic"), (pair, "sc")):
        with speccompile.load_service(bundle, allow_synthetic_acceptance=True) as service:
            assert OpenAIServer(service, ServerOptions()).fingerprint.startswith(f"{mark}-")


def test_profile_says_where_the_time_goes_by_engine_file_and_operator(pair, tmp_path):
    flame = tmp_path / "stacks.txt"
    flags = ["--max-new-tokens", 32, "--threads", 1, "--graph", "target", "--nodes", "1,4", "--flame", flame]
    out = run("profile", pair, *flags).output
    assert re.search(r"^32 tokens in \d+ steps of [\d.]+ ms \(target [\d.]+, draft [\d.]+, outside", out, re.MULTILINE)
    assert re.search(r"%\s+backends/onnxruntime/engine\.py\s*$", out, re.MULTILINE)
    assert "1 nodes" in out and "4 nodes" in out and re.search(r"^\s*SpecVerify \(1\) ", out, re.MULTILINE)
    stacks = [line.rsplit(" ", 1) for line in flame.read_text().splitlines()]
    assert stacks and all(count.isdecimal() for _, count in stacks)
    assert any(";backends/onnxruntime/engine.py:run" in stack for stack, _ in stacks)
    found = json.loads(run("profile", pair, "--max-new-tokens", 8, "--plain", "--json").output)
    assert found["num_draft_tokens"] == 0 and found["engines_ms"]["draft"] == 0 < found["engines_ms"]["target"]
    assert sum(found["files"].values()) == pytest.approx(1)
    # A graph on the caches of others.
    assert "KVRollback (" in run("profile", pair, "--max-new-tokens", 2, "--graph", "rollback", "--nodes", 2).output


@pytest.mark.parametrize(("more", "words"), [(("--graph", "none"), "one of target, draft"), (("--nodes", "0"), "")])
def test_profile_refuses_what_it_cannot_profile(pair, more, words):
    result = CliRunner().invoke(app, ["profile", str(pair), "--max-new-tokens", "2", *more])
    assert result.exit_code and words in str(result.exception)


def test_the_reference_of_texts_is_plain_greedy_decoding_in_float32(pair, tmp_path, monkeypatch):
    """Whatever a checkpoint stores for `generate`; and without the mode `transformers` it is decoded once and kept."""
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))
    bundle = read_bundle(pair)
    model = shutil.copytree(bundle.recipe.target.model, tmp_path / "model")
    penalty = {"repetition_penalty": 8.0, "no_repeat_ngram_size": 2, "suppress_tokens": [10, 11, 12]}
    (model / "generation_config.json").write_text(json.dumps(penalty))
    prompts = [[0, 40, 50, 60], [0, 70, 71, 72, 73]]
    job = {"prompts": prompts, "max_new_tokens": 12, "target": str(model), "lora": None, "draft": None, "threads": 1,
           "eos_token_ids": []}  # fmt: skip
    reference, why = open_reference(model)
    assert reference is not None, why
    wanted = [reference.greedy(prompt, 12) for prompt in prompts]
    for source in ("run", "cache"):
        found = find_reference(bundle, job)
        assert found.texts == wanted and found.record["source"] == source
        assert found.record["versions"]["transformers"]


def test_an_error_of_a_further_method_is_ours(pair, prompts):
    arguments = ["bench", str(pair), "--prompts", str(prompts), "--modes", "plain", "--also", "eagle3"]
    with pytest.raises(SpecCompileError) as caught:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "Traceback" not in str(caught.value) and "eagle3" in str(caught.value)


@pytest.mark.parametrize("quantization", ["none", "int8", "auto"])
def test_a_dry_run_predicts_the_sizes_of_the_graphs(request, quantization):
    """The draft's weights are float32 where the target's are; else int4."""
    bundle = request.getfixturevalue("int8_pair" if quantization == "int8" else "pair")
    asked = ["--set", f"target.quantization={quantization}", "--dry-run", "--json"]
    found = json.loads(run("build", bundle / "recipe.yaml", *asked).stdout)["predicted"]
    for name, graph in found["graphs"].items():
        if quantization != "auto" or name == "target":  # of which the bundle's form is one
            built = sum(file.stat().st_size for file in (bundle / "graphs" / name).glob("graph.onnx*"))
            assert graph["least_file_bytes"] < built < graph["file_bytes"] < 3 * built, (name, built)
    for total, part in (("bundle_bytes", "file_bytes"), ("least_bundle_bytes", "least_file_bytes")):
        assert found["total"][total] == sum(graph[part] for graph in found["graphs"].values())


def test_methods_are_tried_on_a_real_bundle_and_their_texts_are_plain_decodings(pair):
    section = read_bundle(pair).recipe.speculator
    candidates = [Candidate(name, {"method": name}) for name in ("none", "ngram")] + [Candidate("drafted", section)]
    built = build_candidates(candidates, lambda one: pair, lambda name, fault: pytest.fail(str(fault)))
    samples = [Sample([0, 40, 50, 60], "a"), Sample([0, 70, 71, 72, 73], "b")]
    report = try_candidates(
        built, samples, Settings(max_new_tokens=12, repeats=2, threads=1), lambda name, fault: pytest.fail(str(fault))
    )
    assert {row["name"] for row in report["rows"]} == {"none", "ngram", "drafted"} and "plain" in report["reason"]
    for row in report["rows"]:
        assert row["num_different"] == 0 and row["tokens_per_s"] > 0 and row["memory_bytes"] > row["bundle_bytes"] > 0
        assert set(row["by_category"]) == {"a", "b"}
        assert row["step_ms"] * row["tokens_per_s"] / 1e3 == pytest.approx(row["tokens_per_step"])
