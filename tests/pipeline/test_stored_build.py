# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints whose weights stay as they are: the bundle's weights are the file's, bit for bit."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from speccompile.bundle.bundle import Bundle
from speccompile.bundle.choices import complete_plan
from speccompile.bundle.stage_cache import StageCache
from speccompile.checkpoints.folders import resolve_checkpoint
from speccompile.checkpoints.tensor_files import open_files
from speccompile.pipeline import build
from speccompile.recipe.plan import BuildPlan
from tests import store
from tests.backends.stored_lab import digests, rows_of
from tests.pipeline import fakes

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import speccompile  # noqa: E402
from speccompile import SamplingParams  # noqa: E402
from speccompile.certificate.checkpoint import Reference, open_reference  # noqa: E402
from tests.checkpoints.gguf_lab import TOKENIZER, write_model  # noqa: E402
from tests.checkpoints.packed_lab import pack_folder  # noqa: E402

CASES = {
    "gptq 4": "speccompile::PackedLinearInt4Min",
    "gptq 4 ordered": "speccompile::PackedLinearInt4Min",
    "gptq 8 v2": "speccompile::PackedLinearInt8Min",
    "awq": "speccompile::PackedLinearInt4Min",
    "compressed 4": "speccompile::PackedLinearInt4",
    "compressed 4, some by rows": "speccompile::PackedLinearInt4Min",
    "compressed 8": "speccompile::PackedLinearInt8",
    "compressed int8": "speccompile::PackedLinearInt8",
}
# Between two tokens, in standard deviations of the logits, by backend: float32's order of sums; int8 activations.
TIES = {"reference": 1e-5, "onnxruntime": 0.05}
ENGINE = "{max_seq_len: 48, max_draft_nodes: 16, threads: 1}"


def plan_of(folder: Path, quantization: str, *settings: str) -> BuildPlan:
    recipe = folder.with_suffix(".yaml")
    form = "" if quantization == "default" else f", quantization: {quantization}"
    target = f"{{model: {folder.name}{form}}}"
    recipe.write_text(f"target: {target}\nspeculator: {{method: ngram}}\nengine: {ENGINE}\n")
    return complete_plan(fakes.make_plan(recipe, *settings))


def make(folder: Path, case: str) -> Path:
    fakes.make_checkpoint(folder, hidden=64, layers=1)
    pack_folder(folder, case)
    return folder


def build_of(plan: BuildPlan, dest: Path) -> Bundle:
    with store.cheap_stages():
        return build(plan, dest, cache=StageCache(None))


@pytest.mark.parametrize("case", CASES)
def test_the_weights_of_the_bundle_are_those_of_the_file(case, tmp_path):
    folder = make(tmp_path / "model", case)
    plan = plan_of(folder, "auto")
    assert plan.target.quantization == "stored" and plan.recipe_from_plan()["target"]["quantization"] == "stored"
    bundle = build_of(plan, tmp_path / "out")
    graph = bundle.graphs["target"]
    assert CASES[case] in graph["op_histogram"]["after"]
    held = graph["weights"]
    assert held["float_names"] == ["model.embed_tokens.weight"] and held["unheld"] == []
    assert sum(held["grids"].values()) == 64 * (64 + 32 + 32 + 64 + 3 * 128)
    [note] = [stage["note"] for stage in bundle.manifest["stages"] if stage.get("note")]
    assert note == "the checkpoint has no levels of 1 linears, which stay floats: model.embed_tokens.weight"
    files = open_files(folder)
    stored = set().union(*(digests(files.array(key)) for key in files.grid_keys))
    built = [digests(weight) for weight in rows_of(bundle.path / graph["file"])]
    assert set().union(*built) == stored


def reference_of(folder: Path) -> Reference:
    """The checkpoint in transformers: its values in float32."""
    found, why = open_reference(resolve_checkpoint(str(folder)))
    assert found is not None, why
    return found


def make_file(path: Path, kind: str) -> Path:
    write_model(path.with_suffix(".gguf"), "llama", kind, tokenizer=TOKENIZER)
    return path.with_suffix(".gguf")


@pytest.mark.parametrize("backend", TIES)
@pytest.mark.parametrize("case", ["awq", "gptq 4", "gptq 4 ordered", "Q4_K", "Q8_0"])
def test_greedy_texts_are_those_of_float32(case, backend, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))
    path = (make_file if case.startswith("Q") else make)(tmp_path / "model", case)
    plan = plan_of(path, "stored", f"engine.backend={backend}")
    engine, reference = speccompile.load(build_of(plan, tmp_path / "out").path), reference_of(path)
    num_tokens = num_likeliest = 0
    for prompt in np.random.default_rng(0).integers(3, 32, (6, 5)).tolist():
        [made] = engine.generate([prompt], SamplingParams(max_new_tokens=20, ignore_eos=True))
        rows = reference.logits([*prompt, *made.tokens])[len(prompt) - 1 : -1]
        gaps = rows.max(axis=-1) - rows[np.arange(20), list(made.tokens)]
        assert gaps.max() <= TIES[backend] * rows.std()
        num_tokens, num_likeliest = num_tokens + 20, num_likeliest + int((gaps == 0).sum())
    assert num_likeliest >= (1 if backend == "reference" else 0.95) * num_tokens


@pytest.mark.parametrize("asked", ["stored", "default"])
def test_weights_of_floats_stay_floats(asked, tmp_path):
    fakes.make_checkpoint(tmp_path / "model", hidden=64)
    assert plan_of(tmp_path / "model", "auto").target.quantization == "auto"
    plan = plan_of(tmp_path / "model", asked)
    assert plan.target.quantization == "none"
    assert plan_of(tmp_path / "model", asked, "target.weights=random").target.quantization == "none"


def test_another_grid_is_warned_of(tmp_path):
    folder = make(tmp_path / "model", "awq")
    bundle = build_of(plan_of(folder, "int8"), tmp_path / "out")
    notes = [stage["note"] for stage in bundle.manifest["stages"] if stage.get("note")]
    assert len(notes) == 1 and notes[0].startswith("int8 rounds weights that are quantised already (")
    assert "stored keeps them as they are" in notes[0]
    shutil.rmtree(tmp_path / "out")
    plain = build_of(plan_of(folder, "none"), tmp_path / "out")
    notes = [stage["note"] for stage in plain.manifest["stages"] if stage.get("note")]
    assert notes == ["weights that are quantised already are written in float32; stored keeps them as they are"]


def test_a_draft_keeps_its_own_weights_where_they_are_quantised(tmp_path):
    make(tmp_path / "small", "awq")
    fakes.make_checkpoint(tmp_path / "big", hidden=64, seed=3)
    recipe = tmp_path / "pair.yaml"
    recipe.write_text(f"target: {{model: big}}\nspeculator: {{method: draft_model, model: small}}\nengine: {ENGINE}\n")
    plan = complete_plan(fakes.make_plan(recipe))
    assert [job.quantization for job in plan.jobs] == ["none", "stored"]
    assert [j.quantization for j in complete_plan(fakes.make_plan(recipe, "speculator.quantization=int4")).drafts] == [
        "int4"
    ]
    assert build_of(plan, tmp_path / "out").graphs["draft"]["weights"]["num_float"] == 1
