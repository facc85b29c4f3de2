# SPDX-License-Identifier: Apache-2.0
"""Outputs of the target's bundle: those of its weights where it keeps them, and others where it rounds them."""

import json
from pathlib import Path

import pytest
import torch

from speccompile.errors import RecipeError
from speccompile.recipe import load_recipe
from speccompile.recipe.training_plan import resolve_training
from speccompile.training import bundle_target
from speccompile.training.bundle_target import BundleTarget
from speccompile.training.run import Listener, train
from speccompile.training.target import Target
from speccompile.training_contract import TargetNeeds
from tests import store
from tests.export.towers import make_tower, tower_config
from tests.pipeline import fakes

pytest.importorskip("matplotlib")
pytest.importorskip("tensorboard")
pytest.importorskip("onnxruntime")

NEEDS = TargetNeeds(hidden=True, layers=(0, 2))


def outputs(write_recipe, target: Path, bundle: Path, *overrides: str):
    recipe = load_recipe(write_recipe("mlp", "bundle-target"), overrides)
    with store.cheap_measurements():
        return BundleTarget(target, torch.float32, recipe, NEEDS, 40, bundle, lambda message: None)


@pytest.fixture
def tokens():
    return torch.randint(3, 32, (3, 30), generator=torch.Generator().manual_seed(0))


def test_a_float_bundle_gives_the_outputs_of_the_weights(write_recipe, target, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle_target, "_CHUNK", 8)  # the last step has fewer tokens
    made = outputs(write_recipe, target, tmp_path / "bundle")
    wanted = Target(target, torch.float32).run(tokens, NEEDS)
    for _ in range(2):  # the second time over what the first left in the cache
        got = made.run(tokens, NEEDS)
        assert sorted(got) == sorted(wanted)
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(bundle_target, "build", None)  # a bundle that is there is not built again
    again = outputs(write_recipe, target, tmp_path / "bundle")
    torch.testing.assert_close(again.run(tokens, NEEDS)["hidden"], got["hidden"], rtol=0, atol=0)


def test_recurrent_layers_begin_anew_with_each_window(write_recipe, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle_target, "_CHUNK", 8)
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    config = tower_config("qwen3_5", hidden_size=64, num_hidden_layers=3, layer_types=kinds, head_dim=16)
    make_tower(config, tmp_path / "hybrid")
    (tmp_path / "hybrid" / "tokenizer.json").write_text(json.dumps(fakes.tokenizer(fakes.VOCAB)))
    made = outputs(write_recipe, tmp_path / "hybrid", tmp_path / "bundle", f"target.model={tmp_path / 'hybrid'}")
    wanted = Target(tmp_path / "hybrid", torch.float32).run(tokens, NEEDS)
    for name, value in made.run(tokens, NEEDS).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-3, atol=1e-3)


def test_a_rounded_bundle_gives_its_own(write_recipe, target, tokens, tmp_path):
    made = outputs(write_recipe, target, tmp_path / "bundle", "target.quantization=int8")
    got, exact = (one.run(tokens, NEEDS)["hidden"] for one in (made, Target(target, torch.float32)))
    error = float((got - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.1


def test_caches_are_refused(write_recipe, target, tmp_path):
    recipe = load_recipe(write_recipe("glide", "bundle-caches"))
    with pytest.raises(RecipeError, match=r"training.outputs: got bundle, for a drafter that reads caches"):
        BundleTarget(target, torch.float32, recipe, TargetNeeds(caches=True), 40, tmp_path, lambda message: None)


def test_a_run_trains_on_them(write_recipe):
    recipe = load_recipe(
        write_recipe("eagle3", "served", steps=4),
        ["training.outputs=bundle", "target.quantization=int8", "training.states=disk"],
    )
    seen: list[str] = []
    with store.cheap_measurements():
        result = train(recipe, resolve_training(recipe), Listener(stage=seen.append))
    assert "target: build its bundle" in seen and result["plan"]["outputs"] == "bundle"
    plain = load_recipe(write_recipe("eagle3", "unserved", steps=4), ["training.states=disk"])
    other = train(plain, resolve_training(plain), Listener())
    assert result["held_out"]["plain"]["loss"] != other["held_out"]["plain"]["loss"]
    assert result["held_out"]["plain"]["loss"] == pytest.approx(other["held_out"]["plain"]["loss"], rel=0.05)
