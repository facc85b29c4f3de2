# SPDX-License-Identifier: Apache-2.0
"""Writes and changes checkpoints of tiny sizes."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HIDDEN, VOCAB, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 16, 40, 6, 4, 2, 4
INNER, DRAFT_VOCAB, SMALL = 24, 12, 8  # MLP width, EAGLE-3's draft vocabulary, width of GLIDE and Prophet
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "intermediate_size": INNER, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 10000.0,
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def write_target(folder: Path, **changes: Any) -> Path:
    """The doctor needs only a config of a target."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return folder


def write_tables(folder: Path) -> Tensors:
    """Gives a target its embeddings and LM head; returns them by their names."""
    tables = draw({"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}, 7)
    save_file(tables, folder / "model.safetensors")
    return tables


def draw(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {key: (torch.randn(shape, generator=generator) * 0.2).bfloat16() for key, shape in shapes.items()}


def save(folder: Path, config: Mapping[str, Any], tensors: Tensors, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if name.endswith(".safetensors"):
        save_file({k: t.clone() for k, t in tensors.items()}, folder / name)  # clone: shared ones are stored twice
    else:
        torch.save(tensors, folder / name)
    return folder


def edit(folder: Path, change: Callable[[Tensors], Any]) -> None:
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def set_config(folder: Path, **changes: Any) -> None:
    """None removes a key; a dot in a name is written as two underscores."""
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        section, *path = config, *name.split("__")
        for part in path[:-1]:
            section = section[part]
        if value is None:
            section.pop(path[-1], None)
        else:
            section[path[-1]] = value
    (folder / "config.json").write_text(json.dumps(config))


def layer_shapes(
    prefix: str, hidden: int, qkv_input: int, *, norm: bool = True, heads: int = HEADS, kv_heads: int = KV_HEADS
) -> dict[str, tuple[int, ...]]:
    dim = HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.self_attn.q_proj.weight": (heads * dim, qkv_input),
        f"{prefix}.self_attn.k_proj.weight": (kv_heads * dim, qkv_input),
        f"{prefix}.self_attn.v_proj.weight": (kv_heads * dim, qkv_input),
        f"{prefix}.self_attn.o_proj.weight": (hidden, heads * dim),
        f"{prefix}.mlp.gate_proj.weight": (INNER, hidden),
        f"{prefix}.mlp.up_proj.weight": (INNER, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, INNER),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }
    return {**shapes, **({f"{prefix}.input_layernorm.weight": (hidden,)} if norm else {})}
