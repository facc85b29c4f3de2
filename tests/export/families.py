# SPDX-License-Identifier: Apache-2.0
"""Tiny configs of every family, small enough for the reference evaluator; the features under test are on."""

from typing import Any

VOCAB = 97

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}


def _with(model_type: str, **fields: Any) -> dict[str, Any]:
    return {**_COMMON, "model_type": model_type, **fields}


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama2": _with("llama", num_key_value_heads=4),
    "llama3": _with("llama", rope_parameters=_LLAMA3, tie_word_embeddings=True),
    "llama-linear": _with(
        "llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, attention_bias=True
    ),
    "llama-yarn": _with(
        "llama",
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "mistral": _with("mistral", sliding_window=4, head_dim=12),
    "qwen2": _with("qwen2"),
    "qwen2-window": _with("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": _with("qwen3", head_dim=12),
    "gemma": _with("gemma", head_dim=12, num_key_value_heads=1),
    "gemma2": _with(
        "gemma2",
        head_dim=12,
        sliding_window=4,
        query_pre_attn_scalar=10,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": _with(
        "gemma3_text",
        head_dim=12,
        sliding_window=4,
        num_hidden_layers=3,
        sliding_window_pattern=3,
        query_pre_attn_scalar=10,
    ),
    "phi3": _with("phi3", sliding_window=4),
    "phi3-longrope": _with(
        "phi3",
        original_max_position_embeddings=64,
        max_position_embeddings=128,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.5],
            "long_factor": [2.0, 3.0, 4.0, 8.0],
            "original_max_position_embeddings": 64,
        },
    ),
    "phi": _with("phi", num_key_value_heads=4, partial_rotary_factor=0.5),
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt-neox": _with("gpt_neox", num_key_value_heads=4, rotary_pct=0.5, use_parallel_residual=True),
    "granite": _with(
        "granite", embedding_multiplier=2.0, attention_multiplier=0.2, residual_multiplier=0.5, logits_scaling=0.5
    ),
    "olmo2": _with("olmo2"),
    "smollm3": _with("smollm3", no_rope_layers=[1, 0], num_hidden_layers=2),
    "starcoder2": _with("starcoder2", sliding_window=4, use_bias=True),
    "opt": _with(
        "opt", num_key_value_heads=4, ffn_dim=48, word_embed_proj_dim=32, do_layer_norm_before=True, dropout=0.0
    ),
    "falcon": _with("falcon", new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=48, bias=True),
    "gpt-neo": {
        "model_type": "gpt_neo",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "intermediate_size": 48,
        "window_size": 4,
        "attention_types": [[["global", "local"], 1]],
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gptj": {
        "model_type": "gptj",
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "rotary_dim": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt-oss": _with(
        "gpt_oss",
        head_dim=12,
        sliding_window=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "rope_type": "yarn",
            "factor": 32.0,
            "rope_theta": 150000.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    ),
    "qwen3-moe": _with(
        "qwen3_moe", head_dim=12, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1
    ),
    "mixtral": _with("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
}

# Layers with K and V heads of their own, and layers without: tests/export/test_gemma4.py.
_TWO_WIDTHS: dict[str, Any] = {"head_dim": 8, "global_head_dim": 12, "sliding_window": 4}
GEMMA4: dict[str, dict[str, Any]] = {
    # Shared K and V, embeddings by layer, wide MLPs.
    "shared": _with(
        "gemma4_text",
        **_TWO_WIDTHS,
        num_hidden_layers=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        final_logit_softcapping=3.0,
    ),
    # V is K before its norm in full layers, which have KV heads of their own; experts beside a dense MLP.
    "experts": _with(
        "gemma4_text",
        **_TWO_WIDTHS,
        layer_types=["sliding_attention", "full_attention"],
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=24,
    ),
}
