# SPDX-License-Identifier: Apache-2.0
"""P-EAGLE drafters of tiny sizes, and their forward in numpy over whole texts, from the public description."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from tests.speculators.eagle_lab import HIDDEN, STREAMS, VOCAB, fitted, texts_of

MASK, NUM_FITTED, DRAFTED, HEADS = 37, 4, 34, 4
Arrays = dict[str, np.ndarray]


def config_of(hidden: int = 96, **changes: Any) -> dict[str, Any]:
    """Returns the config of a drafter of two layers, wider than its target."""
    return {
        "architectures": ["PeagleLlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "target_hidden_size": HIDDEN, "intermediate_size": hidden, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": hidden // HEADS, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": VOCAB, "draft_vocab_size": DRAFTED,
        "tie_word_embeddings": False, "norm_before_residual": False, "parallel_drafting": True, "ptd_token_id": MASK,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in STREAMS], **changes,
    }  # fmt: skip


def tensors_of(config: Mapping[str, Any], seed: int = 4) -> Arrays:
    """Returns random tensors in which every part affects the output, by the keys of the first release."""
    rng, width, inner = np.random.default_rng(seed), config["hidden_size"], config["intermediate_size"]
    kv, fused = width // 2, 3 * HIDDEN

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape) * 0.3 if len(shape) > 1 else rng.uniform(0.5, 1.5, shape)

    held = {
        "embed_tokens.weight": 3 * draw(VOCAB, width), "fc.weight": draw(width, fused),
        "mask_hidden": 6 * draw(1, 1, fused), "norm.weight": draw(width), "lm_head.weight": draw(DRAFTED, width),
        "midlayer.hidden_norm.weight": draw(width),
    }  # fmt: skip
    for layer, read in (("midlayer", 2 * width), ("layers.1", width)):
        rows = {"q": width, "k": kv, "v": kv}
        held |= {f"{layer}.self_attn.{name}_proj.weight": draw(num, read) for name, num in rows.items()}
        held[f"{layer}.self_attn.o_proj.weight"] = draw(width, width)
        held |= {f"{layer}.mlp.{name}_proj.weight": draw(inner, width) for name in ("gate", "up")}
        held[f"{layer}.mlp.down_proj.weight"] = draw(width, inner)
        held |= {f"{layer}.{name}_layernorm.weight": draw(width) for name in ("input", "post_attention")}
    if config.get("norm_before_fc"):
        held["input_norm.weight"] = draw(fused)
    if config.get("fc_norm"):
        held |= {f"fc_norm.{i}.weight": draw(HIDDEN) for i in range(3)}
    made = {key: array.astype(np.float32) for key, array in held.items()}
    chosen = np.sort(rng.permutation(VOCAB)[:DRAFTED])
    return made | {"d2t": chosen - np.arange(DRAFTED)}


def norm(x: np.ndarray, weight: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def fuse(held: Arrays, states: np.ndarray, *, is_normed: bool = True) -> np.ndarray:
    """Returns features [rows, hidden] of states [rows, 3 * target hidden]."""
    if is_normed and "fc_norm.0.weight" in held:
        parts = np.split(states, 3, axis=-1)
        states = np.concatenate([norm(x, held[f"fc_norm.{i}.weight"]) for i, x in enumerate(parts)], -1)
    if is_normed and "input_norm.weight" in held:
        states = norm(states, held["input_norm.weight"])
    return states @ held["fc.weight"].T


def _attend(held: Arrays, layer: str, x: np.ndarray, positions: np.ndarray, head_dim: int, window: int) -> np.ndarray:
    def project(name: str) -> np.ndarray:
        rows = x @ held[f"{layer}.self_attn.{name}_proj.weight"].T
        return rows.reshape(len(x), -1, head_dim).transpose(1, 0, 2)

    half = head_dim // 2
    angles = positions[:, None] * 10000.0 ** (-np.arange(half) / half)

    def rotate(rows: np.ndarray) -> np.ndarray:
        left, right = rows[..., :half], rows[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate((left * cos - right * sin, right * cos + left * sin), -1)

    q, k, v = rotate(project("q")), rotate(project("k")), project("v")
    k, v = (part.repeat(len(q) // len(part), axis=0) for part in (k, v))
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(head_dim)
    rows = np.arange(len(x))
    is_seen = (rows[:, None] >= rows) & (rows[:, None] - rows < (window or len(x)))
    scores = np.where(is_seen, scores, -np.inf)
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (probs / probs.sum(-1, keepdims=True)) @ v
    return mixed.transpose(1, 0, 2).reshape(len(x), -1) @ held[f"{layer}.self_attn.o_proj.weight"].T


def _mlp(held: Arrays, layer: str, x: np.ndarray) -> np.ndarray:
    y = norm(x, held[f"{layer}.post_attention_layernorm.weight"])
    gate, up = (y @ held[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (gate / (1 + np.exp(-gate)) * up) @ held[f"{layer}.mlp.down_proj.weight"].T


def forward(
    held: Arrays,
    states: np.ndarray,
    tokens: list[int],
    num_masks: int,
    *,
    shift: int = 0,
    stale: int = 0,
    mask_feature: np.ndarray | None = None,
    mask: int = MASK,
    window: int = 0,
) -> np.ndarray:
    """Returns what the LM head reads after the root and after each mask, [1 + masks, hidden] float64.

    Args:
        held: the drafter's tensors.
        states: [rows, 3 * target hidden], of the positions before the tokens.
        tokens: those after these positions; the last one is the root.
        num_masks: masks after the root.
        shift: of the masks' positions: a fault.
        stale: masks of an earlier run that are left before the root: a fault.
        mask_feature: of the masks; None: as the format has it.
        mask: token of the masks.
        window: of the first layer's attention, 0: none.
    """
    held = {key: array.astype(np.float64) for key, array in held.items()}
    known = fuse(held, states.astype(np.float64))
    own = fuse(held, held["mask_hidden"].reshape(1, -1)) if mask_feature is None else mask_feature
    features = np.concatenate((known[:-1], own.repeat(stale, 0), known[-1:], own.repeat(num_masks, 0)))
    read = [*tokens[:-1], *[mask] * stale, tokens[-1], *[mask] * num_masks]
    positions = np.arange(len(read)) + shift * (np.arange(len(read)) >= len(read) - num_masks)
    head_dim = len(held["midlayer.self_attn.q_proj.weight"]) // HEADS
    embedded = norm(held["embed_tokens.weight"][read], held["midlayer.input_layernorm.weight"])
    both = np.concatenate((embedded, norm(features, held["midlayer.hidden_norm.weight"])), -1)
    x = _mlp(held, "midlayer", features + _attend(held, "midlayer", both, positions, head_dim, window))
    y = norm(x, held["layers.1.input_layernorm.weight"])
    x = _mlp(held, "layers.1", x + _attend(held, "layers.1", y, positions, head_dim, 0))
    return norm(x, held["norm.weight"])[len(read) - 1 - num_masks :]


def probs_after(held: Arrays, *args: Any, **faults: Any) -> np.ndarray:
    """Returns the probabilities of the target's tokens after the root and after each mask; see `forward`."""
    logits = forward(held, *args, **faults) @ held["lm_head.weight"].T.astype(np.float64)
    made = np.zeros((len(logits), VOCAB))
    made[:, held["d2t"] + np.arange(DRAFTED)] = np.exp(logits - logits.max(-1, keepdims=True))
    return made / made.sum(-1, keepdims=True)


def write_peagle(folder: Path, config: Mapping[str, Any], held: Arrays) -> Path:
    """Writes the layout of the first release."""
    folder.mkdir()
    save_file({key: np.ascontiguousarray(array) for key, array in held.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


def write_learnt(folder: Path, target: Path) -> Path:
    """Writes a random drafter whose LM head fits the target's texts best, after masks too."""
    config = config_of()
    held = tensors_of(config)
    d2t, inputs, wanted = held["d2t"] + np.arange(DRAFTED), [], []
    for text, seen in zip(*texts_of(target), strict=True):
        tokens = text[0].tolist()
        states = torch.cat([seen[i + 1][0] for i in STREAMS], -1).numpy()
        for end in range(2, len(tokens) - NUM_FITTED):
            inputs.append(torch.from_numpy(forward(held, states[: end - 1], tokens[1:end], NUM_FITTED - 1)))
            wanted.append(8 * torch.eye(VOCAB)[tokens[end : end + NUM_FITTED]][:, d2t])
    held["lm_head.weight"] = fitted(inputs, wanted, 0.1).numpy()
    return write_peagle(folder, config, held)
