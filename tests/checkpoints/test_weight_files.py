# SPDX-License-Identifier: Apache-2.0
"""Files of weights that trainers, wrappers and strangers leave: read as they are meant, or refused at once by name."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speccompile.bundle.tokenizers import check_tokenizer
from speccompile.checkpoints.checkpoint import list_tensors, read_dims
from speccompile.checkpoints.folders import digests_from_checkpoint
from speccompile.checkpoints.safetensors import read_header
from speccompile.checkpoints.tensor_files import open_files
from speccompile.errors import CheckpointError
from speccompile.export import attention
from speccompile.export.weights import load_model
from tests.export.families import CONFIGS
from tests.export.harness import make_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    attention.register()
    made = tmp_path / "model"
    made.mkdir()
    make_checkpoint(CONFIGS["llama2"], made)
    return made


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def write(folder: Path, held: dict[str, torch.Tensor], name: str = "model.safetensors") -> None:
    save_file(held, folder / name, metadata={"format": "pt"})


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model.", "module._orig_mod."])
def test_the_names_of_a_wrapper_are_left_out(prefix, folder):
    plain = weights_of(folder)
    write(folder, {prefix + key: tensor for key, tensor in plain.items()})
    assert list_tensors(folder).keys() == plain.keys() == open_files(folder).headers.keys()
    held = dict(load_model(folder, "checkpoint").named_parameters())
    assert all(torch.equal(held[key], plain[key].float()) for key in plain)


def test_a_prefix_of_some_names_is_kept(folder):
    plain = weights_of(folder)
    write(folder, {("module." if "norm" in key else "") + key: tensor for key, tensor in plain.items()})
    with pytest.raises(CheckpointError, match=r"missing weights .*norm\.weight"):
        load_model(folder, "checkpoint")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_named(value, folder):
    plain = weights_of(folder)
    plain["model.layers.1.mlp.up_proj.weight"][2, 3] = value
    write(folder, plain)
    with pytest.raises(CheckpointError, match=r"\(model\.layers\.1\.mlp\.up_proj\.weight\): got values that are NaN"):
        load_model(folder, "checkpoint")


def test_shards_without_an_index_are_named(folder):
    plain = weights_of(folder)
    (folder / "model.safetensors").unlink()
    for number, keys in enumerate((sorted(plain)[::2], sorted(plain)[1::2])):
        write(folder, {key: plain[key] for key in keys}, f"model-0000{number + 1}-of-00002.safetensors")
    with pytest.raises(
        CheckpointError, match=r"2 files like model-00001-of-00002\.safetensors without an index"
    ) as caught:
        list_tensors(folder)
    assert "model.safetensors.index.json" in caught.value.todo


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors"])
def test_a_pipe_in_the_place_of_weights_is_refused(name, folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / name)
    for read in (list_tensors, open_files, lambda f: digests_from_checkpoint(f, "checkpoint", ("*.safetensors",))):
        with pytest.raises(CheckpointError, match=r"no regular file|without an index"):
            read(folder)


OFFSETS = {
    "one within another": ([(0, 8), (4, 12)], 12, "b at byte 152, within another tensor"),
    "the same twice": ([(0, 8), (0, 8)], 8, "within another tensor"),
    "a gap": ([(0, 8), (12, 20)], 20, "after a gap"),
    "a gap before": ([(4, 12), (12, 20)], 20, "a at byte .*, after a gap"),
}


@pytest.mark.parametrize(("offsets", "size", "said"), OFFSETS.values(), ids=OFFSETS.keys())
def test_tensors_that_overlap_or_leave_gaps_are_refused(offsets, size, said, tmp_path):
    fields = {name: {"dtype": "F32", "shape": [2], "data_offsets": at} for name, at in zip("ab", offsets, strict=True)}
    header = json.dumps(fields).encode().ljust(140)
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", 140) + header + bytes(size))
    with pytest.raises(CheckpointError, match=said):
        read_header(tmp_path / "w.safetensors")


START = b"\x80\x02"
PICKLES = {
    "two million marks": START + b"(" * 2_000_000,
    "marks and tuples": START + b"(" * 500_000 + b"t" * 500_000 + b".",
    "one byte": b"\x80",
    "no stack": START + b"Ns.",
    "an unknown memo": START + b"h\x05.",
    "no text": START + b"X\x02\x00\x00\x00\xff\xfe.",
    "a number of 2 GB": START + b"\x8b\xff\xff\xff\x7f.",
    "a state of nothing": START + b"}}b.",
}


@pytest.mark.parametrize("data", PICKLES.values(), ids=PICKLES.keys())
def test_a_hostile_pickle_is_refused(data, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "heads.bin").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"heads\.bin"):
        open_files(tmp_path)


def tokenizer(**changes: Any) -> dict[str, Any]:
    return {
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
    } | changes


SPLIT = {"type": "Split", "pattern": {"Regex": "(?<a"}, "behavior": "Isolated", "invert": False}
BEYOND = [{"id": 97, "content": "<x>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
           "normalized": False}]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pre_tokenizer": SPLIT}, "tokenizer.json: got .*; expected a tokenizers file"),
        ({"added_tokens": BEYOND}, "added tokens with ids up to 97, which have no row in the embedding"),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_or_used_is_refused_at_build(changes, said, folder):
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    assert check_tokenizer(folder, read_dims(folder), "checkpoint") is not None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(**changes)))
    with pytest.raises(CheckpointError, match=said):
        check_tokenizer(folder, read_dims(folder), "checkpoint")
