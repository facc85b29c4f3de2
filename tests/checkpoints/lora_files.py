# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in PEFT's layout, written out here by its published names, and what they mean."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "someone/base",
    "r": 2,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "down_proj"],
    "modules_to_save": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "lora_dropout": 0.05,
    "init_lora_weights": True,
    "inference_mode": True,
}
PREFIX = "base_model.model."


def small_model(**config: Any) -> Any:
    """Returns a Llama of two layers with random weights, float32; its tables are not tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 40}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "tie_word_embeddings": False, **config})).eval()


def factors(shapes: Mapping[str, tuple[int, int]], rank: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns random A and B, float32, of modules by their [out, in]."""
    source, made = torch.Generator().manual_seed(seed), {}
    for module, (num_out, num_in) in shapes.items():
        made[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(rank, num_in, generator=source)
        made[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(num_out, rank, generator=source)
    return made


def linear_shapes(model: Any, endings: Sequence[str] = ("q_proj", "down_proj")) -> dict[str, tuple[int, int]]:
    """Returns [out, in] of a model's linear layers with these names."""
    found = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in endings}
    return {name: tuple(module.weight.shape) for name, module in found.items()}


def write_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """Writes an adapter; `config` changes `CONFIG`, and a value of `...` removes a key."""
    folder.mkdir(parents=True, exist_ok=True)
    held = {key: value for key, value in {**CONFIG, **config}.items() if value is not ...}
    (folder / "adapter_config.json").write_text(json.dumps(held))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder
