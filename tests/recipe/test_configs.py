# SPDX-License-Identifier: Apache-2.0
"""Configs beside the recipe, and targets with fewer layers."""

import json
from pathlib import Path

import pytest

from speccompile.checkpoints.folders import find_config
from speccompile.core.jobs import GraphJob, SourceContext
from speccompile.errors import CheckpointError, RecipeError
from speccompile.export.decoder_source import DecoderSource
from speccompile.recipe import BuildPlan, Device, load_recipe, resolve

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}


def plan(folder: Path, text: str, *overrides: str) -> BuildPlan:
    path = folder / "recipes" / "r.yaml"
    (folder / "recipes/configs/big").mkdir(parents=True, exist_ok=True)
    (folder / "recipes/configs/big/config.json").write_text(json.dumps(CONFIG))
    path.write_text(text)
    return resolve(load_recipe(path, overrides), Device("cpu", 2))


HUB = "target: {model: org/big, config: configs/big, weights: random}\n"


def test_a_config_is_found_beside_the_recipe_and_stands_in_for_the_hubs(tmp_path):
    made = plan(tmp_path, HUB)
    assert made.target.config == str(tmp_path / "recipes/configs/big")
    assert find_config(made.target) == tmp_path / "recipes/configs/big"
    assert made.recipe_from_plan()["target"]["config"] == made.target.config
    source = DecoderSource(made.target, SourceContext("random", 48, 8))
    assert source.dims.num_layers == 4 and list(source.digests()) == ["config.json"]


def test_a_model_that_is_here_goes_before_the_config(tmp_path):
    (tmp_path / "model").mkdir()
    job = GraphJob("target", str(tmp_path / "model"), config=str(tmp_path))
    assert find_config(job) == tmp_path / "model"


def test_a_config_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"r\.yaml:1 \(target\.config\): got 'configs/small', which has no config"):
        plan(tmp_path, HUB.replace("configs/big", "configs/small"))


def test_checkpoint_weights_do_not_take_the_config_for_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", _no_network)
    made = plan(tmp_path, HUB, "target.weights=checkpoint")
    with pytest.raises(CheckpointError, match="no network"):
        DecoderSource(made.target, SourceContext("checkpoint", 48, 8))


def _no_network(*_: object, **__: object) -> str:
    raise OSError("no network")


def test_fewer_layers_are_built_with_random_weights(tmp_path):
    made = plan(tmp_path, HUB, "target.num_layers=3")
    assert made.target.options.num_layers == 3
    source = DecoderSource(made.target, SourceContext("random", 48, 8))
    assert source.dims.num_layers == 3 and len(source.spec().caches) == 6
    assert made != plan(tmp_path, HUB)
    assert made.recipe_from_plan()["target"]["num_layers"] == 3


def test_fewer_layers_of_a_checkpoint_are_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"target\.num_layers: got 2 with target\.weights: checkpoint.*random"):
        plan(tmp_path, HUB, "target.num_layers=2", "target.weights=checkpoint")


def test_more_layers_than_the_model_has_are_refused(tmp_path):
    made = plan(tmp_path, HUB, "target.num_layers=5")
    with pytest.raises(RecipeError, match=r"target\.num_layers: got 5; expected at most 4"):
        DecoderSource(made.target, SourceContext("random", 48, 8))


def test_the_config_that_is_traced_has_fewer_layers_and_layer_types(tmp_path):
    made = plan(tmp_path, HUB, "target.num_layers=2")
    kinds = ["full_attention", "sliding_attention"] * 2
    path = tmp_path / "recipes/configs/big/config.json"
    path.write_text(json.dumps({**CONFIG, "layer_types": kinds}))
    written = DecoderSource(made.target, SourceContext("random", 48, 8))._write_config(tmp_path)
    config = json.loads((written / "config.json").read_text())
    assert config["num_hidden_layers"] == 2 and config["layer_types"] == kinds[:2]


def test_lists_of_layers_are_as_long_as_fewer_layers(tmp_path):
    made = plan(tmp_path, HUB, "target.num_layers=3")
    kinds = {
        "mlp_layer_types": ["dense", *["sparse"] * 3],
        "no_rope_layers": [1, 1, 1, 0],
        "attention_types": [[["global", "local"], 2]],
        "eos_token_id": [1, 2, 3, 4],
    }
    (tmp_path / "recipes/configs/big/config.json").write_text(json.dumps({**CONFIG, **kinds}))
    DecoderSource(made.target, SourceContext("random", 48, 8))._write_config(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["mlp_layer_types"] == ["dense", "sparse", "sparse"] and written["no_rope_layers"] == [1, 1, 1]
    assert written["attention_types"] == [[["global", "local", "global"], 1]]
    assert written["eos_token_id"] == kinds["eos_token_id"]
