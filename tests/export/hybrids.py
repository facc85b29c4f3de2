# SPDX-License-Identifier: Apache-2.0
"""Tiny configs of the models with recurrent layers; key and value heads differ in number and width."""

from typing import Any

from tests.export.families import VOCAB

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20
}  # fmt: skip
# Half of a head is rotated; the axes of an image's positions share its eight angles.
_AXES = {
    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}  # fmt: skip
# A group of keys for two heads; time steps that both limits cut.
_MIXER = {
    "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 8,
    "time_step_limit": [0.4, 0.9],
}  # fmt: skip
_PLAIN = {name: size for name, size in _COMMON.items() if not name.startswith(("linear_", "layer_"))}
_TWO = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3.5": {
        **_COMMON, "model_type": "qwen3_5_text", "intermediate_size": 48, "rope_parameters": _AXES,
        "linear_num_key_heads": 1, "linear_num_value_heads": 3,
    },
    "qwen3.5-moe": {**_COMMON, **_EXPERTS, "model_type": "qwen3_5_moe_text", "rope_parameters": _AXES},
    "qwen3-next": {
        **_COMMON, **_EXPERTS, "model_type": "qwen3_next", "intermediate_size": 48, "partial_rotary_factor": 0.5,
        "mlp_only_layers": [1],
    },
    "granite4": {
        **_PLAIN, **_TWO, **_MIXER, "model_type": "granitemoehybrid", "shared_intermediate_size": 20,
        "num_local_experts": 0, "position_embedding_type": "rope", "embedding_multiplier": 2.0,
        "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 0.5,
    },
    "nemotron-h": {
        **_PLAIN, "model_type": "nemotron_h", "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
        "intermediate_size": 48, "mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 8,
        "chunk_size": 8, "time_step_min": 0.5, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 20, "moe_latent_size": 16,
        "routed_scaling_factor": 1.8,
    },
    "lfm2": {
        **_PLAIN, "model_type": "lfm2", "intermediate_size": 48, "num_hidden_layers": 2, "conv_bias": True,
        "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False,
    },
}  # fmt: skip
# Variants of them, and types that compute as they do: compared without a trace.
VARIANTS: dict[str, dict[str, Any]] = {
    "falcon-h1": {
        **_PLAIN, **_MIXER, "model_type": "falcon_h1", "intermediate_size": 48, "num_hidden_layers": 2,
        "mamba_d_ssm": 40, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "lm_head_multiplier": 0.7,
        "embedding_multiplier": 1.3, "mlp_multipliers": [0.8, 0.6], "key_multiplier": 0.9, "ssm_in_multiplier": 1.2,
        "attention_in_multiplier": 1.1, "attention_out_multiplier": 0.5, "ssm_out_multiplier": 0.4,
        "ssm_multipliers": [0.7, 1.1, 0.9, 1.2, 0.8],
    },
    "granite4-moe": {
        **_PLAIN, **_TWO, **_MIXER, "model_type": "granitemoehybrid", "intermediate_size": 24,
        "shared_intermediate_size": 20, "num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 2.0,
        "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 0.5,
    },
    "mamba2": {
        "model_type": "mamba2", "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4,
        "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 8, "time_step_limit": [0.4, 0.9],
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "bamba": {**_PLAIN, **_MIXER, "model_type": "bamba", "intermediate_size": 48, "attn_layer_indices": [1]},
    "zamba2": {
        **_PLAIN, "model_type": "zamba2", "n_mamba_heads": 4, "mamba_ngroups": 2, "mamba_d_state": 8, "chunk_size": 8,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_mem_blocks": 1, "adapter_rank": 4,
        "use_shared_attention_adapter": True, "use_mem_rope": True, "intermediate_size": 48, "num_key_value_heads": 4,
    },
    "lfm2-moe": {
        **_PLAIN, "model_type": "lfm2_moe", "intermediate_size": 48, "layer_types": ["conv", "full_attention", "conv"],
        "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1,
    },
}  # fmt: skip
