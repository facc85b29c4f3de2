# SPDX-License-Identifier: Apache-2.0
"""A target whose files changed: what was kept of the old one is not used for the new one."""

import json
from pathlib import Path

import pytest
import torch

from speccompile.errors import BuildError
from speccompile.recipe import load_recipe
from speccompile.recipe.training_plan import resolve_training
from speccompile.training import run as run_module
from speccompile.training.run import Listener, train
from speccompile.training.states import digest_record
from speccompile.training.target import Target
from speccompile.training.text import TextBook
from tests.pipeline import fakes

pytest.importorskip("matplotlib")
pytest.importorskip("tensorboard")
pytest.importorskip("onnxruntime")


@pytest.fixture
def own(tmp_path) -> Path:
    return fakes.make_checkpoint(tmp_path / "target", hidden=16, layers=4)


def change_json(path: Path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_weights(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(data))


def book_of(write_recipe, folder: Path, *settings: str) -> TextBook:
    recipe = load_recipe(write_recipe("mlp", "changed"), [f"target.model={folder}", *settings])
    return TextBook(recipe, folder, lambda message: None)


def test_a_run_is_not_resumed_for_other_weights(write_recipe, own):
    recipe = load_recipe(write_recipe("mlp", "reweighted", steps=2), [f"target.model={own}"])
    train(recipe, resolve_training(recipe), Listener())
    change_weights(own)
    with pytest.raises(BuildError, match=r"another setting: target\.model\.safetensors was [0-9a-f]{16}, is [0-9a-f]"):
        train(recipe, resolve_training(recipe), Listener())


@pytest.fixture
def bundles(monkeypatch) -> list[Path]:
    """Builds no bundle: returns the folders in which they would be."""
    found: list[Path] = []

    def make(source, precision, recipe, needs, rows, folder, progress):
        found.append(folder)
        return Target(source, precision)

    monkeypatch.setattr(run_module, "BundleTarget", make)
    return found


def test_a_run_on_a_bundle_is_not_resumed_for_another_form(write_recipe, own, bundles):
    settings = [f"target.model={own}", "training.outputs=bundle"]
    recipe = load_recipe(write_recipe("mlp", "reformed", steps=2), settings)
    train(recipe, resolve_training(recipe), Listener())
    recipe = load_recipe(write_recipe("mlp", "reformed", steps=2), [*settings, "target.quantization=int8"])
    with pytest.raises(BuildError, match=r"another setting: target\.quantization was stored, is int8"):
        train(recipe, resolve_training(recipe), Listener())
    assert len(set(bundles)) == 2


def test_a_bundle_is_of_this_version(write_recipe, own, bundles, monkeypatch):
    recipe = load_recipe(write_recipe("mlp", "version", steps=1), [f"target.model={own}", "training.outputs=bundle"])
    for version in ("1", "2", "2"):
        monkeypatch.setattr(run_module, "VERSION", version)
        train(recipe, resolve_training(recipe), Listener())
    assert len(set(bundles)) == 2


@pytest.mark.parametrize("change", [change_weights, lambda f: change_json(f / "config.json", rope_theta=123.0)])
def test_kept_outputs_are_of_this_target(write_recipe, own, change):
    def record():
        return digest_record(Target(own, torch.float32), book_of(write_recipe, own).files, "windows", "float32")

    before = record()
    assert record() == before
    change(own)
    assert record() != before


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_windows_and_answers_depend_on_the_end_token(write_recipe, own, name):
    if name == "config.json":
        (own / "generation_config.json").unlink()
    before = {stage: book_of(write_recipe, own).digest(stage) for stage in ("plain", "generated")}
    change_json(own / name, eos_token_id=[7, 1])
    book = book_of(write_recipe, own)
    assert all(book.digest(stage) != digest for stage, digest in before.items())
    assert 7 in book.windows("plain").rows("train", [0, 1, 2]).tokens


def test_answers_and_bundles_depend_on_what_changes_the_target_s_numbers(write_recipe, own, tmp_path):
    text = tmp_path / "calibration.txt"
    text.write_text("w3 w4 w5")
    int4 = ("target.quantization=int4", f"target.calibration={text}")
    first, given = book_of(write_recipe, own), book_of(write_recipe, own, *int4)
    records = [first.target_record(), given.target_record()]
    records.append(book_of(write_recipe, own, "engine.kv_cache=int8").target_record())
    records.append(book_of(write_recipe, own, "target.quantization=int4").target_record())
    text.write_text("w3 w4 w6")
    records.append(book_of(write_recipe, own, *int4).target_record())
    assert len({json.dumps(record) for record in records}) == len(records)
    assert book_of(write_recipe, own, "engine.max_seq_len=64").target_record() == records[0]
    assert first.digest("generated") != book_of(write_recipe, own, "engine.kv_cache=int8").digest("generated")
