# SPDX-License-Identifier: Apache-2.0
"""Targets of the table of pairs: sizes as published, layers cut to two or to the fewest that hold each kind.

Compared with transformers' defaults where those are a published model's (DeepSeek-V3, GLM-4.5-Air, Llama 4 Scout,
MiniMax-M2, Muse-Glimmer), and with configs that other engines' public tests contain (Qwen3.5, 3.8, Gemma 4 E2B, 12B
and 26B-A4B, Kimi K2, Nemotron 3 Nano, Hunyuan 1.8B, Ministral 3 3B, LFM2 1.2B). The heads of Qwen3.8-Flash-Next are
transformers' defaults; those of the others were not compared with a second source.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
_YARN_MISTRAL = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
                 "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                 "llama_4_scaling_beta": 0.1}  # fmt: skip
_YARN_OSS = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
             "truncate": False, "original_max_position_embeddings": 4096}  # fmt: skip
_YARN_LATENT = {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "beta_slow": 1.0,
                "original_max_position_embeddings": 4096}  # fmt: skip
_QWEN3_5_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
GEMMA4_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def _heads(num: int, num_kv: int, dim: int) -> Config:
    return {"num_attention_heads": num, "num_key_value_heads": num_kv, "head_dim": dim}


def _qwen3_5(hidden: int, inner: int, heads: tuple[int, int], num_values: int) -> Config:
    """Returns the config of a dense Qwen3.5 to 3.8, as a multimodal checkpoint has it."""
    text = {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": hidden, "intermediate_size": inner,
        **_heads(*heads, 256), "max_position_embeddings": 262144, "rope_parameters": _QWEN3_5_ROPE,
        "linear_num_key_heads": 16, "linear_num_value_heads": num_values, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "layer_types": [LINEAR, FULL],
        "mtp_num_hidden_layers": 1, "num_hidden_layers": 2,
    }  # fmt: skip
    return {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": hidden < 4096}


QWEN3_1_7B: Config = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, **_heads(16, 8, 128),
    "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_5_0_8B = _qwen3_5(1024, 3584, (8, 2), 16)
QWEN3_8_27B = _qwen3_5(5120, 17408, (24, 4), 48)
QWEN4_EXP: Config = {
    "model_type": "qwen4_exp_text", "vocab_size": 248320, "hidden_size": 2560, **_heads(16, 2, 256),
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640, "num_experts": 512,
    "num_experts_per_tok": 10, "layer_types": [LINEAR, "indexed_attention"], "max_position_embeddings": 262144,
}  # fmt: skip
QWEN3_30B_A3B: Config = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, **_heads(32, 4, 128), "max_position_embeddings": 40960, "rope_theta": 1e6,
}  # fmt: skip
GEMMA4_E2B: Config = {
    "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 1536, "intermediate_size": 6144,
    **_heads(8, 1, 256), "global_head_dim": 512, "hidden_size_per_layer_input": 256, "sliding_window": 512,
    "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    "layer_types": [SLIDING, FULL, SLIDING, FULL], "rope_parameters": GEMMA4_ROPE, "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True, "max_position_embeddings": 131072,
}  # fmt: skip
_GEMMA4_LARGE: Config = {
    "model_type": "gemma4_text", "vocab_size": 262144, "global_head_dim": 512, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "sliding_window": 1024,
    "layer_types": [SLIDING, FULL], "rope_parameters": GEMMA4_ROPE, "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True, "max_position_embeddings": 262144,
}  # fmt: skip
GEMMA4_12B = _GEMMA4_LARGE | {
    "model_type": "gemma4_unified_text", "hidden_size": 3840, "intermediate_size": 15360, **_heads(16, 8, 256),
    "num_global_key_value_heads": 1,
}  # fmt: skip
GEMMA4_26B_A4B = _GEMMA4_LARGE | {
    "hidden_size": 2816, "intermediate_size": 2112, **_heads(16, 8, 256), "num_global_key_value_heads": 2,
    "enable_moe_block": True, "moe_intermediate_size": 704, "num_experts": 128, "top_k_experts": 8,
}  # fmt: skip
GEMMA3_4B: Config = {
    "model_type": "gemma3", "tie_word_embeddings": True,
    "text_config": {
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240,
        **_heads(8, 4, 256), "query_pre_attn_scalar": 256, "sliding_window": 1024, "layer_types": [SLIDING, FULL],
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "max_position_embeddings": 131072,
    },
}  # fmt: skip
GPT_OSS_20B: Config = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, **_heads(64, 8, 64),
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0,
    "layer_types": [SLIDING, FULL], "rope_parameters": _YARN_OSS, "max_position_embeddings": 131072,
}  # fmt: skip
LLAMA32_1B: Config = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, **_heads(32, 8, 64),
    "max_position_embeddings": 131072, "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
LLAMA4_SCOUT: Config = {
    "model_type": "llama4_text", "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
    "intermediate_size_mlp": 16384, **_heads(40, 8, 128), "num_local_experts": 16, "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1, "attention_chunk_size": 8192, "max_position_embeddings": 10485760,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 16.0, "low_freq_factor": 1.0,
                        "high_freq_factor": 1.0, "original_max_position_embeddings": 8192},
    "no_rope_layers": [1, 0],
    "layer_types": ["chunked_attention", FULL],
}  # fmt: skip
MUSE_30B: Config = {
    "model_type": "muse_glimmer_text", "vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968,
    **_heads(32, 2, 128), "sliding_window": 2048, "layer_types": [SLIDING, FULL], "layer_rope_theta": [10000.0, 0],
    "final_logit_softcapping": 20.0, "max_position_embeddings": 131072,
}  # fmt: skip
GLM45_AIR: Config = {
    "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, **_heads(96, 8, 128), "n_routed_experts": 128, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "attention_bias": True, "num_nextn_predict_layers": 1, "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}  # fmt: skip
MINIMAX_M2: Config = {
    "model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536,
    **_heads(48, 8, 128), "num_local_experts": 256, "num_experts_per_tok": 8, "max_position_embeddings": 196608,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
}  # fmt: skip
HUNYUAN_1_8B: Config = {
    "model_type": "hunyuan_v1_dense", "vocab_size": 120818, "hidden_size": 2048, "intermediate_size": 6144,
    **_heads(16, 4, 128), "max_position_embeddings": 262144, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "beta_fast": 32, "beta_slow": 1},
}  # fmt: skip
_DEEPSEEK: Config = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip
DEEPSEEK_V3 = _DEEPSEEK | {
    "vocab_size": 129280, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
    "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "rope_parameters": {**_YARN_LATENT, "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0},
}  # fmt: skip
KIMI_K2 = _DEEPSEEK | {
    "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0,
    "max_position_embeddings": 262144,
    "rope_parameters": {**_YARN_LATENT, "rope_theta": 50000.0, "factor": 64.0, "beta_fast": 1.0},
}  # fmt: skip
NEMOTRON3_NANO: Config = {
    "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 2688, "intermediate_size": 1856,
    **_heads(32, 2, 128), "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5,
    "layers_block_type": [LINEAR, "moe", FULL], "num_nextn_predict_layers": 1,
    "mtp_layers_block_type": [FULL, "moe"],
    "max_position_embeddings": 262144,
}  # fmt: skip
MINISTRAL3_3B: Config = {
    "model_type": "ministral3", "vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 9216,
    **_heads(32, 8, 128), "rope_parameters": _YARN_MISTRAL, "max_position_embeddings": 262144,
}  # fmt: skip
GRANITE3_8B: Config = {
    "model_type": "granite", "vocab_size": 49155, "hidden_size": 4096, "intermediate_size": 12800,
    "num_attention_heads": 32, "num_key_value_heads": 8, "embedding_multiplier": 12.0, "logits_scaling": 16.0,
    "residual_multiplier": 0.22, "attention_multiplier": 0.0078125, "rope_theta": 10000.0,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
GRANITE_20B_CODE: Config = {
    "model_type": "gpt_bigcode", "vocab_size": 49152, "n_embd": 6144, "n_inner": 24576, "n_head": 48, "n_layer": 2,
    "n_positions": 8192, "multi_query": True, "activation_function": "gelu_pytorch_tanh",
}  # fmt: skip
PHI4_MINI: Config = {
    "model_type": "phi3", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192,
    "num_attention_heads": 24, "num_key_value_heads": 8, "rope_theta": 10000.0, "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
    # The published factors are not in the table: lists of the right length, of 1 within the original length.
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
}  # fmt: skip
LFM25_1_2B: Config = {
    "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3, "layer_types": ["conv", FULL],
    "max_position_embeddings": 128000,
}  # fmt: skip
