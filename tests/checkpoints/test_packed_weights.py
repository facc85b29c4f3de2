# SPDX-License-Identifier: Apache-2.0
"""Packed weights: what is read is what was packed, to the bit; what does not fit is refused by name."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from speccompile.checkpoints.checkpoint import check_checkpoint, count_params, list_tensors, read_dims
from speccompile.checkpoints.families import check_architecture
from speccompile.checkpoints.packed_weights import unpack_words
from speccompile.checkpoints.tensor_files import open_files
from speccompile.errors import CheckpointError, ExportError
from speccompile.export import attention
from speccompile.export.weights import load_model

Tensors = dict[str, torch.Tensor]
Packer = Callable[[str, torch.Tensor, np.random.Generator], tuple[Tensors, np.ndarray]]
GROUP = 16


def words(levels: np.ndarray, bits: int) -> torch.Tensor:
    """[rows, numbers] -> [rows, words] int32, lowest bits first; one number at a time."""
    per_word = 32 // bits
    made = np.zeros((levels.shape[0], -(-levels.shape[1] // per_word)), np.uint32)
    for row in range(levels.shape[0]):
        for at in range(levels.shape[1]):
            made[row, at // per_word] |= np.uint32(levels[row, at]) << np.uint32(at % per_word * bits)
    return torch.from_numpy(made.view(np.int32).copy())


def grouped(weight: torch.Tensor, rng: np.random.Generator, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns random levels and zeros as unsigned numbers, and float16 scales, by [out, in] and [out, groups]."""
    num_out, num_in = weight.shape
    levels = rng.integers(0, 1 << bits, (num_out, num_in))
    zeros = rng.integers(1, 1 << bits, (num_out, num_in // GROUP))
    scales = rng.uniform(0.002, 0.02, zeros.shape).astype(np.float16)
    return levels, zeros, scales


def meant(levels: np.ndarray, zeros: np.ndarray, scales: np.ndarray, order: np.ndarray) -> np.ndarray:
    return ((levels - zeros[:, order]).astype(np.float64) * scales[:, order].astype(np.float64)).astype(np.float32)


def gptq(bits: int, offset: int, *, ordered: bool) -> Packer:
    def pack(name: str, weight: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        levels, zeros, scales = grouped(weight, rng, bits)
        order = np.arange(weight.shape[1]) // GROUP
        parts = {"qweight": words(levels, bits).T.contiguous()}
        parts["qweight"] = words(levels, bits).T.contiguous()
        parts["qzeros"] = words((zeros - offset).T, bits)
        parts["scales"] = torch.from_numpy(scales.T.copy())
        if ordered:
            order = rng.permutation(order)
            parts["g_idx"] = torch.from_numpy(order.astype(np.int32))
        return {f"{name}.{k}": v for k, v in parts.items()}, meant(levels, zeros, scales, order)

    return pack


def awq(name: str, weight: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    levels, zeros, scales = grouped(weight, rng, 4)

    def packed(numbers: np.ndarray) -> torch.Tensor:
        """[rows, columns]: bits 0 to 3 of a word have its column 0, then come columns 2, 4, 6, 1, 3, 5, 7."""
        order = [8 * start + column for start in range(numbers.shape[1] // 8) for column in (0, 2, 4, 6, 1, 3, 5, 7)]
        return words(numbers[:, order], 4)

    parts = {"qweight": packed(levels.T), "qzeros": packed(zeros.T), "scales": torch.from_numpy(scales.T.copy())}
    order = np.arange(weight.shape[1]) // GROUP
    return {f"{name}.{k}": v for k, v in parts.items()}, meant(levels, zeros, scales, order)


def compressed(bits: int, *, asymmetric: bool) -> Packer:
    def pack(name: str, weight: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        levels, zeros, scales = grouped(weight, rng, bits)
        parts = {"weight_packed": words(levels, bits), "weight_scale": torch.from_numpy(scales).to(torch.bfloat16)}
        parts["weight_shape"] = torch.tensor(weight.shape)
        if asymmetric:
            parts["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        else:
            zeros = np.full_like(zeros, 1 << (bits - 1))
        held = parts["weight_scale"].float().numpy()
        order = np.arange(weight.shape[1]) // GROUP
        return {f"{name}.{k}": v for k, v in parts.items()}, meant(levels, zeros, held, order)

    return pack


def int8_rows(name: str, weight: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    levels = rng.integers(-128, 128, tuple(weight.shape)).astype(np.int8)
    scales = rng.uniform(0.001, 0.01, (len(levels), 1)).astype(np.float32)
    parts = {"weight": torch.from_numpy(levels), "weight_scale": torch.from_numpy(scales)}
    unused = {"input_scale": torch.ones(1)}
    return {f"{name}.{k}": v for k, v in (parts | unused).items()}, levels.astype(np.float32) * scales


def fp8(name: str, weight: torch.Tensor, rng: np.random.Generator, block: tuple[int, int] | None) -> Any:
    levels = rng.standard_normal(tuple(weight.shape)).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    stored = torch.from_numpy(levels.view(np.uint8)).view(torch.float8_e4m3fn)
    values = levels.astype(np.float32)
    if block is None:
        scale = np.float32(0.013)
        return {f"{name}.weight": stored, f"{name}.weight_scale": torch.tensor([scale])}, values * scale
    tall, wide = block
    table = rng.uniform(0.001, 0.05, (-(-len(levels) // tall), -(-levels.shape[1] // wide))).astype(np.float32)
    expected = np.empty_like(values)
    for row in range(len(levels)):
        for column in range(levels.shape[1]):
            expected[row, column] = values[row, column] * table[row // tall, column // wide]
    return {f"{name}.weight": stored, f"{name}.weight_scale_inv": torch.from_numpy(table)}, expected


def fp8_blocks(name: str, weight: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    made: tuple[Tensors, np.ndarray] = fp8(name, weight, rng, (24, 20))
    return made


def fp8_whole(name: str, weight: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    made: tuple[Tensors, np.ndarray] = fp8(name, weight, rng, None)
    return made


PACK, INT = "pack-quantized", "int-quantized"
CASES: dict[str, tuple[Packer, dict[str, Any]]] = {
    "gptq 4": (gptq(4, 1, ordered=False), {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "gptq 4 ordered": (gptq(4, 1, ordered=True), {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "gptq 8 v2": (
        gptq(8, 0, ordered=False),
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "compressed 4": (
        compressed(4, asymmetric=False),
        {
            "quant_method": "compressed-tensors",
            "format": PACK,
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": GROUP}}},
        },
    ),
    "compressed 4 zeros": (compressed(4, asymmetric=True), {"quant_method": "compressed-tensors", "format": PACK}),
    "compressed 8": (
        compressed(8, asymmetric=False),
        {
            "quant_method": "compressed-tensors",
            "format": PACK,
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}},
        },
    ),
    "compressed int8": (int8_rows, {"quant_method": "compressed-tensors", "format": INT}),
    "compressed fp8": (fp8_whole, {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "fp8 blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [24, 20]}),
}


def write(folder: Path, case: str, *, moe: bool = False) -> dict[str, np.ndarray]:
    """Writes a tiny packed checkpoint; returns the weights that it means."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    if moe:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    model.to(torch.bfloat16).save_pretrained(folder)
    pack, quantization = CASES[case]
    rng = np.random.default_rng(1)
    stored: Tensors = {}
    values: dict[str, np.ndarray] = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        if key.endswith("proj.weight"):
            parts, values[key] = pack(key.removesuffix(".weight"), tensor, rng)
            stored |= parts
        else:
            stored[key], values[key] = tensor, tensor.float().numpy()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return values


@pytest.fixture
def our_attention() -> None:
    attention.register()


@pytest.mark.parametrize("case", CASES)
def test_every_value_survives(case: str, tmp_path: Path) -> None:
    values = write(tmp_path, case)
    files = open_files(tmp_path)
    assert list_tensors(tmp_path) == files.headers
    assert files.headers.keys() == values.keys()
    for key, expected in values.items():
        got = files.tensor(key).float().numpy()
        assert got.shape == files.headers[key].shape
        np.testing.assert_array_equal(got, expected, err_msg=key)
    check_checkpoint(tmp_path, read_dims(tmp_path))
    assert count_params(tmp_path) == sum(value.size for value in values.values())


@pytest.mark.usefixtures("our_attention")
@pytest.mark.parametrize("case", CASES)
def test_a_packed_checkpoint_loads_as_the_plain_one(case: str, tmp_path: Path) -> None:
    values = write(tmp_path, case)
    state = load_model(tmp_path, "checkpoint").state_dict()
    assert state.keys() >= values.keys()
    for key, expected in values.items():
        np.testing.assert_array_equal(state[key].numpy(), expected, err_msg=key)


@pytest.mark.usefixtures("our_attention")
def test_packed_experts_become_those_of_the_model(tmp_path: Path) -> None:
    values = write(tmp_path, "compressed 4", moe=True)
    experts = load_model(tmp_path, "checkpoint").model.layers[1].mlp.experts
    for expert in range(4):
        prefix = f"model.layers.1.mlp.experts.{expert}"
        both = np.concatenate([values[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up")])
        np.testing.assert_array_equal(experts.gate_up_proj[expert].detach().numpy(), both)
        np.testing.assert_array_equal(experts.down_proj[expert].detach().numpy(), values[f"{prefix}.down_proj.weight"])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_words_are_read_lowest_bits_first(bits: int) -> None:
    numbers = np.random.default_rng(bits).integers(0, 1 << bits, (3, 64))
    np.testing.assert_array_equal(unpack_words(words(numbers, bits).numpy(), bits), numbers)


@pytest.mark.parametrize(
    ("config", "got"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "many"}, "group_size 'many'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}},
            },
            "4 and 8 bits",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: dict[str, Any], got: str, tmp_path: Path) -> None:
    write(tmp_path, "awq")
    held = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(held))
    with pytest.raises(CheckpointError, match=re.escape(got)):
        list_tensors(tmp_path)


def test_an_unknown_method_is_an_architecture_that_is_not_exported() -> None:
    with pytest.raises(ExportError, match="bitsandbytes"):
        check_architecture({"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes"}})
    check_architecture({"model_type": "llama", "quantization_config": {"quant_method": "awq"}})


@pytest.mark.parametrize(
    ("case", "part", "change", "got"),
    [
        ("gptq 4", "scales", None, "no such tensor"),
        ("gptq 4", "qzeros", lambda t: t[:, :-1], r"shape \[3, 7\]"),
        ("gptq 4 ordered", "g_idx", lambda t: t + 1, "group 4"),
        ("awq", "qzeros", lambda t: t[:-1], r"shape \[2, 8\]"),
        ("compressed 4", "weight_shape", lambda t: t + 1, r"shape \[49, 65\]"),
        ("compressed 4", "weight_scale", lambda t: t[:, :2], "2 groups of 64 columns"),
        ("compressed int8", "weight_scale", lambda t: t[:7], r"shape \[7, 1\]"),
        ("fp8 blocks", "weight_scale_inv", lambda t: t.double(), "F64"),
    ],
)
def test_a_part_that_does_not_fit_is_named(
    case: str, part: str, change: Callable[[torch.Tensor], torch.Tensor] | None, got: str, tmp_path: Path
) -> None:
    write(tmp_path, case)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    key = f"model.layers.0.self_attn.{'q' if part == 'qzeros' else 'o'}_proj.{part}"
    if change is None:
        del stored[key]
    else:
        stored[key] = change(stored[key]).contiguous()
    save_file(stored, path, {"format": "pt"})

    def read() -> np.ndarray:
        return open_files(tmp_path).array(key.rpartition(".")[0] + ".weight")

    with pytest.raises(CheckpointError, match=got) as caught:
        read()
    assert "self_attn" in caught.value.where
