# SPDX-License-Identifier: Apache-2.0
"""The same promises with the real export and ONNX Runtime, on a pair of a few hundred parameters."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from speccompile.bundle.bundle import Bundle, read_bundle
from speccompile.bundle.stage_cache import StageCache
from speccompile.errors import BuildError, ExportError
from speccompile.pipeline import build
from tests.pipeline import fakes, kept_exports

pytestmark = pytest.mark.export

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

CHILD = Path(__file__).with_name("build_child.py")
ATTENTION = {"fp32": "Attention", "packed": "speccompile::RotaryQkvAttention"}  # by form, whichever is faster here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Path:
    inputs = folder / "in"
    fakes.make_checkpoint(inputs / "big", hidden=64)
    fakes.make_checkpoint(inputs / "small", hidden=32, layers=1, seed=1)
    path = inputs / "pair.yaml"
    path.write_text(
        "target: {model: big}\nspeculator: {method: draft_model, model: small}\n"
        "engine: {max_seq_len: 48, max_draft_nodes: 8, threads: 1}\n"
    )
    return path


@pytest.fixture(scope="module")
def exports(folder: Path) -> Iterator[Path]:
    """Returns the folder of what the builds have exported: the pair's graphs are traced once."""
    with pytest.MonkeyPatch.context() as patch:
        kept_exports.install(patch.setattr, folder / "exports")
        yield folder / "exports"


@pytest.fixture(scope="module")
def bundle(folder: Path, recipe: Path, exports: Path) -> Bundle:
    return build(fakes.make_plan(recipe), folder / "out", cache=StageCache(folder / "cache"))


def test_the_bundle_is_whole_and_its_chain_is_exact(bundle):
    assert read_bundle(bundle.path).manifest == bundle.manifest
    assert bundle.graphs["target"]["checks"] == {"num_tokens": 7, "num_equal": 7}
    for name in ("target", "draft"):
        graph = bundle.graphs[name]
        assert graph["op_histogram"]["before"]["speccompile::CachedAttention"] == graph["dims"]["num_layers"]
        lowered = {op: num for op, num in graph["op_histogram"]["after"].items() if op.endswith("Attention")}
        assert lowered == {ATTENTION[graph["form"]]: graph["dims"]["num_layers"]}
        assert graph["tuning"]["threads"] == 1 and graph["tuning"]["step_ms"]["1"] > 0
        assert graph["passes"]


def test_the_report_shows_the_graphs(bundle):
    report = (bundle.path / "report.html").read_text()
    for word in ("big · draft_model", "compile target", "graphs/draft/graph.onnx.data", "threads"):
        assert word in report
    # The operators of the form that was the faster one here.
    assert ATTENTION[bundle.graphs["target"]["form"]] in report


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_targets_are_exact_on_chains(folder, recipe, bundle, quantization):
    plan = fakes.make_plan(recipe, f"target.quantization={quantization}", "speculator.quantization=none")
    made = build(plan, folder / quantization, cache=StageCache(folder / "cache"))
    assert made.graphs["target"]["checks"] == {"num_tokens": 7, "num_equal": 7}
    assert {s["name"] for s in made.manifest["stages"] if s["cached"]} >= {"export draft", "compile draft"}
    target, report = made.graphs["target"], (made.path / "report.html").read_text()
    assert target["quantization"] == quantization
    assert all(row["kl"] > 0 and 0 < row["top1"] <= 1 for row in target["form_distances"].values())
    assert ("calibration" in target) == ("int4 weights were chosen" in report) == (quantization == "int4")


# Every message is killed at in test_interrupted.py, with fakes; here it is the last one with all of torch loaded,
# which exports the target alone.
@pytest.mark.parametrize("stage", ["tune target"])
def test_a_killed_export_leaves_nothing_and_the_next_build_cleans_up(folder, recipe, bundle, exports, stage):
    dest, cache = folder / "killed" / "out", folder / f"cache-{stage.replace(':', '')}"
    shutil.copytree(exports / "draft-small", folder / "some-exports/draft-small")
    some = str(folder / "some-exports")
    command = [sys.executable, str(CHILD), str(recipe), str(dest), str(cache), f"real={stage}", some]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert [p.name for p in dest.parent.iterdir() if not p.name.startswith(".")] == []
    build(fakes.make_plan(recipe), dest, cache=StageCache(folder / "cache"))
    assert os.listdir(dest.parent) == ["out"]
    read_bundle(dest)
    shutil.rmtree(dest)


def test_weights_that_do_not_fit_the_disk_are_a_build_error(folder, recipe, bundle, exports):
    dest, how = folder / "full" / "out", "real-fsize=60000"
    command = [sys.executable, str(CHILD), str(recipe), str(dest), str(folder / "cache-full"), how, str(exports)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == BuildError.exit_code, done.stdout + done.stderr
    assert "BuildError" in done.stdout
    assert list(dest.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("model_type", "words"), [("mpt", "ALiBi"), ("longcat_flash", ""), ("no_such_type", "no_such_type")]
)
def test_an_architecture_that_cannot_be_expressed_is_refused_by_name(folder, model_type, words):
    source = folder / model_type
    source.mkdir()
    sizes = {"hidden_size": 32, "vocab_size": 32, "max_position_embeddings": 64, "num_attention_heads": 2, "n_head": 2}
    (source / "config.json").write_text(json.dumps({"model_type": model_type, "num_hidden_layers": 2, **sizes}))
    recipe = folder / f"{model_type}.yaml"
    recipe.write_text(f"target: {{model: {model_type}, weights: random}}\nengine: {{max_seq_len: 48}}\n")
    with pytest.raises(ExportError) as caught:
        build(fakes.make_plan(recipe), folder / "refused" / "out", cache=StageCache(folder / "cache"))
    assert model_type in caught.value.where and words in caught.value.got
    assert list((folder / "refused").iterdir()) == []
