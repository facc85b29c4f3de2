# SPDX-License-Identifier: Apache-2.0
"""Models in the place of bundles: built once, found by all that they depend on, never half a bundle."""

import fcntl
import json
import os
import threading
from pathlib import Path

import pytest

from speccompile import prepare as module
from speccompile.bundle.bundle import read_bundle
from speccompile.bundle.stage_cache import list_entries
from speccompile.errors import ExportError
from speccompile.prepare import Prepared, is_model, is_recipe, prepare
from speccompile.recipe import Device, load_recipe, resolve
from speccompile.recipe.model_recipe import ModelOptions
from tests.pipeline import fakes


@pytest.fixture
def model(tmp_path: Path, exported: list[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return fakes.make_checkpoint(tmp_path / "model")


def test_the_second_start_builds_nothing(model, exported, tmp_path):
    first = prepare(str(model))
    assert first.is_kept and first.name == "model" and first.path.parent == tmp_path / "cache/bundles"
    messages: list[str] = []
    assert prepare(str(model), progress=messages.append) == first
    assert exported == [model] and messages == []
    assert read_bundle(first.path).recipe.method == "suffix"


@pytest.mark.parametrize("is_cached", [False, True])
def test_the_target_is_exported_while_kernels_are_made(model, exported, monkeypatch, is_cached):
    """The key of a bundle depends on them: nothing is looked for before they are there."""
    first, made, messages = prepare(str(model)) if is_cached else None, list[bool](), list[str]()
    exported.clear()

    def make(self: object, *, wait: bool = True) -> None:
        assert exported == [model] * wait
        made.append(wait)

    monkeypatch.setattr(fakes.FakeBackend, "is_ready", lambda self: False)
    monkeypatch.setattr(fakes.FakeBackend, "prepare", make)
    monkeypatch.setattr(fakes.FakeBackend, "depends_on", lambda self, options: {"exported": len(exported)})
    assert module.find_prepared(str(model), ModelOptions()) is None and made == []
    found = prepare(str(model), progress=messages.append)
    assert exported == [model] and made == [False, True]
    assert [m for m in messages if ":" not in m][:3] == ["export target", "prepare kernels", "check checkpoints"]
    assert first is None or first.path != found.path


@pytest.mark.parametrize("what", ["weights", "tokenizer", "images", "option", "version"])
def test_another_input_is_another_bundle(model, what, monkeypatch):
    first, options = prepare(str(model)), None
    if what == "weights":
        data = bytearray((model / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (model / "model.safetensors").write_bytes(bytes(data))
    elif what == "tokenizer":
        (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    elif what == "images":
        (model / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3]}))
    elif what == "option":
        options = ModelOptions(settings=("engine.max_batch_size=1",))
    else:
        monkeypatch.setattr("speccompile.bundle.graphs.versions_from_environment", lambda: {"speccompile": "9"})
    assert prepare(str(model), options).path != first.path


def test_a_damaged_entry_is_built_again(model, exported):
    entry = prepare(str(model)).path
    (entry / "graphs/target/graph.onnx").write_text("other")
    assert prepare(str(model)).path == entry
    assert read_bundle(entry).graphs
    (entry / "manifest.json").unlink()
    prepare(str(model))
    assert read_bundle(entry).graphs and exported == [model]  # from the stages that are kept


def test_a_build_that_fails_leaves_no_entry(model, monkeypatch, tmp_path):
    def fail(*_: object, **__: object) -> None:
        raise ExportError("target", "a", "b", "c")

    with monkeypatch.context() as patch:
        patch.setattr("speccompile.pipeline.compile_graph", fail)
        with pytest.raises(ExportError):
            prepare(str(model))
    root = tmp_path / "cache/bundles"
    assert [path.name for path in root.iterdir() if not path.name.endswith(".lock")] == []
    assert prepare(str(model)).path.is_dir()


def test_one_process_builds_and_the_other_waits(model, exported, tmp_path):
    plan = module.plan_from_source(str(model), ModelOptions())
    root = tmp_path / "cache/bundles"
    root.mkdir(parents=True)
    lock = os.open(root / f".{module.key_of(plan)}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    waits, found = threading.Event(), []

    def tell(message: str) -> None:
        if message.startswith("wait"):
            waits.set()

    second = threading.Thread(target=lambda: found.append(prepare(str(model), progress=tell)))
    second.start()
    assert waits.wait(30) and exported == []
    os.close(lock)
    second.join(30)
    assert found == [prepare(str(model))] and exported == [model]


def test_a_recipe_is_built_too_and_a_bundle_is_itself(model, tmp_path):
    recipe = tmp_path / "own.yaml"
    recipe.write_text("target: {model: model}\nengine: {max_seq_len: 48}\n")
    made = prepare(str(recipe))
    assert made.name == "own" and read_bundle(made.path).recipe.method == "none"
    assert prepare(str(made.path)) == Prepared(made.path, made.path.name)
    other = prepare(str(recipe), ModelOptions({"method": "ngram", "num_speculative_tokens": 2}))
    assert read_bundle(other.path).recipe.speculator["num_draft_tokens"] == 2


def test_a_path_in_the_home_folder_is_found(model, tmp_path, monkeypatch):
    path = prepare(str(model)).path
    monkeypatch.setenv("HOME", str(path.parent))
    assert prepare(f"~/{path.name}") == Prepared(path, path.name)
    opened = []
    monkeypatch.setattr(module, "load_bundle", lambda path, **options: opened.append(path))
    module.load(f"~/{path.name}")
    assert opened == [str(path)]


def test_the_recipe_in_a_bundle_is_the_one_that_was_used(model):
    plan = module.plan_from_source(str(model), ModelOptions())
    written = load_recipe(prepare(str(model)).path / "recipe.yaml")
    assert resolve(written, Device("cpu", 2)) == plan


def test_kept_bundles_are_listed_and_dropped_as_other_entries(model, tmp_path):
    entry = prepare(str(model)).path
    assert entry in {found.path for found in list_entries(tmp_path / "cache") if found.kind == "bundles"}
    from speccompile.bundle.stage_cache import StageCache

    StageCache(tmp_path / "cache", limit_bytes=0)._evict()
    assert not entry.exists()


def test_names_are_told_apart(model, tmp_path):
    (tmp_path / "bundles").mkdir()
    (tmp_path / "file").write_text("")
    entry = prepare(str(model)).path
    assert [is_model(str(name)) for name in (model, "org/name", "m.gguf")] == [True, True, False]
    others = (entry, "bundles/missing", "missing", "file", "recipes/a.yaml", tmp_path / "bundles")
    assert not any(is_model(str(name)) for name in others)
    assert is_recipe("a.yaml") and is_recipe("a.yml") and not is_recipe("a")
