# SPDX-License-Identifier: Apache-2.0
"""A whole build with TensorRT-RTX and no GPU: its manifest, the output of inspect, and refusals to load."""

import importlib.util
import json
import shutil

import pytest
from typer.testing import CliRunner

if importlib.util.find_spec("tensorrt_rtx") is None:
    pytest.skip("TensorRT-RTX is not installed: NO BUNDLE IS BUILT", allow_module_level=True)

from speccompile.backends.base import LoadJob
from speccompile.backends.tensorrt import builder, records
from speccompile.backends.tensorrt.import_helper import find_compute_capabilities
from speccompile.bundle.stage_cache import StageCache
from speccompile.cli.main import app
from speccompile.core import registry
from speccompile.errors import BuildError, BundleError, RecipeError, RuntimeFault
from speccompile.pipeline import build
from tests import store
from tests.backends.tensorrt.lab import misbehaving
from tests.backends.tensorrt.plan_bytes import read_weights_bytes
from tests.pipeline import fakes

pytestmark = pytest.mark.plan

SIZES = "max_seq_len: 48, max_draft_nodes: 7, max_batch_size: 2"
needs_no_gpu = pytest.mark.skipif(bool(find_compute_capabilities()), reason="there is a GPU here: it would run")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    fakes.make_checkpoint(folder / "model", hidden=64, layers=1)
    path = folder / "r.yaml"
    path.write_text(f"target: {{model: model, weights: random}}\nengine: {{backend: tensorrt, {SIZES}}}\n")
    return path


@pytest.fixture(scope="module")
def bundle(recipe, tmp_path_factory):
    dest = tmp_path_factory.mktemp("out") / "bundle"
    with store.cheap_stages():
        return build(fakes.make_plan(recipe), dest, cache=StageCache(None))


def test_the_manifest_records_what_a_plan_was_built_with(bundle):
    graph = bundle.graphs["target"]
    record = graph["tensorrt"]
    assert (record["variant"], record["plugins"]) == ("tensorrt_rtx", ["SpecVerify", "KVRollback"])
    assert record["plugin_layers"] == {"SpecVerify": 1, "KVRollback": 1}
    assert record["plugin_abi"]["ops"] == ["SpecVerify", "KVRollback"]
    assert {p["name"]: p["sizes"]["nodes"] for p in record["profiles"]} == {"prefill": [1, 56, 56], "decode": [1, 8, 8]}
    # A few kilobytes of constants come on top; with real weights they are less than 5 %.
    held = read_weights_bytes(bundle.graph_path("target"))
    assert 0 <= held - record["lowered_weights_bytes"] < 16 << 10
    assert record["plan_bytes"] == (bundle.path / graph["file"]).stat().st_size
    assert [s["name"] for s in record["build"]["stages"]] == ["parse", "optimise"]
    assert record["build"]["peak_rss_bytes"] > 100 << 20
    assert graph["form"] == "float16"


def test_the_recipe_in_the_manifest_leaves_nothing_open(bundle):
    target, engine = bundle.manifest["recipe"]["target"], bundle.manifest["recipe"]["engine"]
    assert (target["dtype"], engine["device"], engine["plugins"]) == ("float16", "cuda", "auto")
    assert engine["tensorrt"]["keep_onnx"] is False


def test_the_folder_holds_plans_and_their_records_alone(bundle):
    names = {f.name for f in (bundle.path / "graphs").rglob("*") if f.is_file()}
    assert names == {"graph.plan", "graph.json"}


@needs_no_gpu
def test_without_a_gpu_nothing_is_run_and_the_manifest_says_so(bundle):
    graph = bundle.graphs["target"]
    assert graph["tuning"]["measured"] is False
    assert "no CUDA device" in graph["tuning"]["why"]
    assert "no CUDA device" in graph["checks"]["skipped"]
    stage = next(s for s in bundle.manifest["stages"] if s["name"] == "check graphs")
    assert "no CUDA device" in stage["skipped"]


def load(plan, bundle, **changes):
    sizes = {"max_slots": 2, "max_rows": 48, **changes}
    return registry.backend("tensorrt").load(LoadJob(plan, bundle.graph_spec("target"), **sizes))


@needs_no_gpu
def test_loading_without_a_gpu_is_a_clear_error(bundle):
    with pytest.raises(RuntimeFault) as caught:
        load(bundle.graph_path("target"), bundle)
    assert caught.value.todo


CHANGES = {
    "version": ("0.0", "tensorrt_rtx"),
    "platform": ("windows-amd64", "a plan for windows-amd64"),
    "plugin_abi": ({"abi": -1}, "plugins {"),
    "plan_bytes": (1, "bytes"),
}


@pytest.mark.parametrize("key", CHANGES)
def test_a_plan_made_elsewhere_is_refused_with_its_reason(bundle, tmp_path, key):
    plan = tmp_path / "graph.plan"
    shutil.copy(bundle.graph_path("target"), plan)
    value, got = CHANGES[key]
    records.write_record(plan, {**records.read_record(bundle.graph_path("target")), key: value})
    with pytest.raises(BundleError) as caught:
        load(plan, bundle)
    assert got in caught.value.got


def test_a_plan_for_another_gpu_is_refused(bundle, tmp_path, monkeypatch):
    record = {**records.read_record(bundle.graph_path("target")), "compute_capabilities": ["12.0"]}
    monkeypatch.setattr("speccompile.backends.tensorrt.import_helper.find_compute_capabilities", lambda: ((9, 0),))
    with pytest.raises(BundleError, match=r"a GPU of compute capability 9\.0"):
        records.check_record(bundle.graph_path("target"), record, 1)


def test_more_slots_than_the_profiles_have_are_refused(bundle):
    with pytest.raises(BundleError, match="profiles of at most 2 slots"):
        load(bundle.graph_path("target"), bundle, max_slots=3)


def test_a_plan_without_its_record_is_refused(bundle, tmp_path):
    plan = tmp_path / "graph.plan"
    shutil.copy(bundle.graph_path("target"), plan)
    with pytest.raises(BundleError, match="the record of the plan"):
        load(plan, bundle)


def inspect(path):
    done = CliRunner().invoke(app, ["inspect", str(path), "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_inspect_shows_the_record_of_a_plan(bundle):
    code, facts = inspect(bundle.graph_path("target"))
    assert (code, facts["kind"]) == (0, "plan")
    (graph,) = facts["graphs"].values()
    plan = graph["plan"]
    assert plan["recorded"]["plugin_layers"] == {"KVRollback": 1, "SpecVerify": 1}
    spec = bundle.graph_spec("target")
    shown = {t["name"]: (t["dtype"], tuple(t["dims"])) for t in (*graph["inputs"], *graph["outputs"])}
    assert shown == {t.name: (t.dtype, t.dims) for t in (*spec.inputs, *spec.outputs)}
    assert plan["recorded"]["profiles"][1]["name"] == "decode"
    assert plan["digests"] == "hold"


def test_inspect_of_the_bundle_shows_every_plan(bundle):
    code, facts = inspect(bundle.path)
    assert code == 0
    assert all(graph["plan"]["digests"] == "hold" for graph in facts["graphs"].values())
    assert facts["graphs"]["rollback"]["plan"]["recorded"]["plugin_layers"] == {"KVRollback": 1}


def test_inspect_prints_plugins_and_profiles(bundle):
    arguments = ["inspect", str(bundle.graph_path("target"))]
    text = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}).stdout
    assert "SpecVerify in 1 layers" in text
    assert "profile decode" in text
    assert "digests hold" in text


def test_inspect_of_a_changed_plan_believes_no_record_and_fails(bundle, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(bundle.path, copy)
    plan = copy / "graphs/target/graph.plan"
    data = bytearray(plan.read_bytes())
    data[-1] ^= 1
    plan.write_bytes(data)
    code, facts = inspect(plan)
    assert code == 7
    assert "changed" in facts["fault"]["todo"]
    (graph,) = facts["graphs"].values()
    assert graph["plan"] == {"recorded": None, "digests": "do not hold"}
    text = CliRunner().invoke(app, ["inspect", str(plan)]).stdout
    assert "nothing recorded is shown: digests do not hold" in text


def test_inspect_of_a_plan_alone_says_that_it_cannot_be_read(bundle, tmp_path):
    lone = tmp_path / "lone.plan"
    shutil.copy(bundle.graph_path("rollback"), lone)
    code, facts = inspect(lone)
    assert code == 7
    fault = facts["error"]
    assert (fault["where"], fault["got"]) == (str(lone), "a plan alone")
    assert "lone.json" in fault["expected"] and "the bytes of a plan alone are not read" in fault["todo"]


def test_inspect_of_a_plan_with_its_record_needs_no_bundle(bundle, tmp_path):
    plan = tmp_path / "lone.plan"
    shutil.copy(bundle.graph_path("rollback"), plan)
    shutil.copy(records.record_file(bundle.graph_path("rollback")), records.record_file(plan))
    code, facts = inspect(plan)
    assert code == 0
    assert facts["graphs"]["lone"]["plan"]["digests"] == "not compared, as there is no manifest"
    assert [t["name"] for t in facts["graphs"]["lone"]["inputs"]][:2] == ["lengths", "path"]
    plan.write_bytes(plan.read_bytes()[:-1])
    code, facts = inspect(plan)
    assert code == 7 and "as in the record beside it" in facts["error"]["expected"]


def test_an_aborting_builder_leaves_no_partial_bundle(recipe, tmp_path, monkeypatch):
    code = "open(request['plan'], 'wb').write(b'half')\nos.abort()"
    monkeypatch.setattr(builder, "child_command", lambda: misbehaving(code))
    with store.cheap_stages(), pytest.raises(BuildError):
        build(fakes.make_plan(recipe), tmp_path / "bundle", cache=StageCache(tmp_path / "cache"))
    assert not (tmp_path / "bundle").exists()
    assert [f for f in tmp_path.rglob("*") if f.is_file()] == []


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("target.dtype=float32", "target.dtype"),
        ("engine.device=cpu", "engine.device"),
        ("engine.tensorrt.decode.nodes=[1,4,2]", "engine.tensorrt.decode.nodes"),
        ("engine.tensorrt.compute_capabilities=[sm_89]", "engine.tensorrt.compute_capabilities"),
    ],
)
def test_wrong_fields_are_refused_before_anything_is_built(recipe, tmp_path, override, where):
    with pytest.raises(RecipeError) as caught:
        build(fakes.make_plan(recipe, override), tmp_path / "bundle", cache=StageCache(None))
    assert where in caught.value.where


def test_wrong_profiles_of_a_graph_leave_no_bundle(recipe, tmp_path):
    with pytest.raises(BuildError, match="a range that holds 1 to 8"):
        build(
            fakes.make_plan(recipe, "engine.tensorrt.decode.nodes=[1,2,4]"), tmp_path / "bundle", cache=StageCache(None)
        )
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_yaml_are_gpus(recipe):
    plan = fakes.make_plan(recipe, "engine.tensorrt.compute_capabilities=[8.9, 12.0]")
    assert plan.options.compute_capabilities == ("8.9", "12.0")
