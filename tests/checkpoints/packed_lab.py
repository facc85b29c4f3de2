# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with packed weights, packed number by number, and the weights that they mean."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

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


def grouped(
    weight: torch.Tensor, rng: np.random.Generator, bits: int, group: int = GROUP
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns random levels and zeros as unsigned numbers, and float16 scales, by [out, in] and [out, groups]."""
    num_out, num_in = weight.shape
    levels = rng.integers(0, 1 << bits, (num_out, num_in))
    zeros = rng.integers(1, 1 << bits, (num_out, num_in // group))
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


def compressed(bits: int, *, asymmetric: bool, whole_rows: str = "-") -> Packer:
    def pack(name: str, weight: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        group = weight.shape[1] if whole_rows in name else GROUP
        levels, zeros, scales = grouped(weight, rng, bits, group)
        parts = {"weight_packed": words(levels, bits), "weight_scale": torch.from_numpy(scales).to(torch.bfloat16)}
        parts["weight_shape"] = torch.tensor(weight.shape)
        if asymmetric:
            parts["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        else:
            zeros = np.full_like(zeros, 1 << (bits - 1))
        held = parts["weight_scale"].float().numpy()
        order = np.arange(weight.shape[1]) // group
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
    "gptq 4, some layers plain": (
        gptq(4, 1, ordered=False),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "dynamic": {"-:.*lm_head": {}}},
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
    "compressed 4, some by rows": (
        compressed(4, asymmetric=True, whole_rows="o_proj"),
        {
            "quant_method": "compressed-tensors",
            "format": PACK,
            "config_groups": {
                "a": {"weights": {"num_bits": 4, "type": "int", "group_size": GROUP, "strategy": "group"}},
                "b": {"weights": {"num_bits": 4, "type": "int", "strategy": "channel"}},
            },
            "transform_config": {"config_groups": {"R1": {"apply": [{"location": "weight_output"}]}}},
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
    return pack_folder(folder, case)


def pack_folder(folder: Path, case: str) -> dict[str, np.ndarray]:
    """Packs the projections of a plain checkpoint in place, with random values; returns the weights that it means."""
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
