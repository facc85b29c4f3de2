# SPDX-License-Identifier: Apache-2.0
"""A tiny config.json of every causal `model_type` that the installed transformers knows.

A config begins with the defaults of its class; every size that it has is made small, every kind of layer appears
once, and a sliding window is shorter than the sequences that the sweep runs.
"""

from typing import Any

from speccompile.checkpoints.config_values import TOWERS
from tests.export.towers import tower_config

VOCAB = 97
WINDOW = 5

# Sizes by the names that configs have for them.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "n_positions", "n_ctx"), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "d_inner", "dff"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "d_head"), 8),
    **dict.fromkeys(("max_position_embeddings", "max_target_positions", "seq_length"), 64),
    **dict.fromkeys(("sliding_window", "attention_window"), WINDOW),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 12,
    "qk_head_dim": 16,
    "attention_chunk_size": 8,
    "use_sliding_window": True,
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dropout": 0.0,
    "rotary_dim": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "use_mla": True,
    "query_pre_attn_scalar": 10,
}  # fmt: skip

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# Values that a class's defaults lack, or that keep two sizes consistent.
_OWN: dict[str, dict[str, Any]] = {
    # The rotated part of a head is what these call its width, and each head has its own keys.
    **{name: {"head_dim": 8, "num_key_value_heads": 4} for name in ("axk1", "deepseek_v3", "minicpm3", "youtu")},
    "deepseek_v2": {"head_dim": 8, "num_key_value_heads": 4, "num_experts_per_tok": 2},
    "glm4_moe_lite": {"head_dim": 8, "num_key_value_heads": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "bamba": {"attn_layer_indices": [1], "mamba_n_groups": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_groups": 2, "mamba_rms_norm": True, "head_dim": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_n_groups": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 4,
                   "mamba_head_dim": 8, "n_groups": 2, "moe_shared_expert_intermediate_size": 24, "head_dim": 8},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "n_mamba_heads": 4, "mamba_ngroups": 2,
               "num_hidden_layers": 3, "adapter_rank": 4, "use_shared_attention_adapter": True, "use_mem_rope": True,
               "num_key_value_heads": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gpt_neo": {"defaults": {"attention_types": [[["global", "local"], 1]], "num_layers": 2}, "window_size": WINDOW},
    "gemma4_text": {"global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
                    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
                    "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_unified_text": {"global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
                            "num_hidden_layers": 4, "num_kv_shared_layers": 2,
                            "layer_types": ["sliding_attention", "full_attention"] * 2},
    "helium": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
             "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}},
    "jetmoe": {"num_attention_heads": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "kv_channels": 8},
    "mimo_v2_flash": {"head_dim": 12, "v_head_dim": 8},
    "llama4_text": {"attention_chunk_size": 24},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    **{name: {"head_dim": 16} for name in ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")},
    "qwen2_moe": {"defaults": {"use_sliding_window": True}},
    "roc_bert": {"shape_vocab_size": VOCAB, "pronunciation_vocab_size": VOCAB, "shape_embed_dim": 8,
                 "pronunciation_embed_dim": 8},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip


def config_of(model_type: str) -> dict[str, Any]:
    """The config.json of a tiny model of `model_type`.

    Raises:
        Exception: whatever the class of the config raises; the sweep reports it.
    """
    from transformers import CONFIG_MAPPING

    if model_type in TOWERS:
        return dict(tower_config(model_type).to_dict())
    kind = CONFIG_MAPPING[model_type]
    own = _OWN.get(model_type, {})
    given = own.get("defaults", {})
    defaults = kind(**given).to_dict()
    own = {name: value for name, value in own.items() if name != "defaults"}
    small = {name: size for name, size in _SIZES.items() if defaults.get(name) is not None}
    if "sliding_window" in defaults:
        small["sliding_window"] = WINDOW
    if "head_dim" in defaults and defaults["head_dim"] is None:
        small["head_dim"] = 8
    pattern = layer_pattern(defaults.get("layer_types"))
    if pattern and "sliding_window" in small and set(pattern) <= {"full_attention", "sliding_attention"}:
        pattern = ["sliding_attention", "full_attention"]
    if pattern:
        small["layer_types"] = pattern
        small |= {name: len(pattern) for name in ("num_hidden_layers", "n_layer", "num_layers") if name in small}
    if defaults.get("mlp_layer_types"):
        small["mlp_layer_types"] = layer_pattern(defaults["mlp_layer_types"])[:2]
    config = kind(**{**given, **small, **own}).to_dict()
    return {name: value for name, value in config.items() if value is not None}


def layer_pattern(kinds: list[str] | None) -> list[str]:
    """Each kind of layer once, in the order of the pattern; two layers at least."""
    once = list(dict.fromkeys(kinds or ()))
    return once * 2 if len(once) == 1 else once
