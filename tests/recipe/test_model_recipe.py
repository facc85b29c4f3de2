# SPDX-License-Identifier: Apache-2.0
"""A recipe for a model alone: what is chosen, what a user's settings win over, where it comes from a speculator."""

import json
from pathlib import Path
from typing import Any

import pytest

from speccompile.checkpoints import folders
from speccompile.core import registry
from speccompile.errors import CheckpointError, RecipeError
from speccompile.recipe import model_recipe
from speccompile.recipe.model_recipe import ModelOptions, recipe_from_model, sampling_defaults
from tests.pipeline import fakes

pytestmark = pytest.mark.usefixtures("real_methods")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return fakes.make_checkpoint(tmp_path / "model")


def edit(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | values))


def test_what_is_left_out_is_chosen(model):
    recipe = recipe_from_model(str(model))
    assert (recipe.target.model, recipe.target.quantization) == (str(model), "auto")
    assert recipe.speculator.method == "suffix"
    assert (recipe.engine.max_batch_size, recipe.engine.max_seq_len) == (8, 64)  # as many positions as it has
    assert recipe.decoding.temperature == 0


def test_settings_win_over_choices(model):
    settings = ("target.quantization=int8", "speculator.method=ngram", "engine.max_seq_len=32", "decoding.seed=3")
    recipe = recipe_from_model(str(model), ModelOptions(settings=settings))
    assert (recipe.target.quantization, recipe.speculator.method) == ("int8", "ngram")
    assert (recipe.engine.max_seq_len, recipe.decoding.seed) == (32, 3)
    kept = recipe_from_model(str(model), ModelOptions(settings=("speculator.num_draft_tokens=4",)))
    assert (kept.speculator.method, kept.speculator.num_draft_tokens) == ("suffix", 4)
    with pytest.raises(RecipeError, match="unknown key 'treads'"):
        recipe_from_model(str(model), ModelOptions(settings=("engine.treads=2",)))


@pytest.mark.parametrize("key", ["target", "speculator", "engine", "decoding", "engine.max_seq_len"])
@pytest.mark.parametrize("value", ["no", "4k", "[]", "[1]", ".inf", ".nan"])
def test_a_setting_of_a_wrong_type_is_refused(model, key, value):
    with pytest.raises(RecipeError) as caught:
        recipe_from_model(str(model), ModelOptions(settings=(f"{key}={value}",)))
    assert caught.value.where == f"--set {key}={value} ({key})"


def test_caches_take_a_quarter_of_the_memory(model, monkeypatch):
    row = 2 * 2 * 1 * 4 * 4  # K and V of 2 layers of one head of 4
    monkeypatch.setattr(model_recipe.os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 4 * 3 * 64 * row}.get)
    assert recipe_from_model(str(model)).engine.max_batch_size == 2
    monkeypatch.setattr(model_recipe.os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 1}.get)
    assert recipe_from_model(str(model)).engine.max_batch_size == 1


def test_a_backend_that_measures_no_forms_has_none_to_choose(model):
    recipe = recipe_from_model(str(model), ModelOptions(settings=("engine.backend=reference",)))
    assert recipe.target.quantization == "stored"


def test_a_module_in_the_targets_files_drafts_beside_its_text(model, monkeypatch):
    found = registry.find_class
    own = "speccompile.speculators.mtp.checkpoint:section_for_target"
    monkeypatch.setattr(registry, "find_class", lambda name: (lambda folder: {}) if name == own else found(name))
    section = recipe_from_model(str(model)).speculator
    assert section.method == "hybrid" and [d.method for d in section.drafters] == ["mtp", "suffix"]


@pytest.mark.parametrize(
    ("settings", "methods"),
    [
        ((), ["self_draft", "suffix"]),
        (("target.quantization=none",), ["self_draft", "suffix"]),
        (("target.quantization=bf16",), ["self_draft", "suffix"]),
        (("target.quantization=int8",), ["suffix"]),
        (("engine.device=cuda",), ["suffix"]),  # no form is measured there, nor on the next
        (("engine.backend=reference",), ["suffix"]),
        (("speculator.num_draft_tokens=4",), ["suffix"]),
        (("target.weights=random",), ["none"]),
    ],
)
def test_large_float_targets_draft_for_themselves_where_it_pays(model, monkeypatch, settings, methods):
    monkeypatch.setattr("speccompile.speculators.self_draft.checkpoint.MIN_BYTES", 1000)
    section = recipe_from_model(str(model), ModelOptions(settings=settings)).speculator
    assert [d.method for d in getattr(section, "drafters", [section])] == methods
    if len(methods) > 1:
        assert section.drafters[0].min_gain == 1.1


def test_quantised_targets_do_not_draft_for_themselves(model, monkeypatch):
    monkeypatch.setattr("speccompile.speculators.self_draft.checkpoint.MIN_BYTES", 1000)
    monkeypatch.setattr("speccompile.speculators.self_draft.checkpoint.has_grids", lambda folder: True)
    assert recipe_from_model(str(model)).speculator.method == "suffix"


def test_sampling_defaults_are_the_checkpoints(model):
    edit(model, "generation_config.json", do_sample=True, temperature=0.6, top_k=20, top_p=1, repetition_penalty=1.05)
    decoding = recipe_from_model(str(model)).decoding
    assert (decoding.temperature, decoding.top_k, decoding.top_p) == (0.6, 20, 1.0)
    assert decoding.repetition_penalty == 1.05
    settings = ("decoding.temperature=0.1",)
    assert recipe_from_model(str(model), ModelOptions(settings=settings)).decoding.temperature == 0.1
    assert recipe_from_model(str(model), ModelOptions(reads_generation_config=False)).decoding.temperature == 0
    edit(model, "generation_config.json", do_sample=False)
    assert sampling_defaults(model) == {}


def test_a_wrong_sampling_default_names_its_key(model):
    edit(model, "generation_config.json", do_sample=True, top_p=7)
    with pytest.raises(RecipeError, match=r"decoding\.top_p"):
        recipe_from_model(str(model))


def test_random_weights_need_a_config_alone(model):
    (model / "model.safetensors").unlink()
    recipe = recipe_from_model(str(model), ModelOptions(settings=("target.weights=random",)))
    assert (recipe.target.quantization, recipe.speculator.method) == ("stored", "none")


def test_a_hub_id_stays_the_models_name(model, monkeypatch):
    resolve = folders.resolve_checkpoint
    here = {"org/name": str(model)}
    monkeypatch.setattr(model_recipe, "resolve_checkpoint", lambda name: resolve(here.get(name, name)))
    assert recipe_from_model("org/name").target.model == "org/name"


@pytest.fixture
def speculator(tmp_path: Path, model: Path) -> Path:
    folder = tmp_path / "speculator"
    folder.mkdir()
    verifier = {"verifier": {"name_or_path": "../model", "architectures": ["LlamaForCausalLM"]}}
    edit(folder, "config.json", speculators_model_type="eagle3", speculators_config=verifier)
    return folder


def test_a_speculator_alone_names_its_target(speculator, model):
    options = ModelOptions({"method": "eagle3", "num_speculative_tokens": 3})
    recipe = recipe_from_model(str(speculator), options)
    assert (recipe.target.model, recipe.speculator.model) == (str(model), str(speculator))
    assert (recipe.speculator.num_draft_tokens, recipe.speculator.tree) == (3, "chain")


def test_a_speculator_that_names_no_target_is_refused(speculator):
    edit(speculator, "config.json", speculators_config={})
    with pytest.raises(CheckpointError, match=r"speculators_config\.verifier.*--spec-model"):
        recipe_from_model(str(speculator), ModelOptions({"method": "eagle3"}))
