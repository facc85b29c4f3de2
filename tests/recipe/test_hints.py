# SPDX-License-Identifier: Apache-2.0
"""A path that is not the expected recipe, checkpoint or bundle is named, with the right command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speccompile.checkpoints.checkpoint import list_tensors, read_config, resolve_checkpoint
from speccompile.checkpoints.tensor_files import open_files
from speccompile.errors import BundleError, CheckpointError, RecipeError
from speccompile.prepare import check_source, plan_from_source
from speccompile.recipe import load_recipe
from speccompile.recipe.model_recipe import ModelOptions
from speccompile.runtime.bundle import read_bundle


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "it's a model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def test_a_checkpoint_given_as_a_recipe_is_named(checkpoint: Path) -> None:
    with pytest.raises(RecipeError, match=r"got a checkpoint's folder; expected a recipe") as caught:
        load_recipe(checkpoint)
    assert "speccompile build " in caught.value.todo


def test_the_config_of_a_checkpoint_is_no_recipe(checkpoint: Path) -> None:
    with pytest.raises(RecipeError, match=r"got a checkpoint's config; expected a recipe") as caught:
        load_recipe(checkpoint / "config.json")
    assert "speccompile build " in caught.value.todo


def test_a_checkpoint_given_as_a_bundle_is_named(checkpoint: Path) -> None:
    with pytest.raises(BundleError, match=r"got a checkpoint .*; expected the folder of a bundle") as caught:
        read_bundle(checkpoint)
    command = shlex.split(caught.value.todo.partition(": ")[2].removesuffix("."))
    assert command == ["speccompile", "build", str(checkpoint), "-o", "bundle"]


def test_another_folder_given_as_a_recipe_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"got a folder; .* Give the recipe's file"):
        load_recipe(tmp_path)


@pytest.mark.parametrize("model", ["model.Q4_K_M.gguf", "./m.GGUF", "absent/m.gguf", "./sha256-of-ollama"])
def test_gguf_is_refused(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model.Q4_K_M.gguf", "sha256-of-ollama"):
        (tmp_path / name).write_bytes(b"GGUF\xff")
    (tmp_path / "r.yaml").write_text(f"target: {{model: {model}}}")
    if not model.startswith("absent"):
        with pytest.raises(CheckpointError, match="speccompile convert"):
            resolve_checkpoint(model)
        with pytest.raises(RecipeError, match="speccompile convert"):
            load_recipe(tmp_path / "r.yaml")


def test_a_gguf_file_where_anything_else_is_expected_is_named(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"GGUF\xff")
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "model.gguf").write_bytes(b"GGUF\xff")
    readers: list[tuple[Callable[[str], Any], type[Exception], str]] = [
        (read_bundle, BundleError, "blob"), (load_recipe, RecipeError, "blob"),
        (resolve_checkpoint, CheckpointError, "blob"),
        (lambda path: plan_from_source(path, ModelOptions()), CheckpointError, "blob"),
        (lambda path: plan_from_source(path, ModelOptions()), RecipeError, "alone"),
        (lambda path: read_config(Path(path)), CheckpointError, "alone"), (check_source, BundleError, "alone"),
    ]  # fmt: skip
    for read, kind, name in readers:
        with pytest.raises(kind, match=r"speccompile convert .*(blob|alone/model\.gguf) -o FOLDER"):
            read(str(tmp_path / name))


def test_a_folder_with_gguf_alone_is_said_to_have_it(checkpoint: Path) -> None:
    (checkpoint / "model.gguf").write_bytes(b"GGUF")
    for read in (list_tensors, open_files):
        with pytest.raises(CheckpointError, match=r"got model\.gguf; .* speccompile convert '.*model\.gguf'"):
            read(checkpoint)


def test_a_hub_id_without_its_owner_is_distinguished_from_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("target: {model: gpt2}")
    with pytest.raises(RecipeError, match=r"A hub id has an owner before the name: .* OWNER/gpt2"):
        load_recipe(tmp_path / "r.yaml")
    with pytest.raises(CheckpointError, match="OWNER/gpt2"):
        resolve_checkpoint("gpt2")


@pytest.mark.parametrize("model", ["/nope", "./nope", "~no-such-user/x"])
def test_a_path_that_is_not_there_is_not_called_a_key_of_the_recipe(model: str) -> None:
    with pytest.raises(CheckpointError, match="Check the path") as caught:
        resolve_checkpoint(model)
    assert "target.model" not in str(caught.value)
