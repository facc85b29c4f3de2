# SPDX-License-Identifier: Apache-2.0
"""A GGUF file is built, found again and served as a checkpoint's folder is."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from speccompile.bundle.bundle import read_bundle
from speccompile.bundle.stage_cache import StageCache, list_entries
from speccompile.cli.main import app
from speccompile.pipeline import build
from speccompile.prepare import is_model, prepare
from speccompile.recipe.model_recipe import ModelOptions
from tests import store
from tests.checkpoints.gguf_lab import TOKENIZER, write_model
from tests.pipeline import fakes

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import speccompile  # noqa: E402
from speccompile import SamplingParams  # noqa: E402


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_file_is_built_once_and_found_by_its_contents(tmp_path, cache, exported):
    path = tmp_path / "tiny.Q8_0.gguf"
    write_model(path, "llama", "Q8_0", tokenizer=TOKENIZER)
    assert is_model(str(path)) and is_model(str(tmp_path))
    options = ModelOptions(settings=("target.quantization=none",))
    first = prepare(str(path), options)
    assert (first.name, first.is_kept) == ("tiny.Q8_0", True)
    bundle = read_bundle(first.path)
    assert bundle.recipe.target.model == str(path)
    assert bundle.tokenizer_path is not None
    assert (bundle.tokenizer_path.parent / "chat_template.jinja").read_text() == TOKENIZER["tokenizer.chat_template"]
    assert prepare(str(path), options).path == first.path
    [folder] = exported
    assert folder.parent == cache / "gguf"
    assert folder in {entry.path for entry in list_entries(cache) if entry.kind == "gguf"}
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert prepare(str(path), options).path != first.path


@pytest.mark.export
def test_target_and_draft_of_files_decode_as_transformers_does(tmp_path):
    target = write_model(tmp_path / "target.gguf", "qwen2", "Q4_1", tokenizer=TOKENIZER)
    write_model(tmp_path / "draft.gguf", "llama", "Q8_0", tokenizer=TOKENIZER)
    recipe = tmp_path / "recipe.yaml"
    engine = "{max_seq_len: 48, max_draft_nodes: 4, max_batch_size: 1, threads: 1}"
    drafts = "{method: draft_model, model: draft.gguf, num_draft_tokens: 3, quantization: none}"
    model = "{model: target.gguf, quantization: none}"
    recipe.write_text(f"target: {model}\nspeculator: {drafts}\nengine: {engine}\n")
    with store.cheap_stages():
        bundle = build(fakes.make_plan(recipe), tmp_path / "out", cache=StageCache(tmp_path / "stages"))
    made = speccompile.load(bundle.path).generate([[3, 5, 7]], SamplingParams(max_new_tokens=16, ignore_eos=True))
    with torch.inference_mode():
        ids = torch.tensor([[3, 5, 7]])
        expected = target.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert list(made[0].tokens) == expected[0, 3:].tolist()


def test_commands_say_what_a_file_is(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_model(path, "qwen3", "Q8_0", tokenizer=TOKENIZER)
    done = CliRunner().invoke(app, ["build", str(path), "--dry-run", "--json", "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    planned = json.loads(done.stdout)["plan"]["target"]
    assert (planned["model"], planned["quantization"]) == (str(path), "stored")
    done = CliRunner().invoke(app, ["doctor", str(path)])
    assert "language model" in done.output, done.output
    done = CliRunner().invoke(app, ["inspect", str(path)])
    assert "GGUF file" in done.output + str(done.exception), done.output
