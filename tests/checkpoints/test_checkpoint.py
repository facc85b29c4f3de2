# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are incomplete, damaged or of another model are refused before any weight is used."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from speccompile.bundle.tokenizers import TOKENIZER_FILES
from speccompile.checkpoints.checkpoint import check_checkpoint, count_params, list_tensors, read_dims
from speccompile.checkpoints.folders import resolve_checkpoint
from speccompile.core.dims import ModelDims
from speccompile.errors import CheckpointError
from tests.export.families import CONFIGS, VOCAB
from tests.export.harness import make_checkpoint

pytestmark = pytest.mark.export


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete Llama with untied embeddings."""
    folder = tmp_path_factory.mktemp("whole")
    make_checkpoint(CONFIGS["llama2"], folder)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit_weights(folder: Path, edit: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def split(folder: Path) -> dict[str, str]:
    """Spread the weights over two shards with an index; returns the weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, keys in shards.items():
        save_file({k: tensors[k] for k in keys}, folder / shard, metadata={"format": "pt"})
    weight_map = {k: shard for shard, keys in shards.items() for k in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def export(folder: Path) -> None:
    from speccompile.export.decoder import export_decoder

    export_decoder(folder, max_seq_len=16)


def check_loaded(folder: Path, expected: dict[str, np.ndarray]) -> None:
    """Checks that the checkpoint is accepted, and the weights that the exporter would trace."""
    from speccompile.export import attention
    from speccompile.export.weights import load_model

    check_checkpoint(folder, read_dims(folder))
    attention.register()
    loaded = dict(load_model(folder, "checkpoint").named_parameters())
    assert set(loaded) == set(expected)
    for name, tensor in loaded.items():
        np.testing.assert_array_equal(tensor.detach().numpy(), expected[name])


def test_a_whole_checkpoint(whole):
    dims = read_dims(whole)
    assert dims == ModelDims("llama", VOCAB, 32, 2, 4, 4, 8, 64)
    check_checkpoint(whole, dims)
    assert count_params(whole) == sum(t.size for t in load_file(whole / "model.safetensors").values())


def test_a_whole_checkpoint_in_shards(copy):
    num_params, tensors = count_params(copy), load_file(copy / "model.safetensors")
    split(copy)
    check_loaded(copy, tensors)
    assert count_params(copy) == num_params


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CONFIGS["gpt2"], ModelDims("gpt2", VOCAB, 32, 2, 4, 4, 8, 64)),
        ({**CONFIGS["gpt2"], "multi_query": True}, ModelDims("gpt2", VOCAB, 32, 2, 4, 1, 8, 64)),
        (CONFIGS["gemma"], ModelDims("gemma", VOCAB, 32, 2, 4, 1, 12, 64)),
        ({**CONFIGS["qwen2"], "num_key_value_heads": None}, ModelDims("qwen2", VOCAB, 32, 2, 4, 4, 8, 64)),
    ],
)
def test_sizes_under_all_their_names(config, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_dims(tmp_path) == expected
    assert count_params(tmp_path) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "expected a JSON object"),
        ("[]", "got a list; expected a JSON object"),
        ('{"model_type": "llama"}', "got None; expected a positive integer under vocab_size"),
        ('{"vocab_size": 8, "hidden_size": "32"}', "got '32'; expected a positive integer under hidden_size or n_embd"),
        ('{"vocab_size": 0}', "got 0; expected a positive integer"),
        ('{"text_config": {"vocab_size": 8}}', "multimodal"),
    ],
)
def test_bad_configs(text, words, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=words):
        read_dims(tmp_path)


STRANGE: dict[str, tuple[dict[str, Any], str]] = {
    "eps of 0": ({"rms_norm_eps": 0}, ""),
    "no cache": ({"use_cache": None}, ""),
    "a list of one token": ({"bos_token_id": [1]}, ""),
    "a token with a point": ({"pad_token_id": 1.0}, ""),
    "flags that are null": ({"attention_bias": None, "tie_word_embeddings": None, "mlp_bias": 0}, ""),
    "null of training": ({"initializer_range": None, "attention_dropout": None}, ""),
    "eps as text": ({"rms_norm_eps": "1e-5"}, r"\(rms_norm_eps\): got '1e-5'; expected a number"),
    "eps below 0": ({"rms_norm_eps": -1.0}, r"\(rms_norm_eps\): got -1.0"),
    "two first tokens": ({"bos_token_id": [1, 2]}, r"\(bos_token_id\): got \[1, 2\]; expected"),
    "a token as text": ({"eos_token_id": "2"}, r"\(eos_token_id\): got '2'; expected a token"),
    "no activation": ({"hidden_act": None}, r"\(hidden_act\): got None"),
    "a flag as text": ({"mlp_bias": "no"}, r"\(mlp_bias\): got 'no'; expected true or false"),
    "rope as text": ({"rope_scaling": "x"}, r"\(rope_scaling\): got 'x'; expected an object"),
    "a window as text": ({"sliding_window": "4"}, r"\(sliding_window\): got '4'"),
    "pruned kinds": ({"layer_types": ["full_attention"] * 3}, r"\(layer_types\): got 3 kinds; expected a list of 2"),
    "heads that do not divide": ({"num_attention_heads": 5, "num_key_value_heads": 5}, "multiple of the number"),
    "keys that are not shared evenly": ({"num_key_value_heads": 3}, r"\(num_key_value_heads\): got 3; expected a div"),
    "more keys than queries": ({"num_key_value_heads": 64}, r"\(num_key_value_heads\): got 64; expected a divisor"),
    "padding without a row": ({"pad_token_id": 1 << 20}, ""),
    "rotated beyond the head": ({"partial_rotary_factor": 2.0}, r"\(partial_rotary_factor\): got 2.0; expected a sh"),
    "an MLP of no width": ({"intermediate_size": 0}, r"\(intermediate_size\): got 0; expected a number of columns"),
    "more experts than there are": (
        {"num_local_experts": 4, "num_experts_per_tok": 5},
        r"\(num_experts_per_tok\): got 5; expected 1 to 4",
    ),
    "a scaling without a factor": ({"rope_scaling": {"rope_type": "linear"}}, "Missing required keys in .rope_param"),
    "a number of unknown kind": ({"pretraining_tp": "x"}, r"\(pretraining_tp\): got 'x'; expected what transformers"),
}


@pytest.mark.parametrize(("changes", "words"), STRANGE.values(), ids=STRANGE.keys())
def test_a_value_of_another_kind_is_taken_as_meant_or_refused_by_name(changes, words, copy):
    from speccompile.checkpoints.model_config import read_model_config

    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    if not words:
        assert read_dims(copy).num_layers == 2
        config = read_model_config(copy)
        for name, value in changes.items():
            meant = value[0] if isinstance(value, list) else value
            defaults = {"use_cache": True, "initializer_range": 0.02, "attention_dropout": 0.0, "pad_token_id": 1}
            meant = defaults.get(name, False) if value is None else meant
            assert getattr(config, name) == (None if name == "pad_token_id" and meant > VOCAB else meant), name
        return
    with pytest.raises(CheckpointError, match=words) as caught:
        (read_dims(copy), read_model_config(copy))
    assert str(path) in caught.value.where


FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def cut(end: int) -> Callable[[Path], Any]:
    return lambda folder: (folder / FILE).write_bytes((folder / FILE).read_bytes()[:end])


def header(text: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)


def index(text: str) -> Callable[[Path], Any]:
    return lambda folder: (split(folder), (folder / INDEX).write_text(text))


def swap_shards(folder: Path) -> None:
    """Names for a weight the shard that does not have it."""
    (name, shard), *others = split(folder).items()
    other = next(s for _, s in others if s != shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": {**dict(others), name: other}}))


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "no such file"),
    **{f"cut by {num}": (cut(-num), rf"{FILE}: got .*the file is truncated") for num in (1, 5000)},
    **{f"cut to {num}": (cut(num), "a whole safetensors file") for num in (0, 4, 8, 100)},
    "too long": (lambda folder: (folder / FILE).write_bytes((folder / FILE).read_bytes() + b"more"), "too long"),
    "no JSON": (header(b"no json"), "no JSON"),
    "no object": (header(b"[1]"), "no JSON object"),
    "no shape": (header(b'{"a": {"dtype": "F32"}}'), "None for shape of a"),
    "dtype": (header(b'{"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}'), "unknown dtype X9"),
    "offsets": (
        header(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'),
        r"4 bytes for a; expected F32 of shape \[2\]",
    ),
    "Git LFS": (
        lambda folder: (folder / FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        "a whole safetensors file",
    ),
    "no weights": (lambda folder: (folder / FILE).unlink(), "got no weights"),
    "pickled": (
        lambda folder: (folder / FILE).rename(folder / "pytorch_model.bin"),
        "got pytorch_model.bin; expected model.safetensors.*unpickling runs code",
    ),
    "no shard": (
        lambda folder: (folder / next(iter(split(folder).values()))).unlink(),
        r"-of-00002\.safetensors: got no such file; expected a shard that",
    ),
    "swapped shards": (swap_shards, "no lm_head.weight"),
    **{
        f"index {text}": (index(text), "weight_map|JSON")
        for text in ("{", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b.safetensors"}}')
    },
    "no keys": (
        lambda folder: edit_weights(folder, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight")),
        "layer 1 without self_attn.k_proj.weight",
    ),
    "a layer less": (
        lambda folder: edit_config(folder, num_hidden_layers=3),
        "no weights of layer 2; expected layers 0 to 2",
    ),
    "a layer more": (
        lambda folder: edit_config(folder, num_hidden_layers=1),
        "weights of layer 1; expected layers 0 to 0",
    ),
    "vocabulary": (
        lambda folder: edit_config(folder, vocab_size=VOCAB + 1),
        rf"model.embed_tokens.weight of shape \[{VOCAB}, 32\]; expected {VOCAB + 1} rows",
    ),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_checkpoint_is_refused(copy, damage, words):
    damage(copy)
    with pytest.raises(CheckpointError, match=words) as caught:
        check_checkpoint(copy, read_dims(copy))
    assert all((caught.value.where, caught.value.got, caught.value.expected)) and caught.value.todo.endswith(".")


def test_a_first_layer_whose_input_is_normed_already(tmp_path):
    """As ModernBERT's; any other layer has to have the norm."""
    names = [f"model.layers.{i}.{part}" for i in range(3) for part in ("attn_norm.weight", "attn.Wqkv.weight")]
    tensors = {name: np.zeros(4, np.float32) for name in names}
    for missing, words in (("0.attn_norm", None), ("1.attn_norm", "layer 1 without attn_norm.weight")):
        save_file({n: t for n, t in tensors.items() if missing not in n}, tmp_path / "model.safetensors")
        dims = ModelDims("modernbert-decoder", VOCAB, 32, 3, 4, 4, 8, 64)
        if words is None:
            check_checkpoint(tmp_path, dims)
        else:
            with pytest.raises(CheckpointError, match=words):
                check_checkpoint(tmp_path, dims)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("model.layers.0.mlp.up_proj.weight"), "1 missing weights .model.layers.0.mlp.up_proj.weight"),
        (lambda t: t.pop("lm_head.weight"), "1 missing weights .lm_head.weight"),
        (lambda t: t.pop("model.norm.weight"), "1 missing weights .model.norm.weight"),
        (
            lambda t: t.update({"model.extra.weight": np.zeros(3, np.float32)}),
            "1 weights that the architecture does not",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": np.zeros((49, 32), np.float32)}),
            "1 weights of another shape .*model.layers.0.mlp.up_proj.weight",
        ),
    ],
)
def test_weights_that_only_the_architecture_defines(copy, edit, words):
    """Headers look complete, but transformers would have filled the gap with random numbers."""
    edit_weights(copy, edit)
    check_checkpoint(copy, read_dims(copy))
    with pytest.raises(CheckpointError, match=words):
        export(copy)


def test_buffers_of_old_checkpoints_are_left_alone(copy):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = load_file(copy / "model.safetensors")
    edit_weights(copy, lambda t: t.update({name: np.zeros(4, np.float32)}))
    check_loaded(copy, tensors)


def test_tied_embeddings_need_no_head(tmp_path):
    make_checkpoint(CONFIGS["llama3"], tmp_path)
    assert "lm_head.weight" not in list_tensors(tmp_path)
    check_loaded(tmp_path, load_file(tmp_path / "model.safetensors"))


def test_a_folder_is_resolved_to_itself(whole):
    assert resolve_checkpoint(str(whole)) == whole


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c", "two words/x"])
def test_names_that_are_neither_folder_nor_hub_id(name):
    with pytest.raises(CheckpointError, match="no such folder; expected a checkpoint folder, a GGUF file or a hub id"):
        resolve_checkpoint(name)


def test_a_file_is_no_checkpoint(whole):
    with pytest.raises(CheckpointError, match="a file; expected a checkpoint folder"):
        resolve_checkpoint(str(whole / "config.json"))


def test_a_hub_that_does_not_answer(monkeypatch, tmp_path):
    from huggingface_hub import errors

    def fail(*args: Any, **kwargs: Any) -> str:
        raise errors.LocalEntryNotFoundError("the hub cannot be reached")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no local folder of that name, and the hub said: the hub cannot be"):
        resolve_checkpoint("some-owner/some-model")


def test_a_hub_id_is_downloaded(monkeypatch, tmp_path):
    asked = {}

    def download(name: str, allow_patterns: list[str], tqdm_class: Any) -> str:
        asked[name] = allow_patterns
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_checkpoint("some-owner/some-model") == tmp_path
    patterns = asked["some-owner/some-model"]
    assert "*.safetensors" in patterns and "*.bin" not in patterns
    # What a bundle takes of a checkpoint is there, a template in a file of its own too.
    assert [name for name in TOKENIZER_FILES if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_reading_checkpoints_needs_no_torch():
    code = (
        "import sys; import speccompile.checkpoints.checkpoint, speccompile.checkpoints.config_values;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'onnx', 'huggingface_hub')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
