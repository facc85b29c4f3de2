# SPDX-License-Identifier: Apache-2.0
"""Mamba 2 mixers and short convolutions with our ops.

A mixer is gated linear attention without the delta rule: S <- e^(dt A) S + dt B x^T, y = S^T C + D x, where the keys B
and the queries C are shared by the heads of a group. Its output is gated before the norm. transformers computes it in
chunks or, for one token after a cache, in a form that does not limit dt.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from speccompile.errors import ExportError
from speccompile.export.attention import Frame, find_frame
from speccompile.export.delta_layers import Change, has_state, keep, softplus
from speccompile.export.recurrent import conv_rows, gated_delta

_NO_ACTIVATION, _SILU = 0, 1
_NO_DELTA_RULE = 0


def _step_of(frame: Frame | None) -> tuple[Frame, tuple[torch.Tensor, ...]]:
    assert frame is not None and frame.state_lengths is not None and frame.sure_nodes is not None
    return frame, (frame.lengths, frame.state_lengths, frame.sure_nodes, frame.tree_mask)


def _bias_of(conv: Any) -> torch.Tensor:
    return torch.zeros(conv.out_channels) if conv.bias is None else torch.Tensor(conv.bias)


def _mixer(module: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """A Mamba 2 mixer, [batch, nodes, hidden] -> the same, after the states of the frame."""
    frame, step = _step_of(find_frame())
    state, pending, conv = frame.states[module.layer_idx]
    parts = [module.intermediate_size, module.conv_dim, module.num_heads]
    gate, rows, dt = module.in_proj(hidden_states).split(parts, dim=-1)
    mixed, new_conv = conv_rows(rows, module.conv1d.weight[:, 0], _bias_of(module.conv1d), conv, *step, _SILU)
    keys = module.n_groups * module.ssm_state_size
    x, key, query = mixed.split([module.intermediate_size, keys, keys], dim=-1)
    time_step = _limited(softplus(dt + module.dt_bias), module.time_step_limit)
    decay = -module.A_log.exp() * time_step
    heads = (module.n_groups, module.num_heads)
    out, new_state, new_pending = gated_delta(
        query, key, x, decay, time_step, state, pending, *step, *heads, 1.0, _NO_DELTA_RULE
    )
    frame.updated_states[module.layer_idx] = (new_state, new_pending, new_conv)
    return torch.Tensor(module.out_proj(_gated(module, _with_skip(out, x, module), gate)))


def _limited(time_step: torch.Tensor, limits: tuple[float, float]) -> torch.Tensor:
    low, high = limits
    if low > 0:
        time_step = time_step.clamp(min=low)
    return time_step if math.isinf(high) else time_step.clamp(max=high)


def _with_skip(out: torch.Tensor, x: torch.Tensor, module: Any) -> torch.Tensor:
    by_column = module.D[:, None].expand(-1, module.head_dim).reshape(-1)
    return out + x * by_column


def _gated(module: Any, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    if isinstance(module.norm, nn.Identity):
        return out * functional.silu(gate)
    return torch.Tensor(module.norm(out, gate))


def _short_conv(module: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    frame, step = _step_of(find_frame())
    (rows,) = frame.states[module.layer_idx]
    before, after, x = module.in_proj(hidden_states).chunk(3, dim=-1)
    conv = module.conv
    mixed, new_rows = conv_rows(before * x, conv.weight[:, 0], _bias_of(conv), rows, *step, _NO_ACTIVATION)
    frame.updated_states[module.layer_idx] = (new_rows,)
    return torch.Tensor(module.out_proj(after * mixed))


def _check_activation(module: Any) -> None:
    if module.activation not in ("silu", "swish"):
        where, todo = f"{type(module).__name__} (layer {module.layer_idx})", "Use another model."
        raise ExportError(where, f"the activation {module.activation!r}", "silu, as ConvRows computes it", todo)


def _number_shared(module: Any) -> None:
    module.shared_transformer.self_attn.layer_idx = module.mamba_decoder.layer_idx


def _fold_multipliers(layer: Any) -> None:
    """Multiplies the factors of a layer of Falcon H1 into the weights beside them; all become 1."""
    mixer, attention, feed = layer.mamba, layer.self_attn, layer.feed_forward
    _scale(mixer.in_proj, mixer.mup_vector.flatten(), mixer.ssm_in_multiplier)
    _scale(mixer.out_proj, layer.ssm_out_multiplier)
    mixer.mup_vector.fill_(1)
    for linear, factor in (
        (attention.q_proj, 1.0),
        (attention.k_proj, attention.key_multiplier),
        (attention.v_proj, 1.0),
    ):
        _scale(linear, factor, layer.attention_in_multiplier)
    _scale(attention.o_proj, layer.attn_out_multiplier)
    _scale(feed.gate_proj, feed.gate_multiplier)
    _scale(feed.down_proj, feed.down_multiplier)
    mixer.ssm_in_multiplier = layer.ssm_out_multiplier = layer.attention_in_multiplier = layer.attn_out_multiplier = 1.0
    attention.key_multiplier = feed.gate_multiplier = feed.down_multiplier = 1.0


def _scale(linear: nn.Linear, rows: torch.Tensor | float, columns: float = 1.0) -> None:
    factors = torch.as_tensor(rows, dtype=linear.weight.dtype)
    with torch.no_grad():
        linear.weight.mul_(factors[..., None] * columns)
        if linear.bias is not None:
            linear.bias.mul_(factors)


def _is_never_ours(module: Any) -> bool:
    return False


_MIXER = (_check_activation, _mixer, has_state)
# By class, as `delta_layers.CHANGES`.
CHANGES: dict[str, Change] = {
    "BambaMixer": _MIXER,
    "FalconH1DecoderLayer": (_fold_multipliers, _mixer, _is_never_ours),
    "FalconH1Mixer": _MIXER,
    "GraniteMoeHybridMambaLayer": _MIXER,
    "Lfm2MoeShortConv": (keep, _short_conv, has_state),
    "Lfm2ShortConv": (keep, _short_conv, has_state),
    "Mamba2Mixer": _MIXER,
    "NemotronHMamba2Mixer": _MIXER,
    "Zamba2HybridLayer": (_number_shared, _mixer, _is_never_ours),
    "Zamba2MambaMixer": _MIXER,
}
