# SPDX-License-Identifier: Apache-2.0
"""One forward pass of an EAGLE-3 drafter in plain torch, from the public descriptions, by the names of each layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x: [heads, nodes, head_dim]."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), -1)


def target_logits(
    config: Mapping[str, Any], held: Mapping[str, torch.Tensor], layer: str, tokens: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """Logits over the target's vocabulary, -inf for tokens that the draft lacks.

    Args:
        config: of the layer, with `norm_before_residual`.
        held: the checkpoint's tensors by its own keys.
        layer: prefix of the layer's keys.
        tokens: [nodes] int64.
        states: [nodes, num_layers * target_hidden].
    """
    t = {k: v.float() if v.is_floating_point() else v for k, v in held.items()}
    eps, heads, head_dim = config["rms_norm_eps"], config["num_attention_heads"], config["head_dim"]
    x = states @ t["fc.weight"].T
    embedded = norm(t["embed_tokens.weight"][tokens], t[f"{layer}.input_layernorm.weight"], eps)
    normed = norm(x, t[f"{layer}.hidden_norm.weight"], eps)
    residual = normed if config["norm_before_residual"] else x
    joined = torch.cat((embedded, normed), -1)

    def project(name: str) -> torch.Tensor:
        rows = (joined @ t[f"{layer}.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, head_dim)).transpose(0, 1)
        weight = t.get(f"{layer}.self_attn.{name}_norm.weight")  # of DeepSpec's
        return rows if weight is None else norm(rows, weight, eps)

    q, k, v = rotate(project("q"), config["rope_theta"]), rotate(project("k"), config["rope_theta"]), project("v")
    k, v = (part.repeat_interleave(heads // part.shape[0], 0) for part in (k, v))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
    x = residual + mixed @ t[f"{layer}.self_attn.o_proj.weight"].T
    y = norm(x, t[f"{layer}.post_attention_layernorm.weight"], eps)
    gate, up = (y @ t[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    x = x + (functional.silu(gate) * up) @ t[f"{layer}.mlp.down_proj.weight"].T
    logits = norm(x, t["norm.weight"], eps) @ t["lm_head.weight"].T
    if "d2t" not in t:
        return logits
    full = torch.full((len(tokens), config["vocab_size"]), float("-inf"))
    full[:, torch.arange(logits.shape[1]) + t["d2t"]] = logits
    return full
