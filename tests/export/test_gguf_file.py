# SPDX-License-Identifier: Apache-2.0
"""A GGUF file becomes a checkpoint with the values that its blocks mean, heads in transformers' order."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
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


def write(path: Path, kind: str) -> dict[str, np.ndarray]:
    """Writes a tiny Llama without a tokenizer; returns its weights in transformers' order."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=1, head_dim=HEAD,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=64,
    )  # fmt: skip
    with torch.device("meta"):
        shapes = {key: tuple(value.shape) for key, value in LlamaForCausalLM(config).state_dict().items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    rng, values = np.random.default_rng(0), {}
    for key, shape in shapes.items():
        name = names.get_name(key, try_suffixes=(".weight",))
        if len(shape) == 1:
            values[key] = rng.standard_normal(shape, np.float32)
            writer.add_tensor(name, values[key])
            continue
        raw, values[key] = KINDS[kind](shape, rng)
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(key.split(".")[-2], 0)
        stored = in_pairs(raw, heads) if heads else raw
        writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=gguf.GGMLQuantizationType[kind])
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
    write(tmp_path / "model.gguf", "Q8_0")
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
