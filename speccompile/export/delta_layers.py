# SPDX-License-Identifier: Apache-2.0
"""Layers of Qwen3-Next and Qwen3.5 with our ops: Gated DeltaNet, and attention with a gate on its output.

transformers computes a Gated DeltaNet in chunks by a loop, and interleaves projections head by head. Here each layer's
forward is replaced on the module, with plain projections; without our caches the own forward runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from speccompile.export.attention import IMPLEMENTATION, find_frame
from speccompile.export.recurrent import conv_rows, gated_delta

Change = tuple[Callable[[Any], None], Callable[..., Any], Callable[[Any], bool]]

_NORM_EPSILON = 1e-6  # of queries and keys, fixed in the architecture
_SILU = 1
# 2 atanh(s) / s in powers of s^2, which is at most 1/9; interpolated in Chebyshev's points.
_ATANH = (1.9999996423721313, 0.6667584776878357, 0.3959318697452545, 0.3420361876487732)


class QueryGate(nn.Module):
    """A projection to queries and gates as two, of a linear [heads * 2 * head_dim, hidden]: query, gate by head."""

    def __init__(self, linear: nn.Linear, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        heads = linear.weight.view(-1, 2, head_dim, linear.in_features)
        biases = None if linear.bias is None else linear.bias.view(-1, 2, head_dim)
        self.query, self.gate = (_linear(heads[:, i], None if biases is None else biases[:, i]) for i in (0, 1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., heads * 2 * head_dim], in the order of the original."""
        parts = [part(hidden).unflatten(-1, (-1, self.head_dim)) for part in (self.query, self.gate)]
        return torch.cat(parts, -1).flatten(-2)


class GroupedParts(nn.Module):
    """A projection with rows grouped by key head, [num_groups * sum(widths), hidden], as a plain one for each part."""

    def __init__(self, linear: nn.Linear, num_groups: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        groups = linear.weight.view(num_groups, sum(widths), linear.in_features)
        self.num_groups = num_groups
        self.parts = nn.ModuleList(_linear(part, None) for part in groups.split(widths, dim=1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., num_groups * sum(widths)], in the order of the original."""
        parts = [part(hidden).unflatten(-1, (self.num_groups, -1)) for part in self.parts]
        return torch.cat(parts, -1).flatten(-2)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[-1], 1, bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach().reshape(-1, weight.shape[-1]).clone(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().reshape(-1).clone(), requires_grad=False)
    made.out_features = made.weight.shape[0]
    return made


def _split_query(module: Any) -> None:
    module.q_proj = QueryGate(module.q_proj, module.head_dim)


def _split_groups(module: Any) -> None:
    group = module.num_v_heads // module.num_k_heads
    keys, values = module.head_k_dim, group * module.head_v_dim
    module.in_proj_qkvz = GroupedParts(module.in_proj_qkvz, module.num_k_heads, (keys, keys, values, values))
    module.in_proj_ba = GroupedParts(module.in_proj_ba, module.num_k_heads, (group, group))


def keep(module: Any) -> None: ...


def has_state(module: Any) -> bool:
    frame = find_frame()
    return frame is not None and module.layer_idx in frame.states


def _uses_caches(module: Any) -> bool:
    return bool(module.config._attn_implementation == IMPLEMENTATION)


def _has_positions(module: Any) -> bool:
    frame = find_frame()
    return frame is not None and frame.positions is not None


def _delta_net(module: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """A Gated DeltaNet layer, [batch, nodes, hidden] -> the same, after the states of the frame."""
    frame = find_frame()
    assert frame is not None and frame.state_lengths is not None and frame.sure_nodes is not None
    rows, z, b, a = _projections(module, hidden_states)
    state, pending, conv = frame.states[module.layer_idx]
    step = (frame.lengths, frame.state_lengths, frame.sure_nodes, frame.tree_mask)
    bias = torch.zeros(module.conv_dim) if module.conv1d.bias is None else module.conv1d.bias
    mixed, new_conv = conv_rows(rows, module.conv1d.weight[:, 0], bias, conv, *step, _SILU)
    query, key, value = mixed.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
    decay = -module.A_log.exp() * softplus(a + module.dt_bias)
    out, new_state, new_pending = gated_delta(
        _normalised(query, module),
        _normalised(key, module),
        value,
        decay,
        b.sigmoid(),
        state,
        pending,
        *step,
        module.num_k_heads,
        module.num_v_heads,
        module.head_k_dim**-0.5,
        1,
    )
    frame.updated_states[module.layer_idx] = (new_state, new_pending, new_conv)
    heads = (module.num_v_heads, module.head_v_dim)
    normed = module.norm(out.unflatten(-1, heads), z.unflatten(-1, heads))
    return torch.Tensor(module.out_proj(normed.flatten(-2)))


def _projections(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if hasattr(module, "in_proj_qkv"):
        qkv, z = module.in_proj_qkv(hidden), module.in_proj_z(hidden)
        return qkv, z, module.in_proj_b(hidden), module.in_proj_a(hidden)
    q, k, v, z = (part(hidden) for part in module.in_proj_qkvz.parts)
    b, a = (part(hidden) for part in module.in_proj_ba.parts)
    return torch.cat((q, k, v), -1), z, b, a


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Returns log(1 + e^x), with a relative error of 5e-7 at most, where e^x is no subnormal number.

    ONNX Runtime's own Softplus gives an element other bits in a vector of four than at the end of a tensor, so that a
    step of several nodes would differ from single steps. Here log(1 + e) is 2 atanh(e / (2 + e)), by a polynomial.
    """
    e = (-x.abs()).exp()
    s = e / (e + 2)
    square = s * s
    series = square * _ATANH[-1]
    for coefficient in _ATANH[-2:0:-1]:
        series = (series + coefficient) * square
    return x.relu() + s * (series + _ATANH[0])


def _normalised(rows: torch.Tensor, module: Any) -> torch.Tensor:
    """Returns x / sqrt(sum(x^2) + epsilon) of each head; written as the RMS norm that it is, times head_dim^-0.5."""
    width = module.head_k_dim
    heads = rows.unflatten(-1, (module.num_k_heads, width))
    mean = heads.pow(2).mean(-1, keepdim=True)
    # As a vector of one number: torch's ONNX translation drops an addition of a scalar below 1e-8.
    normed = heads * torch.rsqrt(mean + torch.full((1,), _NORM_EPSILON / width))
    return (normed * torch.full((width,), width**-0.5)).flatten(-2)


def _gated_attention(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    heads = (-1, module.head_dim)
    parts = (module.q_proj.query, module.k_proj, module.v_proj, module.q_proj.gate)
    query, key, value, gate = (part(hidden_states) for part in parts)
    query = module.q_norm(query.unflatten(-1, heads)).transpose(1, 2)
    key = module.k_norm(key.unflatten(-1, heads)).transpose(1, 2)
    value = value.unflatten(-1, heads).transpose(1, 2)
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key, *position_embeddings)
    attend = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION]
    out, _ = attend(module, query, key, value, attention_mask, scaling=module.scaling, **kwargs)
    return module.o_proj(out.flatten(-2) * gate.sigmoid()), None


def _text_rotary(module: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    frame = find_frame()
    assert frame is not None and frame.positions is not None
    half = frame.positions[:, :, None].float() * module.inv_freq
    angles = torch.cat((half, half), -1)
    return angles.cos() * module.attention_scaling, angles.sin() * module.attention_scaling


# By class: what is split on the module, its forward, and whether a run is ours.
CHANGES: dict[str, Change] = {
    **dict.fromkeys(("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"), (keep, _delta_net, has_state)),
    "Qwen3NextGatedDeltaNet": (_split_groups, _delta_net, has_state),
    **dict.fromkeys(
        ("Qwen3_5Attention", "Qwen3_5MoeAttention", "Qwen3NextAttention"),
        (_split_query, _gated_attention, _uses_caches),
    ),
    **dict.fromkeys(
        ("Qwen3_5TextRotaryEmbedding", "Qwen3_5MoeTextRotaryEmbedding"), (keep, _text_rotary, _has_positions)
    ),
}
