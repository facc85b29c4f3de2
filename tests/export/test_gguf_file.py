# SPDX-License-Identifier: Apache-2.0
"""A GGUF file becomes a checkpoint with the values that its blocks mean, heads in transformers' order."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Qwen3Config
from typer.testing import CliRunner

from speccompile.cli.main import app
from speccompile.errors import CheckpointError
from speccompile.export.gguf_file import write_checkpoint

HEADS, KV_HEADS, HEAD, HIDDEN, VOCAB = 4, 2, 64, 256, 64


def q8_0(shape: tuple[int, int], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of 32: a float16 scale, 32 signed bytes."""
    scales = rng.uniform(0.001, 0.01, (shape[0], shape[1] // 32, 1)).astype(np.float16)
    levels = rng.integers(-127, 128, (shape[0], shape[1] // 32, 32)).astype(np.int8)
    raw = np.concatenate([scales.view(np.uint8), levels.view(np.uint8)], axis=2).reshape(shape[0], -1)
    return raw, (levels * scales.astype(np.float32)).reshape(shape)


def q4_k(shape: tuple[int, int], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of 256: two float16 factors, 8 scales and 8 minima of 6 bits in 12 bytes, 256 levels of 4 bits."""
    blocks = shape[0] * shape[1] // 256
    factors = rng.uniform(0.0001, 0.001, (blocks, 2)).astype(np.float16)
    scales, minima = rng.integers(0, 64, (2, blocks, 8)).astype(np.uint8)
    levels = rng.integers(0, 16, (blocks, 8, 32)).astype(np.uint8)
    packed = np.empty((blocks, 12), np.uint8)
    packed[:, :4] = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    packed[:, 4:8] = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    packed[:, 8:] = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    nibbles = (levels[:, 0::2] | levels[:, 1::2] << 4).reshape(blocks, 128)
    raw = np.concatenate([factors.view(np.uint8), packed, nibbles], axis=1).reshape(shape[0], -1)
    scale, low = (factors[:, :1].astype(np.float32) * scales, factors[:, 1:].astype(np.float32) * minima)
    values = scale[:, :, None] * levels - low[:, :, None]
    return raw, values.reshape(shape).astype(np.float32)


KINDS = {"Q8_0": q8_0, "Q4_K": q4_k}


def in_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of halves of a head, as transformers rotates them, to neighbouring pairs, as llama.cpp does."""
    return rows.reshape(heads, 2, HEAD // 2, -1).swapaxes(1, 2).reshape(rows.shape)


CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config, "gemma3": Gemma3TextConfig}


def write(
    path: Path,
    kind: str = "Q8_0",
    arch: str = "llama",
    head: int = HEAD,
    keys: Mapping[str, Any] | None = None,
    rename: Mapping[str, str] | None = None,
    more: tuple[str, ...] = (),
) -> dict[str, np.ndarray]:
    """Writes a tiny model without a tokenizer; returns its weights in transformers' order.

    `keys` are added, `rename` names tensors otherwise ("": leaves them out), `more` are vectors that are added.
    """
    config = CONFIGS[arch](
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=1, head_dim=head,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=64,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, arch)
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6 if arch == "gemma3" else 10000.0)
    writer.add_tokenizer_model("none")
    for key, value in (keys or {}).items():
        add = {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](key, value)
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], 1)
    rng, values = np.random.default_rng(0), {}
    for key, shape in shapes.items():
        name = (rename or {}).get(held := names.get_name(key, try_suffixes=(".weight",)), held)
        if not name:
            continue
        if len(shape) == 1:
            values[key] = rng.standard_normal(shape, np.float32)
            writer.add_tensor(name, values[key])
            continue
        raw, values[key] = KINDS[kind](shape, rng)
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(key.split(".")[-2], 0)
        stored = in_pairs(raw, heads) if heads and arch == "llama" else raw
        writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=gguf.GGMLQuantizationType[kind])
    for name in more:
        writer.add_tensor(name, np.ones(HEAD // 2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_blocks_becomes_a_checkpoint(kind: str, tmp_path: Path) -> None:
    values = write(tmp_path / "model.gguf", kind)
    (tmp_path / "out").mkdir()
    facts = write_checkpoint(tmp_path / "model.gguf", tmp_path / "out")
    assert facts["model_type"] == "llama"
    assert not facts["has_tokenizer"]
    assert facts["block_types"][kind] == sum(value.ndim == 2 for value in values.values())
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert held.keys() == values.keys()
    for key, expected in values.items():
        np.testing.assert_allclose(held[key].numpy(), expected, rtol=2e-6, atol=1e-7, err_msg=key)
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert not hasattr(plain.config, "quantization_config")
    assert plain.config.head_dim == HEAD


def test_the_command_writes_a_whole_folder_or_none(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf")
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "model.gguf"), "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "Q8_0" in done.output
    assert "tokenizer.json" in done.output
    data = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "half.gguf").write_bytes(data[: len(data) // 2])
    for name in ("half.gguf", "none.gguf"):
        with pytest.raises(CheckpointError, match=name):
            write_checkpoint(tmp_path / name, tmp_path / "other")
        done = CliRunner().invoke(app, ["convert", str(tmp_path / name), "-o", str(tmp_path / "other")])
        assert done.exit_code != 0
        assert not (tmp_path / "other").exists()


YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
WINDOW = {"gemma3.attention.sliding_window": 32}
WRONG = {
    "a missing tensor": ({"rename": {"blk.0.ffn_up.weight": ""}}, "1 missing weights .*mlp.up_proj"),
    "a misnamed tensor": ({"rename": {"blk.0.ffn_up.weight": "blk.0.ffn_upp.weight"}}, "blk.0.ffn_upp.weight"),
    "a missing norm": ({"rename": {"output_norm.weight": ""}}, "missing weights .*norm.weight"),
    "a tensor that is left over": ({"more": ("blk.1.attn_norm.weight",)}, "blk.1.attn_norm.weight"),
    "rope's own factors": ({"more": ("rope_freqs.weight",)}, "rope_freqs.weight"),
    "biases of attention": ({"more": ("blk.0.attn_q.bias", "blk.0.attn_k.bias")}, "attn_k.bias, blk.0.attn_q.bias"),
    "yarn": ({"keys": YARN}, r"llama.rope.scaling.type\): got yarn"),
    "linear scaling": ({"keys": {"llama.rope.scale_linear": 2.0}}, "llama.rope.scale_linear"),
    "part of a head rotated": ({"keys": {"llama.rope.dimension_count": 32}}, "llama.attention.key_length"),
    "another width of values": ({"keys": {"llama.attention.value_length": 32}}, "llama.attention.value_length"),
    "capped logits": ({"keys": {"llama.final_logit_softcapping": 30.0}}, "llama.final_logit_softcapping"),
    "scaled logits": ({"keys": {"llama.logit_scale": 0.5}}, "llama.logit_scale"),
    "a window": ({"keys": {"llama.attention.sliding_window": 16}}, "llama.attention.sliding_window"),
    "a key of nobody": ({"keys": {"llama.future": 1}}, "llama.future"),
    "a name that adds a window": ({"keys": {"general.name": "mistral"}}, "llama.attention.sliding_window.*4096"),
    "heads of another width": ({"arch": "qwen3"}, r"qwen3.attention.key_length\): got 64; expected 128"),
    "a scale of queries": ({"arch": "gemma3", "keys": WINDOW}, "heads of 64 numbers.* scales by 256"),
    "scaled positions": (
        {"arch": "gemma3", "head": 256, "keys": WINDOW | {"gemma3.rope.scaling.factor": 8.0}},
        "gemma3.rope.scaling.factor",
    ),
}


@pytest.mark.parametrize(("changes", "said"), WRONG.values(), ids=WRONG.keys())
def test_what_the_file_says_and_transformers_does_not_read_is_refused(changes: Any, said: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", **changes)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=said):
        write_checkpoint(tmp_path / "model.gguf", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


SAME = {
    "no scaling": {"keys": {"llama.rope.scaling.type": "none", "llama.rope.dimension_count": HEAD}},
    "qwen3": {"arch": "qwen3", "head": 128},
    "gemma3": {"arch": "gemma3", "head": 256, "keys": WINDOW},
}


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME.keys())
def test_keys_that_say_the_same_are_taken(changes: Any, tmp_path: Path) -> None:
    values = write(tmp_path / "model.gguf", **changes)
    (tmp_path / "out").mkdir()
    write_checkpoint(tmp_path / "model.gguf", tmp_path / "out")
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert {key for key in values if key != "lm_head.weight"} <= held.keys()


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(*fields: bytes, num: int | None = None) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields) if num is None else num) + b"".join(fields)


ARRAY, NESTED = struct.pack("<I", 9), struct.pack("<IQ", 9, 1)
HOSTILE = {
    "an endless array": (header(text("a") + ARRAY + struct.pack("<IQ", 0, 1 << 60)), "1152921504606846976 items"),
    "many arrays": (header(*[text(str(n)) + ARRAY + struct.pack("<IQ", 0, 1 << 21) + bytes(1 << 21) for n in range(3)]),
                    "2097152 items for '2'"),
    "arrays in arrays": (header(text("a") + ARRAY + NESTED * 5000), "arrays in an array"),
    "an endless text": (header(text("a") + struct.pack("<IQ", 8, 1 << 62)), "a text of"),
    "endless keys": (header(num=1 << 60), "end within the header"),
    "the other byte order": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
    "an unknown type": (header(text("a") + struct.pack("<I", 13)), "unknown type 13"),
    "a key twice": (header(*[text("a") + struct.pack("<IB", 0, 1)] * 2), "key 'a' twice"),
    "another file": (b"PK\3\4" + bytes(40), "begins with"),
    "nothing": (b"", "empty"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "said"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_header_is_refused_at_once(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=said):
        write_checkpoint(tmp_path / "model.gguf", tmp_path / "out")
