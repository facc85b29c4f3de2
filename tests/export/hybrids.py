# SPDX-License-Identifier: Apache-2.0
"""Tiny configs of the models with recurrent layers; key and value heads differ in number and width."""

from __future__ import annotations

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
}  # fmt: skip
