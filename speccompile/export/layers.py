# SPDX-License-Identifier: Apache-2.0
"""Parts of small transformers, for speculators of our own: pure functions of tensors that can be traced."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last dim, computed in float32."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., width], any float dtype, kept in the result."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x)), with Llama's names."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., width]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class SelfAttention(nn.Module):
    """Projections of an attention with rotary positions, with Llama's names."""

    def __init__(self, width: int, hidden: int, num_heads: int, num_kv_heads: int, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta
        self.q_proj = nn.Linear(width, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden, bias=False)

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries, keys and values of x [batch, nodes, width] at `positions`; see `rotate`."""
        q, k, v = (split_heads(part(x), self.head_dim) for part in (self.q_proj, self.k_proj, self.v_proj))
        return rotate(q, positions, self.theta), rotate(k, positions, self.theta), v


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Applies rotary positions in Llama's halves layout to `x` [batch, heads, nodes, head_dim], in its dtype.

    `positions` are [batch, nodes] int64, or broadcast to it.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angles = positions.to(torch.float32)[:, None, :, None] * frequencies  # [batch, 1, nodes, half]
    cos, sin = angles.cos(), angles.sin()
    left, right = x[..., :half].float(), x[..., half:].float()
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)


def split_heads(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[batch, nodes, heads * head_dim] -> [batch, heads, nodes, head_dim]."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def join_heads(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, nodes, head_dim] -> [batch, nodes, heads * head_dim]."""
    return x.transpose(1, 2).flatten(2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Softmax attention with scale head_dim^-0.5; several query heads may share a key head. Returns as `q`.

    Args:
        q: [batch, heads, nodes, head_dim].
        k: [batch, kv_heads, rows, head_dim]; `v` alike.
        mask: bool, true where a key is seen; broadcasts to [batch, heads, nodes, rows].
    """
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(2, 3)).float() * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1).to(v.dtype) @ v


def init_linear(module: nn.Module) -> None:
    """Initialise all linear layers below `module`: normal weights, zero biases."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def copy_weights(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy the weights whose names and shapes are those of parameters of `module`; the others are kept."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in weights and weights[name].shape == parameter.shape:
                parameter.copy_(weights[name])
