# SPDX-License-Identifier: Apache-2.0
"""Reading recipes: defaults, overrides, folders, hostile texts, paths of other things, the message of every fault."""

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
from speccompile.recipe import Recipe, load_recipe

GOOD = """\
target:
  model: models/big
  quantization: int8

speculator:
  method: candidate
  model: models/small
  num_draft_tokens: 4

engine:
  max_seq_len: 512
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("big", "small"):
        (tmp_path / "models" / name).mkdir(parents=True)
    return tmp_path


def load(folder: Path, text: str, *overrides: str) -> Recipe:
    path = folder / "r.yaml"
    path.write_text(text)
    return load_recipe(path, overrides)


def fault(folder: Path, text: str, *overrides: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load(folder, text, *overrides)
    return caught.value


def test_good_recipe_has_values_and_defaults(folder):
    recipe = load(folder, GOOD)
    assert recipe.target.quantization == "int8"
    assert recipe.target.weights == "checkpoint"
    assert recipe.engine.max_seq_len == 512
    assert recipe.engine.threads == "auto"
    assert recipe.decoding.temperature == 0.0
    assert recipe.speculator.num_draft_tokens == 4  # type: ignore[attr-defined]
    assert recipe.speculator.widths == (1,)  # type: ignore[attr-defined]


def test_only_the_target_is_needed(folder):
    assert load(folder, "target: {model: models/big}").speculator.method == "none"
    assert load(folder, "target: {model: models/big}\nspeculator:\nengine:\n").engine.backend == "onnxruntime"


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("engine.threads=2", lambda r: r.engine.threads == 2),
        ("engine.threads=auto", lambda r: r.engine.threads == "auto"),
        ("decoding.temperature=1e-1", lambda r: r.decoding.temperature == 0.1),
        ("decoding.temperature=1", lambda r: r.decoding.temperature == 1.0),
        ("decoding.stop=['\\n\\n', end]", lambda r: r.decoding.stop == ("\\n\\n", "end")),
        ("speculator.widths=[3, 2]", lambda r: r.speculator.widths == (3, 2)),
        ("target.quantization=none", lambda r: r.target.quantization == "none"),
    ],
)
def test_overrides_have_yaml_types(folder, override, read):
    assert callable(read) and read(load(folder, GOOD, override))


def test_the_last_override_wins_over_the_file(folder):
    recipe = load(folder, GOOD, "engine.max_seq_len=1024", "engine.max_seq_len=600")
    assert recipe.engine.max_seq_len == 600


def test_an_override_of_an_aliased_section_leaves_the_other_alone(folder):
    text = "target: {model: models/big}\nengine: &e {max_seq_len: 64}\nx: *e\n"
    assert "unknown key 'x'" in fault(folder, text, "engine.max_seq_len=65").got


def test_folders_are_looked_for_beside_the_recipe_then_in_the_working_directory(folder, tmp_path_factory, monkeypatch):
    here = tmp_path_factory.mktemp("cwd")
    (here / "models" / "big").mkdir(parents=True)
    (here / "only-here").mkdir()
    monkeypatch.chdir(here)
    assert load(folder, GOOD).target.model == str(folder / "models" / "big")
    assert load(folder, GOOD, "target.model=models/big").target.model == str(here / "models" / "big")
    assert load(folder, GOOD, "target.model=models/small").target.model == str(folder / "models" / "small")
    assert load(folder, "target: {model: only-here}").target.model == str(here / "only-here")
    assert load(folder, GOOD, "target={model: models/big}").target.model == str(here / "models" / "big")


@pytest.mark.usefixtures("real_methods")
def test_a_drafter_of_an_override_is_looked_for_in_the_working_directory_first(folder, tmp_path_factory, monkeypatch):
    here = tmp_path_factory.mktemp("cwd")
    (here / "models" / "big").mkdir(parents=True)
    monkeypatch.chdir(here)
    drafters = "speculator={method: hybrid, drafters: [{method: draft_model, model: models/big}, {method: suffix}]}"
    speculator: Any = load(folder, GOOD, drafters).speculator
    assert speculator.drafters[0].model == str(here / "models" / "big")


def test_what_is_no_folder_may_be_a_hub_id(folder):
    assert load(folder, "target: {model: Qwen/Qwen3-0.6B}").target.model == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("model", ["gpt2", "./models/none", "/nowhere/at/all", "../x", "a/b/c"])
def test_a_missing_folder_is_refused(folder, model):
    error = fault(folder, f"target:\n  model: {model}\n")
    assert error.where == f"{folder / 'r.yaml'}:2 (target.model)"
    assert model in error.got and "does not exist" in error.got


@pytest.mark.parametrize(
    ("text", "line", "key", "hint"),
    [
        (GOOD + "  max_seqlen: 3\n", 12, "engine.max_seqlen", "Did you mean 'engine.max_seq_len'?"),
        (GOOD.replace("quantization", "quantisation"), 3, "target.quantisation", "'target.quantization'"),
        (GOOD + "enginee: {}\n", 12, "enginee", "Did you mean 'engine'?"),
        (GOOD.replace("  quantization: int8", "  threads: 2"), 3, "target.threads", "Did you mean 'engine.threads'?"),
        (GOOD.replace("num_draft_t", "draft_t"), 8, "speculator.draft_tokens", "'speculator.num_draft_tokens'"),
        (GOOD + "quantization: int8\n", 12, "quantization", "Did you mean 'target.quantization'?"),
        (GOOD.replace("num_draft_tokens", "engine_form"), 8, "speculator.engine_form", "Known keys: "),
        (GOOD + "  zzz: 1\n", 12, "engine.zzz", "Known keys: backend, device,"),
    ],
)
def test_an_unknown_key_names_its_line_and_the_nearest_known_one(folder, text, line, key, hint):
    error = fault(folder, text)
    assert error.where == f"{folder / 'r.yaml'}:{line} ({key})"
    assert error.got == f"unknown key {key.split('.')[-1]!r}"
    assert hint in error.todo
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("old", "new", "line", "got", "expected"),
    [
        ("max_seq_len: 512", "max_seq_len: '512'", 11, "'512'", "integer"),
        ("max_seq_len: 512", "max_seq_len: 5.5", 11, "5.5", "integer"),
        ("max_seq_len: 512", "max_seq_len: 1", 11, "1", "greater than or equal to 16"),
        ("max_seq_len: 512", "max_seq_len: yes", 11, "True", "integer"),
        ("max_seq_len: 512", "threads: many", 11, "'many'", "integer or 'auto'"),
        ("max_seq_len: 512", "threads: 0", 11, "0", "greater than or equal to 1 or 'auto'"),
        (
            "quantization: int8",
            "quantization: int7",
            3,
            "'int7'",
            "'none', 'bf16', 'int8', 'int4', 'fp8', 'stored' or 'auto'",
        ),
        ("model: models/big", "model: 3", 2, "3", "string"),
        ("num_draft_tokens: 4", "num_draft_tokens: 4.5", 8, "4.5", "integer or 'auto'"),
        ("num_draft_tokens: 4", "widths: [1, two]", 8, "'two'", "integer"),
    ],
)
def test_a_wrong_value_names_its_line_and_what_is_right(folder, old, new, line, got, expected):
    error = fault(folder, GOOD.replace(old, new))
    assert error.where.startswith(f"{folder / 'r.yaml'}:{line} (")
    assert (error.got, error.expected) == (got, expected)


def test_too_many_stops_name_their_line(folder):
    error = fault(folder, GOOD + f"decoding:\n  stop: {['a'] * 65}\n")
    assert error.where == f"{folder / 'r.yaml'}:13 (decoding.stop)"
    assert error.expected == "at most 64 non-empty strings, of 4096 letters together"


def test_all_faults_are_listed_after_the_first(folder):
    error = fault(folder, GOOD.replace("int8", "int9") + "  foo: 1\n")
    assert "target.quantization" in error.where
    assert "Also wrong: engine.foo." in error.todo


@pytest.mark.parametrize("section", ["target", "speculator", "engine"])
def test_a_section_must_be_a_mapping(folder, section):
    text = "target: {model: org/gpt2}\n" if section != "target" else ""
    assert section in fault(folder, f"{text}{section}: 3\n").where


def test_missing_keys_are_named(folder):
    assert "target" in fault(folder, "engine: {}\n").expected
    error = fault(folder, "target: {model: org/gpt2}\nspeculator:\n  method: candidate\n")
    assert error.where == f"{folder / 'r.yaml'}:2 (speculator.model)"


@pytest.mark.parametrize("text", ["", "engine: {threads: 2}", "target:"])
def test_a_recipe_without_a_target_names_the_key_that_adds_it(folder, text):
    assert fault(folder, text).todo == "Add it to the recipe, or give --set target.model=VALUE."


def test_unknown_method_and_backend_name_the_nearest(folder):
    error = fault(folder, GOOD.replace("method: candidate", "method: candidat"))
    assert error.where.endswith(":6 (speculator.method)") and "'candidate'" in error.todo
    error = fault(folder, GOOD + "  backend: onnxruntim\n")
    assert error.where.endswith(":12 (engine.backend)") and "'onnxruntime'" in error.todo
    assert "speculator.method" in fault(folder, "target: {model: org/gpt2}\nspeculator: {method: 3}\n").where


@pytest.mark.parametrize("override", ["engine.threads", "=3", "engine..x=3", "engine.threads=[1", "target.model.x=3"])
def test_a_malformed_override_is_refused(folder, override):
    assert fault(folder, GOOD, override).where == f"--set {override}"


def test_a_wrong_override_is_named_as_the_location(folder):
    assert fault(folder, GOOD, "engine.thread=2").where == "--set engine.thread=2 (engine.thread)"
    assert "'engine.threads'" in fault(folder, GOOD, "engine.thread=2").todo
    assert fault(folder, GOOD, "engine.threads=x").where == "--set engine.threads=x (engine.threads)"


def test_broken_yaml_and_doubled_keys_have_a_line(folder):
    assert fault(folder, "target:\n  model: [1\nengine: 2\n").where.startswith(f"{folder / 'r.yaml'}:")
    doubled = fault(folder, "target: {model: org/gpt2}\ntarget: {model: org/gpt2}\n")
    assert doubled.where.endswith("r.yaml:2") and doubled.got == "the key 'target' written twice"
    in_list = "speculator:\n  drafters:\n    - method: a\n    - method: b\n      num_draft_tokens: 1\n"
    assert fault(folder, in_list + "      num_draft_tokens: 2\n").where.endswith("r.yaml:6")
    assert fault(folder, GOOD, "engine={threads: 1, threads: 2}").got.endswith("the key 'threads' written twice")
    assert "a list" in fault(folder, "- 1\n").got
    assert fault(folder, "a: 1\n---\nb: 2\n").where == f"{folder / 'r.yaml'}:2"


def test_merged_keys_are_not_written_twice(folder):
    text = "target: &t {model: models/big, quantization: int8}\n"
    text += "speculator: {<<: *t, method: candidate, model: models/small}\n"
    assert load(folder, text).speculator.model == str(folder / "models" / "small")  # type: ignore[attr-defined]
    text = "engine:\n  <<: {max_seq_len: 64, threads: 1}\n  threads: 2\n"
    engine = load(folder, text, "target.model=models/big").engine
    assert (engine.max_seq_len, engine.threads) == (64, 2)


@pytest.mark.parametrize("key", ["2024-01-01", "2024-01-01 10:00:00", "!!binary aGk="])
def test_a_key_that_json_lacks_has_a_line(folder, key):
    error = fault(folder, GOOD + f"  {key}: 3\n")
    assert error.where.endswith("r.yaml:12") and "which is no text" in error.got
    assert "which is no text" in fault(folder, GOOD, f"engine={{{key}: 3}}").got


def test_an_unreadable_file_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="No such file"):
        load_recipe(tmp_path / "absent.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="codec"):
        load_recipe(tmp_path / "b.yaml")


def test_a_misspelt_key_comes_before_the_one_that_is_missing(folder):
    with pytest.raises(RecipeError, match=r"modle.*Did you mean.*model"):
        load(folder, GOOD.replace("  model: models/big", "  modle: models/big"))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ('target:\n  model: "a\x01b"\n', "r.yaml", "special characters are not allowed"),
        ("target: {model: \x7f}", "r.yaml", "special characters"),
        (BOMB + "target: {model: x}", "r.yaml:", "more than 10000 values"),
        ("target: &t [*t]", "r.yaml:1", "nested more than 32"),
        ("[" * 100_000, "r.yaml:1", "nested more than 32"),
        ("target: {model: " + "[" * 40 + "]" * 40 + "}", "r.yaml:1", "nested more than 32"),
        ("x: 2001-99-99", "r.yaml", "cannot be read"),
        ("#" * 300_000, "r.yaml", "300000 characters"),
        (r'target: {model: "\uD800"}', "r.yaml:1", "no Unicode"),
        (r'target: {model: "a\0b"}', "r.yaml:1 (target.model)", "names of at most 255 bytes"),
        ("target: {model: " + "x" * 5000 + "/y}", "r.yaml:1 (target.model)", "names of at most 255 bytes"),
        ("target: {model: ~no-such-user/x}", "r.yaml:1 (target.model)", "a user that exists"),
    ],
)
def test_a_hostile_recipe_is_refused_at_once(tmp_path, text, where, words):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert where in caught.value.where
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("value", ["a\x01b", "[" * 10_000, "&a [*a]", "2001-99-99", '"\\ud800"'])
def test_a_hostile_override_is_refused(tmp_path, value):
    (tmp_path / "r.yaml").write_text("target: {model: .}")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "r.yaml", [f"target.model={value}"])
    assert caught.value.where.startswith("--set target.model=")


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
