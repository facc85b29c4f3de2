# SPDX-License-Identifier: Apache-2.0
"""Commands on a model alone: build, generate, and options that are for models and recipes."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import speccompile
from speccompile import prepare
from speccompile.bundle.bundle import read_bundle
from speccompile.errors import BundleError, RecipeError
from speccompile.runtime.spec_engine import SpecEngine
from tests.pipeline import fakes
from tests.runtime.test_spec_engine import make_engine


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return fakes.make_checkpoint(tmp_path / "tiny")


def test_a_model_is_built_without_a_recipe_and_holds_the_one_that_was_used(run, model):
    code, out, err = run("build", model, "-o", "made", "--quantization", "int8", "--set", "engine.max_batch_size=2")
    assert code == 0, err
    assert "made: " in out and "done export target" in err
    recipe = yaml.safe_load(Path("made/recipe.yaml").read_text())
    assert recipe["target"]["model"] == str(model) and recipe["target"]["quantization"] == "int8"
    assert recipe["engine"]["max_batch_size"] == 2 and recipe["speculator"]["method"] == "suffix"
    _, out, _ = run("inspect", "made")
    assert f"recipe {model}; quantization int8; 2 sequences of 64 tokens" in out and "method suffix" in out
    assert run("build", "made/recipe.yaml", "-o", "again")[0] == 0
    assert yaml.safe_load(Path("again/recipe.yaml").read_text()) == recipe
    assert run("build", model)[0] == 0 and Path("bundles/tiny/manifest.json").exists()


def test_sizes_have_short_names_and_vllms(run, model):
    for options in (("--max-seq-len", 32, "--max-batch-size", 3), ("--max-model-len", 32, "--max-num-seqs", 3)):
        code, out, err = run("build", model, *options, "--dry-run", "--json")
        assert code == 0, err
        engine = json.loads(out)["plan"]["engine"]
        assert (engine["max_seq_len"], engine["max_batch_size"]) == (32, 3)
    assert run("build", model, "--max-model-len", 0, "--dry-run")[0] == 2


def test_a_draft_and_the_drafter_as_vllm_spells_it(run, model, tmp_path):
    draft = fakes.make_checkpoint(tmp_path / "small", hidden=4, layers=1, seed=1)
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    for options in (
        ("--draft", draft, "--spec-tokens", 3),
        ("--speculative-config", json.dumps(config)),
        ("--spec-method", "draft_model", "--spec-model", draft, "--spec-tokens", 3),
    ):
        code, out, err = run("build", model, *options, "--dry-run", "--json")
        assert code == 0, err
        section = json.loads(out)["plan"]["speculator"]
        assert (section["method"], section["model"], section["num_draft_tokens"]) == ("draft_model", str(draft), 3)


@pytest.mark.parametrize("method", ["eagle3", "draft_model", "medusa", "glide"])
def test_a_drafter_without_its_model_names_the_option(run, model, recipe, method):
    for source in (model, recipe):
        for options in (("--spec-method", method), ("--speculative-config", json.dumps({"method": method}))):
            code, _, err = run("build", source, *options, "--dry-run")
            told = " ".join(err.split())
            assert code == 2 and told.startswith("RecipeError --spec-model"), err
            assert f"no model for the method {method}" in told and '"model" in --speculative-config' in told
    code, _, err = run("build", model, "--set", f"speculator.method={method}", "--dry-run")
    assert code == 2 and "--set speculator.model=VALUE" in err
    draft = ("--set", f"speculator.model={model}")
    for source in (model, recipe):
        assert "--spec-model" not in run("build", source, "--spec-method", method, *draft, "--dry-run")[2]


def test_wrong_drafters_are_wrong_usage(run, model):
    code, _, err = run("build", model, "--spec-method", "eagle33")
    assert code == 2 and "Did you mean 'eagle3'?" in err
    code, _, err = run("build", model, "--speculative-config", "ngram")
    assert code == 2 and "a JSON object" in err
    code, _, err = run("build", model, "--num-layers", 1)
    assert code == 2 and "--weights random" in err
    assert run("build", model, "--num-layers", 1, "--weights", "random", "--dry-run")[0] == 0
    code, _, err = run("build", model, "--generation-config", "some")
    assert code == 2 and "auto, none" in err


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Puts a language model in numpy in the place of every bundle; returns what `load` was given, call by call."""
    calls: list[dict[str, Any]] = []

    def load(path: Path | str, **arguments: Any) -> SpecEngine:
        calls.append({"path": Path(path), **arguments})
        return make_engine()

    monkeypatch.setattr("speccompile.runtime.engine.load", load)
    return calls


def test_generate_takes_a_model_and_finds_it_built(run, model, loaded):
    code, _, err = run("generate", model, "-p", "abc", "--max-new-tokens", 3, "--backend", "onnxruntime")
    assert code == 0, err
    assert "done export target" in err and "tiny: method suffix" in err
    code, _, err = run("generate", model, "-p", "abc", "--max-new-tokens", 3, "--backend", "onnxruntime")
    assert code == 0 and "export" not in err
    assert loaded[0] == loaded[1] and read_bundle(loaded[0]["path"]).recipe.method == "suffix"
    assert (loaded[0]["backend"], loaded[0]["verify"]) == (None, False)  # digests were compared just before


def test_a_bundle_takes_its_own_methods_and_no_options_of_a_build(run, model, loaded):
    assert run("build", model, "-o", "made")[0] == 0
    arguments = ("generate", "made", "-p", "abc", "--max-new-tokens", 2)
    assert run(*arguments, "--spec-tokens", 2)[0] == 0
    assert run(*arguments, "--spec-method", "ngram", "--spec-tokens", 3)[0] == 0
    assert run(*arguments, "--method", "none")[0] == 0
    sections = [{"method": "suffix", "num_draft_tokens": 2}, {"method": "ngram", "num_draft_tokens": 3}, "none"]
    assert [call["method"] for call in loaded] == sections
    for options in (("--quantization", "int8"), ("--generation-config", "none")):
        code, _, err = run(*arguments, *options)
        assert code == 2 and "is built already" in err
    code, _, err = run(*arguments, "--method", "none", "--spec-method", "ngram")
    assert code == 2 and "not both" in err


def test_a_missing_bundle_is_no_model_of_the_hub(run, model):
    Path("bundles").mkdir()
    code, _, err = run("generate", "bundles/missing", "-p", "w3")
    assert code == 7 and "no such file or folder" in err and "a checkpoint's folder" in err


def test_what_cannot_be_built_says_what_it_is(run, model):
    code, _, err = run("build", model.parent)
    told = " ".join(err.split())
    assert code == 2 and "a folder without config.json" in told and "a checkpoint's folder" in told
    assert f"Did you mean {model}?" in told
    assert run("build", model, "-o", "made")[0] == 0
    code, _, err = run("build", "made")
    assert code == 2 and "a bundle" in err and "speccompile build made/recipe.yaml" in err


def test_a_model_without_a_chat_template_is_not_built_for_a_chat(run, model):
    code, _, err = run("chat", model)
    assert code == 7 and "no chat template" in err and str(model) in err and "export" not in err


@pytest.mark.parametrize("kind", ["hub id", "recipe", "speculator"])
def test_whatever_its_name_it_is_not_built_for_a_chat(run, model, tmp_path, monkeypatch, kind):
    asked: list[set[str]] = []

    def download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        if name != "org/tiny" or allow_patterns == ["manifest.json"]:
            raise OSError(f"404: {name}")
        asked.append(set(allow_patterns))
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = "org/tiny"
    if kind == "recipe":
        source = "chat.yaml"
        Path(source).write_text(f"target: {{model: {model}}}\n")
    elif kind == "speculator":
        source = str(fakes.make_checkpoint(tmp_path / "drafter"))
        config = json.loads(Path(source, "config.json").read_text())
        config["speculators_config"] = {"verifier": {"name_or_path": "org/tiny"}}
        Path(source, "config.json").write_text(json.dumps(config))
    code, _, err = run("chat", source)
    assert code == 7 and "no chat template" in err and "export" not in err, err
    assert kind == "recipe" or asked == [{"config.json", "tokenizer_config.json", "chat_template.jinja"}]


@pytest.mark.parametrize("is_recipe", [True, False])
def test_a_dry_run_of_the_hub_downloads_small_files_alone(run, model, monkeypatch, is_recipe):
    asked: set[str] = set()

    def download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        if allow_patterns == ["manifest.json"]:
            raise OSError(f"404: {name}")
        asked.update(allow_patterns)
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    Path("hub.yaml").write_text("target: {model: org/tiny}\nspeculator: {method: ngram}\nengine: {max_seq_len: 32}\n")
    code, out, err = run("build", "hub.yaml" if is_recipe else "org/tiny", "--dry-run")
    assert code == 0 and "free on this machine" in out, err
    assert "config.json" in asked and not [name for name in asked if "safetensors" in name or name.endswith(".bin")]


def test_a_dry_run_without_the_hub_says_what_it_needs(run, monkeypatch):
    def refuse(name: str, **_: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    Path("hub.yaml").write_text("target: {model: org/tiny}\nspeculator: {method: ngram}\nengine: {max_seq_len: 32}\n")
    code, _, err = run("build", "hub.yaml", "--dry-run")
    told = " ".join(err.split())
    assert code == 3 and "not in the hub's cache, and the hub said: no network" in told
    assert "its config.json, which is all that sizes need" in told and "give a folder with config.json" in told


def test_a_folder_of_models_is_none_but_names_them(run, model):
    code, _, err = run("generate", str(model.parent), "-p", "w3")
    told = " ".join(err.split())
    assert code == 7 and "neither config.json nor manifest.json" in told and f"Did you mean {model}" in told


def test_load_takes_what_the_commands_take(run, recipe, model, tmp_path, monkeypatch):
    loaded: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(
        prepare, "load_bundle", lambda path, **given: loaded.append((str(path), given)) or make_engine()
    )
    speccompile.load(recipe, settings=["engine.max_batch_size=2"], threads=1)
    speccompile.load(str(model))
    assert run("build", recipe, "-o", "made")[0] == 0
    speccompile.load("made", backend="reference", method="ngram")
    assert read_bundle(loaded[0][0]).recipe.engine.max_batch_size == 2
    assert read_bundle(loaded[1][0]).recipe.target.model == str(model)
    given = {"threads": None, "method": None, "allow_synthetic_acceptance": False}
    assert [options for _, options in loaded] == [
        {**given, "threads": 1, "verify": False},
        {**given, "verify": False},
        {**given, "backend": "reference", "method": "ngram", "verify": True},
    ]
    with pytest.raises(RecipeError, match=r"settings: got engine.threads=1 for a bundle; expected none"):
        speccompile.load("made", settings=["engine.threads=1"])
    service = speccompile.load_service("made", speccompile.ServiceOptions(max_queue=3))
    with service:
        assert service.stats()["is_open"] and service.options.max_queue == 3
    assert not service.stats()["is_open"]


def test_load_says_what_is_none_of_them(tmp_path):
    with pytest.raises(BundleError, match=r"expected a bundle's or a checkpoint's folder, a GGUF file, a recipe"):
        speccompile.load(tmp_path)
