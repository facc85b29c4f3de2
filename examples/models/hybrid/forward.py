# SPDX-License-Identifier: Apache-2.0
"""A fast training forward of Qwen3.5's text layout, and of Llama's, over the parameters of transformers' own modules.

Arithmetic follows the dtype of the hidden states: float32 agrees with transformers to 1e-4 (`python train.py check`),
bfloat16 is for training.
Letters: B batch, T tokens, D hidden size, Hk and Hv key and value heads, dk and dv their widths, C chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM, Qwen3_5ForCausalLM

CHUNK = 64


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns x / rms(x) * weight in the dtype of x; Qwen3.5 passes 1 + its stored weight."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns x @ weight^T in the dtype of x."""
    return F.linear(x, weight.to(x.dtype))


def mlp(x: torch.Tensor, norm: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, eps: float):
    """Returns x plus the gated MLP of its normalised rows."""
    y = rms_norm(x, norm, eps)
    return x + linear(F.silu(linear(y, gate)) * linear(y, up), down)


class _UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 of strictly lower triangular [..., C, C]; solved, since powers of L cancel where keys are alike."""

    @staticmethod
    def forward(ctx, lower):
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype).expand_as(lower)
        inverse = torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        return -(turned @ grad @ turned)


def gated_delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, chunk: int = CHUNK
) -> torch.Tensor:
    """Returns the outputs of the gated delta rule, chunk by chunk (WY form).

    Args:
        q: [B, T, Hk, dk] unit rows, already scaled.
        k: [B, T, Hk, dk] unit rows.
        v: [B, T, Hv, dv].
        g: [B, T, Hv] float32, log of the decay.
        beta: [B, T, Hv] float32.
        chunk: tokens handled at once.

    Returns:
        [B, T, Hv, dv].
    """
    batch, num, heads, width = v.shape
    rep, dtype = heads // k.shape[2], v.dtype

    def by_chunk(x: torch.Tensor) -> torch.Tensor:  # [B, T, H, ...] -> [B, H, chunks, C, ...], zeros after the end
        x = F.pad(x.transpose(1, 2), (0, 0) * (x.dim() - 3) + (0, -num % chunk))
        return x.unflatten(2, (-1, chunk))

    q, k, v, g, beta = by_chunk(q), by_chunk(k), by_chunk(v), by_chunk(g), by_chunk(beta)[..., None]
    cum = g.cumsum(-1)
    pair = (cum[..., :, None] - cum[..., None, :]).masked_fill(torch.ones(chunk, chunk, dtype=torch.bool).triu(1), -1e9)
    decay = pair.exp()
    scores_kk = (k @ k.transpose(-1, -2)).float().repeat_interleave(rep, 1)
    scores_qk = (q @ k.transpose(-1, -2)).float().repeat_interleave(rep, 1)
    inverse = _UnitLowerInverse.apply((scores_kk * decay * beta).tril(-1)).to(dtype)
    within = (scores_qk * decay).to(dtype)
    q, k = q.repeat_interleave(rep, 1), k.repeat_interleave(rep, 1)
    grow, last = cum.exp()[..., None], cum[..., -1:]
    new_values = inverse @ (v * beta).to(dtype)
    old_keys = inverse @ (k * (beta * grow)).to(dtype)
    queries = (q * grow).to(dtype)
    keys = (k * (last - cum).exp()[..., None]).to(dtype).transpose(-1, -2)
    fade = last.exp()[..., None]
    state = torch.zeros(batch, heads, k.shape[-1], width)
    outs = []
    for i in range(q.shape[2]):
        held = state.to(dtype)
        values = new_values[:, :, i] - old_keys[:, :, i] @ held
        outs.append(queries[:, :, i] @ held + within[:, :, i] @ values)
        state = state * fade[:, :, i] + (keys[:, :, i] @ values).float()
    return torch.stack(outs, 2).flatten(2, 3)[:, :, :num].transpose(1, 2)


def delta_net(
    x: torch.Tensor, norm: torch.Tensor, in_qkv: torch.Tensor, in_z: torch.Tensor, in_b: torch.Tensor,
    in_a: torch.Tensor, conv: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, out_norm: torch.Tensor,
    out: torch.Tensor, eps: float, key_heads: int,
) -> torch.Tensor:  # fmt: skip
    """Returns the output of a Gated DeltaNet mixer for the normalised rows of x [B, T, D], without the residual."""
    batch, num, _ = x.shape
    heads, width = len(a_log), len(out_norm)
    y = rms_norm(x, norm, eps)
    raw = F.pad(linear(y, in_qkv), (0, 0, conv.shape[-1] - 1, 0))
    taps = conv[:, 0].to(x.dtype)  # [channels, kernel]
    mixed = F.silu(sum(raw[:, i : i + num] * taps[:, i] for i in range(taps.shape[1])))
    q, k, v = mixed.split([(mixed.shape[-1] - heads * width) // 2] * 2 + [heads * width], -1)
    q, k = (t.unflatten(-1, (key_heads, -1)).float() for t in (q, k))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    g = -a_log.exp() * F.softplus(linear(y, in_a).float() + dt_bias)
    beta = linear(y, in_b).float().sigmoid()
    o = gated_delta(q.to(x.dtype), k.to(x.dtype), v.unflatten(-1, (heads, width)), g, beta)
    o = rms_norm(o, out_norm, eps) * F.silu(linear(y, in_z)).view_as(o)
    return linear(o.reshape(batch, num, -1), out)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns x [B, T, heads, width] with rotary positions on its first 2 * cos.shape[-1] numbers."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def project_heads(x, q, k, v, q_norm, k_norm, cos, sin, eps, kv_heads):
    """Returns query [B, T, H, w], key, value [B, T, kv, w] and gate [B, T, H * w] of rows; no gate without norms."""
    key, value = linear(x, k).unflatten(-1, (kv_heads, -1)), linear(x, v).unflatten(-1, (kv_heads, -1))
    query, gate = linear(x, q).unflatten(-1, (-1, key.shape[-1])), None
    if q_norm is not None:
        query, gate = query[:, :, 0::2], query[:, :, 1::2].flatten(2)
        query, key = rms_norm(query, 1 + q_norm, eps), rms_norm(key, 1 + k_norm, eps)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return rotate(query, cos, sin) * key.shape[-1] ** -0.5, rotate(key, cos, sin), value, gate


def fold(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Returns [B * kv, group * T, width] from [B, T, heads, width]: query groups become rows of their key head."""
    batch, num, heads, width = x.shape
    x = x.view(batch, num, kv_heads, heads // kv_heads, width).permute(0, 2, 3, 1, 4)
    return x.reshape(batch * kv_heads, heads // kv_heads * num, width)


def unfold(x: torch.Tensor, batch: int, num: int) -> torch.Tensor:
    """Returns [B, T, heads * width], the inverse of `fold`."""
    kv_heads, width = len(x) // batch, x.shape[-1]
    return x.view(batch, kv_heads, -1, num, width).permute(0, 3, 1, 2, 4).reshape(batch, num, -1)


def attention(
    x: torch.Tensor, norm: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
    q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float,
    kv_heads: int,
) -> torch.Tensor:  # fmt: skip
    """Returns the output of causal attention for the normalised rows of x; gated, with head norms, where given."""
    batch, num, _ = x.shape
    query, key, value, gate = project_heads(rms_norm(x, norm, eps), q, k, v, q_norm, k_norm, cos, sin, eps, kv_heads)
    scores = fold(query, kv_heads) @ fold(key, kv_heads).transpose(1, 2)
    mask = torch.full((num, num), float("-inf"), dtype=x.dtype).triu(1)
    probs = (scores.unflatten(1, (-1, num)) + mask).softmax(-1).flatten(1, 2)
    y = unfold(probs @ fold(value, kv_heads), batch, num)
    return linear(y if gate is None else y * gate.sigmoid(), o)


def rope_table(theta: float, width: int, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cos and sin [num, 1, width / 2] float32."""
    angles = torch.outer(torch.arange(num).float(), theta ** (-torch.arange(0, width, 2).float() / width))
    return angles.cos()[:, None], angles.sin()[:, None]


class Forward:
    """The forward of a model.

    Args:
        model: whose parameters are used as they are.
        num: most tokens of a row.
        dtype: of the hidden states.
    """

    def __init__(self, model: Qwen3_5ForCausalLM | LlamaForCausalLM, num: int, dtype: torch.dtype):
        config = self.config = model.config
        self.model, self.dtype, self.eps = model.model, dtype, config.rms_norm_eps
        self.offset = 0.0 if isinstance(model, LlamaForCausalLM) else 1.0  # Qwen3.5 stores a norm's weight minus 1
        share = config.rope_parameters.get("partial_rotary_factor", 1.0)
        self.rope = rope_table(config.rope_parameters["rope_theta"], int(config.head_dim * share), num)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [B, T, D] of ids [B, T]."""
        return self.model.embed_tokens(ids).to(self.dtype)

    def mix(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Returns what a layer's mixer adds to x [B, T, D]."""
        norm = layer.input_layernorm.weight + self.offset
        if hasattr(layer, "linear_attn"):
            m = layer.linear_attn
            return delta_net(
                x, norm, m.in_proj_qkv.weight, m.in_proj_z.weight, m.in_proj_b.weight, m.in_proj_a.weight,
                m.conv1d.weight, m.A_log, m.dt_bias, m.norm.weight, m.out_proj.weight, self.eps, m.num_k_heads,
            )  # fmt: skip
        m = layer.self_attn
        norms = (m.q_norm.weight, m.k_norm.weight) if self.offset else (None, None)
        cos, sin = (t[: x.shape[1]] for t in self.rope)
        return attention(
            x, norm, m.q_proj.weight, m.k_proj.weight, m.v_proj.weight, m.o_proj.weight, *norms, cos, sin, self.eps,
            self.config.num_key_value_heads,
        )  # fmt: skip

    def feed(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Returns x after a layer's MLP."""
        m, norm = layer.mlp, layer.post_attention_layernorm.weight + self.offset
        return mlp(x, norm, m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight, self.eps)

    def final_norm(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the states that the vocabulary projection reads."""
        return rms_norm(x, self.model.norm.weight + self.offset, self.eps)

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the states after the final norm, [B, T, D], of ids [B, T]."""
        x = self.embed(ids)
        for layer in self.model.layers:
            x = self.feed(layer, x + self.mix(layer, x))
        return self.final_norm(x)


class _HeadLoss(torch.autograd.Function):
    """Cross-entropy of softmax(states @ head^T) against a mixture of a teacher's distribution and the next token.

    The gradient is made with the logits, a block of rows at a time: logits of a whole batch never exist.
    """

    @staticmethod
    def forward(ctx, states, head, teacher_states, teacher_head, labels, share, rows=256):
        cast, teacher_cast = head.to(states.dtype), teacher_head.to(states.dtype)
        grad_states, grad_head = torch.empty_like(states), torch.zeros_like(head)
        losses, num = 0.0, len(states)
        for start in range(0, num, rows):
            part = slice(start, start + rows)
            probs = (states[part] @ cast.T).softmax(-1)
            index = labels[part, None]
            losses -= probs.gather(1, index).float().log().clamp(min=-30).sum()
            grad = probs.sub_((teacher_states[part] @ teacher_cast.T).softmax(-1), alpha=share) if share else probs
            grad.scatter_add_(1, index, torch.full_like(index, share - 1, dtype=grad.dtype))
            grad_states[part] = grad @ cast
            if head.requires_grad:
                grad_head += grad.T @ states[part]
        ctx.save_for_backward(grad_states / num, grad_head / num)
        return losses / num

    @staticmethod
    def backward(ctx, grad):
        grad_states, grad_head = ctx.saved_tensors
        return grad_states * grad, grad_head * grad, None, None, None, None, None


def head_loss(states, head, teacher_states, teacher_head, labels, share):
    """Returns the mean loss per row; its value is the cross-entropy of the labels, its gradient that of the mixture.

    Args:
        states: [N, D].
        head: [V, D] float32.
        teacher_states: [N, D of the teacher].
        teacher_head: [V, D of the teacher].
        labels: [N] int64.
        share: of the teacher's distribution in the mixture; the rest is the next token's.
    """
    return _HeadLoss.apply(states, head, teacher_states, teacher_head, labels, share)
