# SPDX-License-Identifier: Apache-2.0
"""build, inspect and schema as a user meets them: output, exit codes, `--json`."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speccompile.bundle.bundle import read_bundle
from speccompile.cli.main import app
from tests.pipeline import fakes


def test_build_then_inspect(run, recipe, tmp_path):
    code, out, err = run("build", recipe, "-o", "made")
    assert code == 0, err
    assert "made: " in out and "report.html" in out
    assert "done export target" in err
    code, out, err = run("inspect", "made")
    assert code == 0, err
    assert "digests hold; method draft_model" in out
    assert "[batch, nodes]" in out and "k_cache.* (2)" in out


def test_a_bundle_shows_its_summary_and_its_graphs(run, recipe, capsys):
    assert run("build", recipe, "-o", "made")[0] == 0
    read_bundle("made").show()
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.replace("graph ", "graph-").splitlines())
    assert rows["bundle"] == "made" and rows["method"] == "draft_model" and rows["size"].endswith("KiB")
    assert {name for name in rows if name.startswith("graph-")} == {"graph-target", "graph-draft", "graph-rollback"}


def test_inspect_and_the_report_show_the_distance_to_float32(run, recipe, monkeypatch):
    compiles = fakes.FakeBackend.compile
    row = {"kl": 0.00712, "top1": 0.953, "perplexity_change": 0.012, "perplexity_error": 0.003}
    measured = {
        "form": "int4/packed",
        "distance_text": "drawn from the target",
        "form_distances": {"int4/packed": row, "none/fp32": {"kl": 0.0, "top1": 1.0}},
        "calibration": {"texts": "drawn from the target", "num_tokens": 8192, "num_linears": 33},
    }
    monkeypatch.setattr(fakes.FakeBackend, "compile", lambda *a, **k: {**compiles(*a, **k), **measured})
    assert run("build", recipe, "-o", "made")[0] == 0
    _, out, _ = run("inspect", "made")
    told = "KL 7.1e-03 nats, the same likeliest token after 95.3%, perplexity +1.2% (standard error 0.3%)"
    assert f"form int4/packed (chosen), from float32: {told}" in out
    assert "form none/fp32, from float32: KL 0.0e+00 nats, the same likeliest token after 100.0%" in out
    assert "the distances are over text that is drawn from the target" in out
    assert "int4 weights were chosen over 8192 tokens, drawn from the target" in out
    report = Path("made/report.html").read_text()
    assert told in report and "33 linears over 8192 tokens, drawn from the target" in report


def test_build_goes_to_bundles_by_default(run, recipe, tmp_path):
    assert run("build", recipe)[0] == 0
    assert (tmp_path / "bundles" / "pair" / "manifest.json").exists()


def test_json_output_is_json_alone(run, recipe):
    code, out, _ = run("build", recipe, "-o", "made", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["bundle"].endswith("made") and set(facts["graphs"]) == {"target", "draft", "rollback"}
    assert facts["graphs"]["target"]["checks"] == {"num_tokens": 7, "num_equal": 7}
    code, out, _ = run("inspect", "made", "--json")
    facts = json.loads(out)
    assert (code, facts["kind"], facts["digests_ok"], facts["fault"]) == (0, "bundle", True, None)
    tokens = {"name": "tokens", "dims": ["batch", "nodes"], "dtype": "int64", "probe": "tokens"}
    assert facts["graphs"]["target"]["inputs"][0] == tokens
    assert facts["graphs"]["target"]["op_histogram"]["before"] == {"A": 2}
    assert facts["files"]["report.html"]["sha256"]


def test_options_are_short_for_overrides(run, recipe):
    options = ("--backend", "onnxruntime", "--weights", "random", "--set", "engine.max_batch_size=3")
    code, out, _ = run("build", recipe, "--dry-run", "--json", *options, "--set", "decoding.seed=4")
    plan = json.loads(out)["plan"]
    assert code == 0
    assert plan["target"]["weights"] == "random"
    assert (plan["engine"]["max_batch_size"], plan["decoding"]["seed"]) == (3, 4)


def test_a_dry_run_predicts_and_writes_nothing(run, recipe, tmp_path):
    for name in ("big", "small"):
        (recipe.parent / name / "model.safetensors").unlink()
    code, out, _ = run("build", recipe, "-o", "made", "--dry-run")
    assert code == 0
    assert "engine.max_seq_len" in out and "decoding at most about" in out
    code, out, _ = run("build", recipe, "-o", "made", "--dry-run", "--json")
    predicted = json.loads(out)["predicted"]
    assert set(predicted["graphs"]) == {"target", "draft"}
    # 1 slot x 48 rows x 2 layers x (K + V) x 1 head x 4 floats.
    assert predicted["graphs"]["target"]["cache_bytes"] == 48 * 2 * 2 * 4 * 4
    assert not (tmp_path / "made").exists() and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--set", "engine.thread=2"), 2, ("RecipeError", "unknown key 'thread'", "'engine.threads'")),
        (("--set", "engine.threads=two"), 2, ("RecipeError", "'two'", "integer or 'auto'")),
        (("--backend", "onnxrt"), 2, ("RecipeError", "'onnxrt'", "onnxruntime")),
        (("--weights", "good"), 2, ("RecipeError", "'good'", "'checkpoint' or 'random'")),
        (("--set", "engine.max_seq_len=100"), 2, ("RecipeError", "at most 64")),
        (("-o", "in"), 6, ("BuildError", "other things")),
    ],
)
def test_faults_show_their_four_parts(run, recipe, arguments, code, words):
    found, out, err = run("build", recipe, *arguments)
    assert found == code
    assert out == ""
    for word in (*words, "got ", "expected ", "to do "):
        assert word in err
    found, out, _ = run("build", recipe, *arguments, "--json")
    error = json.loads(out)["error"]
    assert found == code == error["exit_code"]
    assert error["kind"] == words[0]
    assert all(error[part] for part in ("where", "got", "expected", "todo"))


def test_checkpoint_faults_have_their_exit_code(run, recipe):
    (recipe.parent / "big" / "model.safetensors").write_bytes(b"short")
    assert run("build", recipe)[0] == 3


def test_a_tampered_bundle_is_shown_with_its_fault(run, recipe, tmp_path):
    run("build", recipe, "-o", "made")
    data = tmp_path / "made" / "graphs" / "draft" / "graph.onnx.data"
    data.write_bytes(b"\1" + data.read_bytes()[1:])
    code, out, err = run("inspect", "made")
    assert code == 7
    assert "digests do not hold" in out and "graph.onnx.data" in err
    code, out, _ = run("inspect", "made", "--json")
    facts = json.loads(out)
    assert (code, facts["digests_ok"], facts["fault"]["kind"]) == (7, False, "BundleError")
    assert facts["fault"]["where"].endswith("graphs/draft/graph.onnx.data")


def test_a_file_that_the_manifest_does_not_list_is_shown(run, recipe, tmp_path):
    run("build", recipe, "-o", "made")
    (tmp_path / "made/tokenizer/chat_template.jinja").write_text("planted")
    code, out, err = run("inspect", "made")
    assert code == 7
    assert "not listed tokenizer/chat_template.jinja" in out and "does not list" in err
    code, out, _ = run("inspect", "made", "--json")
    facts = json.loads(out)
    assert (code, facts["digests_ok"]) == (7, False)
    assert facts["foreign_files"] == ["tokenizer/chat_template.jinja"]
    assert run("generate", "made", "--prompt", "w1")[0] == 7


@pytest.mark.parametrize("name", ["absent", "in", "in/big/config.json"])
def test_what_is_no_bundle_is_refused(run, recipe, name):
    code, out, err = run("inspect", name)
    assert (code, out) == (7, "")
    assert "BundleError" in err
    code, out, _ = run("inspect", name, "--json")
    assert code == 7 and json.loads(out)["error"]["kind"] == "BundleError"


def test_inspect_reads_onnx_files(run, tmp_path):
    ir = pytest.importorskip("onnx_ir")
    value = ir.Value(name="x", shape=ir.Shape(["batch", 4]), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node("Relu", [value])
    node.outputs[0].name, node.outputs[0].shape, node.outputs[0].type = "y", value.shape, value.type
    graph = ir.Graph([value], [node.outputs[0]], nodes=[node], opset_imports={"": 24}, name="tiny")
    ir.save(ir.Model(graph, ir_version=11), tmp_path / "g.onnx")
    code, out, _ = run("inspect", "g.onnx", "--json")
    facts = json.loads(out)
    assert (code, facts["kind"], facts["opsets"]) == (0, "onnx", {"": 24})
    assert facts["graphs"]["tiny"]["inputs"] == [{"name": "x", "dims": ["batch", 4], "dtype": "float32"}]
    assert facts["graphs"]["tiny"]["op_histogram"]["after"] == {"Relu": 1}
    assert "Relu 1" in run("inspect", "g.onnx")[1]
    for content in (b"\xff\xff\xff no graph", b""):
        (tmp_path / "bad.onnx").write_bytes(content)
        assert run("inspect", "bad.onnx")[0] == 7


def test_a_graph_of_types_that_are_not_read_is_refused(run, tmp_path):
    onnx = pytest.importorskip("onnx")
    of_maps = onnx.helper.make_sequence_type_proto(
        onnx.helper.make_map_type_proto(onnx.TensorProto.INT64, onnx.helper.make_tensor_type_proto(1, []))
    )
    outputs = [onnx.helper.make_value_info("y", of_maps)]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "maps", [], outputs)), tmp_path / "maps.onnx")
    for more in ((), ("--diff", "maps.onnx")):
        code, out, _ = run("inspect", "maps.onnx", *more, "--json")
        error = json.loads(out)["error"]
        assert code == 7 and error["expected"] == "an ONNX model" and "Map types" in error["got"]


def test_schema_is_printed_or_written(run, tmp_path):
    code, out, _ = run("schema")
    assert code == 0 and json.loads(out)["title"] == "speccompile recipe"
    assert run("schema", "-o", "s.json")[0] == 0
    assert (tmp_path / "s.json").read_text() == out
    assert run("schema", "-o", "s.json/under-a-file")[0] == 6


def test_help_documents_the_exit_codes_and_wrong_usage_is_2(run):
    code, out, _ = run("--help")
    assert code == 0
    for command in ("build", "inspect", "schema"):
        assert command in out
    assert "7 bundle" in " ".join(out.split())
    assert run("build")[0] == 2
    assert run("--version")[1].startswith("speccompile ")


def test_the_module_runs_as_a_program(tmp_path):
    command = [sys.executable, "-m", "speccompile", "inspect", str(tmp_path / "absent")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 7
    assert "no such folder" in done.stderr and "Traceback" not in done.stderr


def test_a_schema_on_a_full_disk_leaves_no_file(run, tmp_path, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = run("schema", "-o", "schema.json")
    assert code == 6 and "No space left" in err and "schema.json" in err
    assert not list(tmp_path.glob("*schema.json*"))


def test_a_build_through_a_link_and_into_the_working_folder(run, recipe, tmp_path, monkeypatch):
    (tmp_path / "current").symlink_to("v1")
    assert [run("build", recipe, "-o", "current")[0] for _ in range(2)] == [0, 0]
    assert (tmp_path / "current").is_symlink() and (tmp_path / "v1" / "manifest.json").is_file()
    for folder in (tmp_path / "v1", tmp_path / "empty"):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        code, _, err = run("build", recipe, "-o", ".")
        assert code == 6 and "this command runs in" in err and "check checkpoints" not in err


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_results_that_cannot_be_written_are_noticed_before_the_work(run, tmp_path, command):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w1"}\n')
    for json_out, got in (("no/out.json", "no folder"), (".", "a folder")):
        code, _, err = run(command, "no-bundle", "--prompts", "prompts.jsonl", "--json", json_out)
        assert code == 6 and got in err


def test_every_command_logs_as_much_as_is_asked(run, recipe, monkeypatch):
    assert "info: " not in run("build", recipe, "-o", "made")[2]
    code, _, err = run("build", recipe, "-o", "made", "--log-level", "info")
    assert code == 0 and "info: bundle.stage_cache: check graphs: " in err
    monkeypatch.setenv("SPECCOMPILE_LOG", "info")
    assert "info: bundle.stage_cache: " in run("build", recipe, "-o", "made")[2]
    code, _, err = run("inspect", "made", "--log-level", "loud")
    assert code == 2 and "one of error, warning, info, debug" in err
    monkeypatch.delenv("SPECCOMPILE_LOG")
    for command in app.registered_commands:
        code, out, _ = run(str(command.name), "--help=log-level")
        assert code == 0 and "--log-level" in out and "SPECCOMPILE_LOG" in out, command.name
