# SPDX-License-Identifier: Apache-2.0
"""What replaces methods of models: attention outside transformers' registry, and what no trace can follow.

Each function takes the module, the registry's attention and the method's arguments; the table after them lists
them. With the attention implementation `eager` the own methods run, so that both can be compared before the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

# Of the registry: (module, query, key, value, mask, **arguments) -> ([batch, nodes, heads, head_dim], probabilities).
Attention = Callable[..., tuple[torch.Tensor, Any]]


@dataclass(frozen=True)
class Adapter:
    """A method, and what replaces it.

    Args:
        form: an attribute of the modules that need it, as other releases of transformers do not. "": all need it.
    """

    module: str
    method: str
    run: Callable[..., Any]  # (module, attention, *arguments of the method) -> what the method returns
    form: str = ""


def _heads(scale: Callable[[Any], float], window: Callable[[Any], int] = lambda module: 0) -> Callable[..., Any]:
    def run(module: Any, attention: Attention, query: Any, key: Any, value: Any, mask: Any = None) -> Any:
        out, _ = attention(module, query, key, value, mask, scaling=scale(module), own_window=window(module))
        return out.transpose(1, 2), None

    return run


def _gpt_neo_window(module: Any) -> int:
    return int(module.config.window_size) if module.attention_type == "local" else 0


def _openai(
    module: Any, attention: Attention, query: Any, key: Any, value: Any, mask: Any = None, *_: Any
) -> list[Any]:
    """Keys are [batch, heads, head_dim, nodes]; the causal mask is the module's own."""
    scale = float(value.shape[-1]) ** -0.5 if module.scale else 1.0
    return [attention(module, query, key.transpose(2, 3), value, mask, scaling=scale)[0].transpose(1, 2)]


def _xglm(module: Any, attention: Attention, hidden: Any, *_: Any, attention_mask: Any = None, **__: Any) -> Any:
    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)

    q, k, v = (heads(project(hidden)) for project in (module.q_proj, module.k_proj, module.v_proj))
    out, _ = attention(module, q, k, v, attention_mask, scaling=module.scaling)
    return module.out_proj(out.flatten(2)), None


def _xglm_positions(module: Any, _: Attention, position_ids: Any, *__: Any) -> torch.Tensor:
    return module.weights[position_ids + module.offset]


def _falcon(
    module: Any,
    attention: Attention,
    hidden: Any,
    alibi: Any = None,
    attention_mask: Any = None,
    position_embeddings: Any = None,
    **_: Any,
) -> Any:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    kv_heads = module.num_kv_heads
    qkv = module.query_key_value(hidden).unflatten(-1, (kv_heads, -1, module.head_dim))
    query, key, value = (x.transpose(1, 2) for x in (qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]))
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    out, _ = attention(module, query, key, value, attention_mask, scaling=module.inv_norm_factor)
    return module.dense(out.flatten(2)), None


def _bloom(module: Any, attention: Attention, hidden: Any, residual: Any, attention_mask: Any = None, **_: Any) -> Any:
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

    qkv = module.query_key_value(hidden).unflatten(-1, (module.num_heads, 3, module.head_dim))
    query, key, value = (x.transpose(1, 2) for x in qkv.unbind(3))
    slopes = _get_alibi_slopes(module.num_heads, hidden.device)
    out, _ = attention(module, query, key, value, attention_mask, scaling=module.inv_norm_factor, slopes=slopes)
    return residual + module.dense(out.flatten(2)), None


def _experts(x: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Returns products of x [rows, in] or [rows, chosen, in] with weight [experts, out, in]: [rows, chosen, out]."""
    by_expert = x[:, None] if x.dim() == 2 else x
    return (weight[chosen] @ by_expert[..., None]).squeeze(-1)


def _weighted(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the sums over experts of [rows, chosen, out], a product: a sum's bits depend on the other rows."""
    return (weights[:, None] @ x).squeeze(1)


def _dbrx_experts(module: Any, _: Attention, hidden: Any, chosen: Any, weights: Any) -> torch.Tensor:
    rows, gated = hidden.reshape(-1, module.hidden_size), module.mlp
    w1, v1, w2 = (w.view(-1, module.ffn_hidden_size, module.hidden_size) for w in (gated.w1, gated.v1, gated.w2))
    inner = gated.activation_fn(_experts(rows, w1, chosen)) * _experts(rows, v1, chosen)
    return _weighted(_experts(inner, w2.transpose(1, 2), chosen), weights).view_as(hidden)


def _jetmoe_route(router: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits, chosen = router.layer(rows).float().topk(router.top_k, dim=1)
    return chosen, logits.softmax(1)


def _jetmoe_mlp(module: Any, _: Attention, hidden: Any) -> torch.Tensor:
    rows = hidden.flatten(0, 1)
    chosen, weights = _jetmoe_route(module.router, rows)
    gate, up = _experts(rows, module.input_linear.weight, chosen).chunk(2, -1)
    out = _experts(module.activation(gate) * up, module.output_linear.weight, chosen)
    return (_weighted(out, weights) + module.bias).view_as(hidden)


def _jetmoe(
    module: Any, attention: Attention, hidden_states: Any, position_embeddings: Any, attention_mask: Any, **_: Any
) -> Any:
    """A router chooses `top_k` sets of query heads with their output products; each set has a head of every KV head."""
    from transformers.models.jetmoe.modeling_jetmoe import apply_rotary_pos_emb

    hidden = hidden_states
    rows, experts = hidden.flatten(0, 1), module.experts
    chosen, weights = _jetmoe_route(experts.router, rows)
    shape = (module.top_k, module.num_key_value_heads, module.head_dim)
    query = _experts(rows, experts.input_linear.weight, chosen).view(*hidden.shape[:2], *shape)
    query = query.transpose(2, 3).flatten(2, 3).transpose(1, 2)  # the query heads of a KV head are neighbours
    keys_values = module.kv_proj(hidden).unflatten(-1, (2, *shape[1:]))
    key, value = (x.transpose(1, 2) for x in keys_values.unbind(2))
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    out, _ = attention(module, query, key, value, attention_mask, scaling=module.scaling)
    by_set = out.unflatten(2, (shape[1], shape[0])).transpose(2, 3).flatten(3).flatten(0, 1)
    mixed = _weighted(_experts(by_set, experts.output_linear.weight, chosen), weights)
    return (mixed + experts.bias).view_as(hidden), None, None


def _angles(module: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosines and sines [batch, nodes, rotary_dim], each angle twice, where the model has complex numbers."""
    angles = position_ids[..., None].float() * module.inv_freq
    twice = torch.cat((angles, angles), -1)
    return twice.cos() * module.attention_scaling, twice.sin() * module.attention_scaling


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """Returns [batch, heads, nodes, rotary_dim] rotated; pairs of neighbours become two halves, in Q as in K."""
    if is_interleaved:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def _gptj(
    module: Any, attention: Attention, hidden_states: Any, attention_mask: Any, position_ids: torch.Tensor, **_: Any
) -> Any:
    query, key, value = (
        project(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    return _attend_turned(module, attention, query, key, value, attention_mask, position_ids)


def _codegen(
    module: Any, attention: Attention, hidden_states: Any, attention_mask: Any, position_ids: torch.Tensor, **_: Any
) -> Any:
    parts = module.qkv_proj(hidden_states).unflatten(-1, (4, 3, -1, module.head_dim))
    query, value, key = (x.flatten(2, 3).transpose(1, 2) for x in parts.unbind(3))
    return _attend_turned(module, attention, query, key, value, attention_mask, position_ids)


def _attend_turned(
    module: Any,
    attention: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    position_ids: torch.Tensor,
) -> Any:
    width = module.rotary_dim or module.head_dim
    frequencies = 1.0 / (10000 ** (torch.arange(0, width, 2, dtype=torch.int64) / width))
    angles = position_ids[..., None].float() * frequencies
    twice = torch.cat((angles, angles), -1)
    cos, sin = twice.cos(), twice.sin()
    query, key = (torch.cat((_turn(x[..., :width], cos, sin, True), x[..., width:]), -1) for x in (query, key))
    out, _ = attention(module, query, key, value, mask, scaling=1 / module.scale_attn)
    return module.out_proj(out.flatten(2)), None


def _llama4_angles(module: Any, _: Attention, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
    return (*_angles(module, x, position_ids), position_ids)


def _llama4(
    module: Any, attention: Attention, hidden_states: Any, position_embeddings: Any, attention_mask: Any, **_: Any
) -> Any:
    cos, sin, positions = position_embeddings
    query, key, value = (
        project(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    if module.use_rope:
        query, key = _turn(query, cos, sin, True), _turn(key, cos, sin, True)
        if module.config.use_qk_norm:  # without weights: any order of the columns
            query, key = module.qk_norm(query), module.qk_norm(key)
    elif module.attn_temperature_tuning:
        steps = torch.floor((positions.float() + 1.0) / module.floor_scale)
        query = query * (torch.log1p(steps) * module.attn_scale + 1.0)[:, None, :, None]
    out, _ = attention(module, query, key, value, attention_mask, scaling=module.scaling)
    return module.o_proj(out.flatten(2)), None


def _latent(is_interleaved: Callable[[Any], bool]) -> Callable[..., Any]:
    """Returns the `run` of latent attention in its absorbed form, for cache rows [latent | rotated key].

    The part of `kv_b_proj` that makes keys is multiplied into the query, the part that makes values into the output.
    """

    def run(
        module: Any, attention: Attention, hidden_states: Any, position_embeddings: Any, attention_mask: Any, **_: Any
    ) -> Any:
        nope, rotary, rank = module.qk_nope_head_dim, module.qk_rope_head_dim, module.kv_lora_rank
        is_direct = module.q_lora_rank is None
        query = hidden_states if is_direct else module.q_a_layernorm(module.q_a_proj(hidden_states))
        query = (module.q_proj if is_direct else module.q_b_proj)(query).unflatten(-1, (-1, nope + rotary))
        q_nope, q_turned = query.transpose(1, 2).split((nope, rotary), -1)
        latent, k_turned = module.kv_a_proj_with_mqa(hidden_states).unsqueeze(1).split((rank, rotary), -1)
        cos, sin = position_embeddings
        q_turned, k_turned = (_turn(x, cos, sin, is_interleaved(module)) for x in (q_turned, k_turned))
        by_head = module.kv_b_proj.weight.unflatten(0, (-1, nope + module.v_head_dim))  # [heads, nope + v, rank]
        to_key, to_value = by_head.split((nope, module.v_head_dim), 1)
        rows = torch.cat((module.kv_a_layernorm(latent), k_turned), -1)
        query = torch.cat((q_nope @ to_key, q_turned), -1)
        out, _ = attention(module, query, rows, rows, attention_mask, scaling=module.scaling)
        values = out[..., :rank].transpose(1, 2) @ to_value.transpose(1, 2)
        return module.o_proj(values.transpose(1, 2).flatten(2)), None

    return run


def _deepseek_v2_angles(module: Any, _: Attention, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
    return _angles(module, x, position_ids)


def _gemma4(
    module: Any,
    attention: Attention,
    hidden_states: Any,
    position_embeddings: Any,
    attention_mask: Any,
    shared_kv_states: Any,
    **_: Any,
) -> Any:
    """Q and K are rotated in head layout; layers without K and V get those of another one."""
    from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb

    def heads(x: torch.Tensor, norm: Any, turned: bool) -> torch.Tensor:
        rows = norm(x.unflatten(-1, (-1, module.head_dim))).transpose(1, 2)
        return apply_rotary_pos_emb(rows, *position_embeddings, unsqueeze_dim=1) if turned else rows

    query = heads(module.q_proj(hidden_states), module.q_norm, True)
    if module.is_kv_shared_layer:
        key, value = shared_kv_states[module.layer_type]
    else:
        keys = module.k_proj(hidden_states)
        values = keys if module.v_proj is None else module.v_proj(hidden_states)
        key, value = heads(keys, module.k_norm, True), heads(values, module.v_norm, False)
    if module.store_full_length_kv:
        shared_kv_states[module.layer_type] = key, value
    window = {"sliding_window": module.sliding_window, "is_causal": module.is_causal}
    out, _weights = attention(module, query, key, value, attention_mask, scaling=module.scaling, **window)
    return module.o_proj(out.flatten(2)), None


def _gemma4_inputs(module: Any, _: Attention, *inputs: Any, **__: Any) -> tuple[Any, ...]:
    return inputs[:-1]


_LATENT = _latent(lambda module: bool(module.config.rope_interleave))
# By `model_type`.
ADAPTERS: dict[str, tuple[Adapter, ...]] = {
    "axk1": (Adapter("AXK1Attention", "forward", _LATENT),),
    "bloom": (Adapter("BloomAttention", "forward", _bloom),),
    "codegen": (Adapter("CodeGenAttention", "forward", _codegen, form="scale_attn"),),
    "dbrx": (Adapter("DbrxExperts", "forward", _dbrx_experts),),
    "deepseek_v2": (
        Adapter("DeepseekV2Attention", "forward", _latent(lambda module: True)),
        Adapter("DeepseekV2RotaryEmbedding", "forward", _deepseek_v2_angles),
    ),
    "deepseek_v3": (Adapter("DeepseekV3Attention", "forward", _LATENT),),
    "falcon": (Adapter("FalconAttention", "forward", _falcon),),
    "gemma4_text": (
        Adapter("Gemma4TextAttention", "forward", _gemma4),
        Adapter("Gemma4TextModel", "_maybe_slice_kv_shared_inputs", _gemma4_inputs),
    ),
    "gemma4_unified_text": (
        Adapter("Gemma4UnifiedTextAttention", "forward", _gemma4),
        Adapter("Gemma4UnifiedTextModel", "_maybe_slice_kv_shared_inputs", _gemma4_inputs),
    ),
    "glm4_moe_lite": (Adapter("Glm4MoeLiteAttention", "forward", _LATENT),),
    "gpt_neo": (Adapter("GPTNeoSelfAttention", "_attn", _heads(lambda module: 1.0, _gpt_neo_window)),),
    "gpt_neox_japanese": (Adapter("GPTNeoXJapaneseAttention", "_attn", _heads(lambda module: 1 / module.norm_factor)),),
    "gptj": (Adapter("GPTJAttention", "forward", _gptj, form="scale_attn"),),
    "jetmoe": (Adapter("JetMoeAttention", "forward", _jetmoe), Adapter("JetMoeMoE", "forward", _jetmoe_mlp)),
    "llama4_text": (
        Adapter("Llama4TextAttention", "forward", _llama4),
        Adapter("Llama4TextRotaryEmbedding", "forward", _llama4_angles),
    ),
    "minicpm3": (Adapter("MiniCPM3Attention", "forward", _latent(lambda module: False)),),
    "openai-gpt": (Adapter("Attention", "_attn", _openai),),
    "xglm": (
        Adapter("XGLMAttention", "forward", _xglm),
        Adapter("XGLMSinusoidalPositionalEmbedding", "forward", _xglm_positions),
    ),
    "youtu": (Adapter("YoutuAttention", "forward", _LATENT),),
}


def is_adapted(model_type: str) -> bool:
    """Whether models of this type are built with their own attention, for `adapt_model` to replace."""
    return model_type in ADAPTERS


def adapt_model(model: Any) -> None:
    """Replaces the methods of every layer of a model of a type in `ADAPTERS` that need it; numbers the layers."""
    for adapter in ADAPTERS[model.config.model_type]:
        found = [m for m in model.modules() if type(m).__name__ == adapter.module]
        for index, module in enumerate(found):
            module.layer_idx = index
            if adapter.form and not hasattr(module, adapter.form):
                continue
            setattr(module, adapter.method, MethodType(_switch(adapter, model.config, module), module))


def set_attention(model: Any, implementation: str) -> None:
    if is_adapted(model.config.model_type):
        model.config._attn_implementation = implementation
    else:
        model.set_attn_implementation(implementation)


def _switch(adapter: Adapter, config: Any, module: nn.Module) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own = getattr(module, adapter.method)

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if config._attn_implementation == "eager":
            return own(*args, **kwargs)
        return adapter.run(self, ALL_ATTENTION_FUNCTIONS[config._attn_implementation], *args, **kwargs)

    return run
