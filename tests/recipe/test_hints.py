# SPDX-License-Identifier: Apache-2.0
"""A path that is not the expected recipe, checkpoint or bundle is named, with the right command."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speccompile.bundle.bundle import read_bundle
from speccompile.checkpoints.folders import resolve_checkpoint
from speccompile.errors import BundleError, CheckpointError, RecipeError
from speccompile.prepare import is_model
from speccompile.recipe import load_recipe


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "it's a model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def test_a_checkpoint_given_as_a_recipe_is_named(checkpoint):
    with pytest.raises(RecipeError, match=r"got a checkpoint's folder; expected a recipe") as caught:
        load_recipe(checkpoint)
    assert "speccompile build " in caught.value.todo


def test_the_config_of_a_checkpoint_is_no_recipe(checkpoint):
    with pytest.raises(RecipeError, match=r"got a checkpoint's config; expected a recipe") as caught:
        load_recipe(checkpoint / "config.json")
    assert "speccompile build " in caught.value.todo


def test_a_checkpoint_given_as_a_bundle_is_named(checkpoint):
    with pytest.raises(BundleError, match=r"got a checkpoint .*; expected the folder of a bundle") as caught:
        read_bundle(checkpoint)
    command = shlex.split(caught.value.todo.partition(": ")[2].removesuffix("."))
    assert command == ["speccompile", "build", str(checkpoint), "-o", "bundle"]


def test_another_folder_given_as_a_recipe_is_no_checkpoint(tmp_path):
    with pytest.raises(RecipeError, match=r"got a folder; .* Give the recipe's file"):
        load_recipe(tmp_path)


@pytest.mark.parametrize("model", ["model.Q4_K_M.gguf", "./m.GGUF", "absent/m.gguf", "/absent/m.gguf"])
def test_a_gguf_file_that_is_not_there_is_named(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(f"target: {{model: {model}}}")
    with pytest.raises(
        CheckpointError, match=r"got no such file; expected a checkpoint folder, a GGUF file or a hub id"
    ):
        resolve_checkpoint(model)
    with pytest.raises(RecipeError, match=r"does not exist.*; expected a checkpoint folder, a GGUF file or a hub id"):
        load_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize(
    "model", ["m.gguf", "sha256-of-ollama", "OWNER/NAME/m.gguf", "OWNER/NAME/Q4/m-00001-of-00002.GGUF"]
)
def test_a_recipe_names_a_gguf_file(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sha256-of-ollama").write_bytes(b"GGUF\xff")
    (tmp_path / "m.gguf").symlink_to("sha256-of-ollama")  # as in the hub's cache; the name says the part
    (tmp_path / "r.yaml").write_text(f"target: {{model: {model}}}")
    expected = model if model.startswith("OWNER") else str(tmp_path / model)
    assert load_recipe(tmp_path / "r.yaml").target.model == expected
    assert is_model(model)


def test_a_gguf_file_where_a_bundle_or_a_recipe_is_expected_is_named(tmp_path):
    (tmp_path / "blob").write_bytes(b"GGUF\xff")
    readers: list[tuple[Callable[[str], Any], type[Exception]]] = [
        (read_bundle, BundleError),
        (load_recipe, RecipeError),
    ]
    for read, kind in readers:
        with pytest.raises(kind, match=r"got a GGUF file; .*speccompile build .*blob -o bundle"):
            read(str(tmp_path / "blob"))


def test_a_hub_id_without_its_owner_is_distinguished_from_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("target: {model: gpt2}")
    with pytest.raises(RecipeError, match=r"A hub id has an owner before the name: .* OWNER/gpt2"):
        load_recipe(tmp_path / "r.yaml")
    with pytest.raises(CheckpointError, match="OWNER/gpt2"):
        resolve_checkpoint("gpt2")


@pytest.mark.parametrize("model", ["/nope", "./nope", "~no-such-user/x"])
def test_a_path_that_is_not_there_is_not_called_a_key_of_the_recipe(model):
    with pytest.raises(CheckpointError, match="Check the path") as caught:
        resolve_checkpoint(model)
    assert "target.model" not in str(caught.value)
