# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints whose weights stay as they are: the bundle's weights are the file's, bit for bit."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from speccompile.bundle.bundle import Bundle
from speccompile.bundle.choices import complete_plan
from speccompile.bundle.stage_cache import StageCache
from speccompile.checkpoints.tensor_files import open_files
from speccompile.errors import RecipeError
from speccompile.pipeline import build
from speccompile.recipe.plan import BuildPlan
from tests import store
from tests.backends.stored_lab import digests, rows_of
from tests.pipeline import fakes

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import speccompile  # noqa: E402
from speccompile.certificate.distances import logits_of  # noqa: E402
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
ENGINE = "{max_seq_len: 48, max_draft_nodes: 16, threads: 1}"


def plan_of(folder: Path, quantization: str, *settings: str) -> BuildPlan:
    recipe = folder.with_suffix(".yaml")
    target = f"{{model: {folder.name}, quantization: {quantization}}}"
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
    _check_logits(bundle, folder)


def _check_logits(bundle: Bundle, folder: Path) -> None:
    """Rounded activations change logits by about a hundredth, and the likeliest token only where two are as near."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).float().eval()
    files = open_files(folder)
    model.load_state_dict({key: torch.from_numpy(np.array(files.array(key))) for key in files.headers}, strict=False)
    text = list(np.random.default_rng(0).integers(3, 32, 30))
    with torch.no_grad():
        wanted = model(torch.tensor([text])).logits[0].numpy()
    got = logits_of(speccompile.load(bundle.path), text)
    error = np.abs(got - wanted).max()
    assert error <= 0.06 * np.abs(wanted).max()
    best = np.sort(wanted, axis=-1)
    is_clear = best[:, -1] - best[:, -2] > 2 * error
    assert is_clear.any() and (got.argmax(-1) == wanted.argmax(-1))[is_clear].all()


def test_weights_of_floats_are_not_stored_ones(tmp_path):
    fakes.make_checkpoint(tmp_path / "model", hidden=64)
    assert plan_of(tmp_path / "model", "auto").target.quantization == "auto"
    with pytest.raises(RecipeError, match=r"stored of .*model, whose weights are floats.*AWQ.*Choose none"):
        build_of(plan_of(tmp_path / "model", "stored"), tmp_path / "out")
    with pytest.raises(RecipeError, match=r"stored with target.weights: random.*build from the checkpoint"):
        plan_of(tmp_path / "model", "stored", "target.weights=random")
    assert not (tmp_path / "out").exists()


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


@pytest.mark.parametrize("backend", ["reference"])
def test_backends_without_quantised_weights_take_the_numbers_they_mean(backend, tmp_path):
    folder = make(tmp_path / "model", "gptq 4 ordered")
    plan = plan_of(folder, "stored", f"engine.backend={backend}")
    _check_logits(build_of(plan, tmp_path / "out"), folder)
