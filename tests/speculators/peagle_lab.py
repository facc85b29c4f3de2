# SPDX-License-Identifier: Apache-2.0
"""P-EAGLE drafters of tiny sizes, and their forward in float64 over whole texts, from the public description."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from tests.export.eagle3_reference import Oracle, causal
from tests.speculators.eagle_lab import HIDDEN, STREAMS, VOCAB, fitted, texts_of

MASK, NUM_FITTED, DRAFTED, HEADS = 37, 4, 34, 4
NORMS = ("input_norm.weight", *(f"fc_norm.{i}.weight" for i in range(3)))
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


def oracle(held: Arrays) -> Oracle:
    """Returns the drafter in float64."""
    head_dim = len(held["midlayer.self_attn.q_proj.weight"]) // HEADS
    config = {
        "num_hidden_layers": 2, "head_dim": head_dim, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "norm_before_residual": False, "norm_output": False,
    }  # fmt: skip
    return Oracle(config, {key: torch.from_numpy(np.asarray(array, np.float64)) for key, array in held.items()})


def fuse(held: Arrays, states: np.ndarray, *, is_normed: bool = True) -> np.ndarray:
    """Returns features [rows, hidden] of states [rows, 3 * target hidden]."""
    kept = {key: array for key, array in held.items() if is_normed or key not in NORMS}
    return oracle(kept).fuse(torch.from_numpy(states.astype(np.float64)).chunk(3, -1)).numpy()


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
    drafter, known = oracle(held), torch.from_numpy(fuse(held, states))
    own = fuse(held, held["mask_hidden"].reshape(1, -1)) if mask_feature is None else mask_feature
    masks = torch.from_numpy(np.asarray(own, np.float64))
    features = torch.cat((known[:-1], masks.repeat(stale, 1), known[-1:], masks.repeat(num_masks, 1)))
    read = torch.tensor([*tokens[:-1], *[mask] * stale, tokens[-1], *[mask] * num_masks])
    num = len(read)
    positions = torch.arange(num) + shift * (torch.arange(num) >= num - num_masks)
    embedded, seen = drafter.tensors["embed_tokens.weight"][read], (causal(num, window), causal(num))
    return drafter.scored(drafter.own(embedded, features, positions, seen))[num - 1 - num_masks :].numpy()


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
