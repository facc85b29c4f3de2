# SPDX-License-Identifier: Apache-2.0
"""What GGUF files call the architectures, keys and tensors of transformers' models: one row of a table each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GATE_UP = "mlp.experts.gate_up_proj"  # gpt-oss: columns of gate and up in turns


@dataclass(frozen=True)
class Family:
    """How the models of an architecture are stored.

    Args:
        keys: names of the config's values by the file's key, without the architecture's prefix, beside `KEYS`.
        names: modules of a layer by the file's name, beside `LAYER`; "": none of that name.
        expected: what a key must say where the file has it, beside `EXPECTED`.
        in_pairs: the rotated halves of a head's queries and keys are stored in turns, as llama.cpp rotates them.
    """

    model_type: str
    class_name: str
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    expected: Mapping[str, Any] = field(default_factory=dict)
    in_pairs: bool = False
    adds_one: bool = False  # the factors of norms are stored with the 1 that transformers adds to them
    window_pattern: int = 0  # of this many layers the last one has full attention, where there is a window; 0: none
    big_layers: int = 0  # number of layers of the model whose queries are scaled by the width of all heads together
    is_partly_rotated: bool = False


KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
NEEDED = (*list(KEYS)[:3], "attention.head_count")
EXPECTED: dict[str, Any] = {
    "attention.causal": True, "tensor_data_layout": "Meta AI original pth", "expert_weights_scale": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0, "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0, "pooling_type": 0,
}  # fmt: skip
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_AROUND = {  # norms before and after attention and MLP
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps.weight": GATE_UP,
    "ffn_gate_exps.bias": f"{GATE_UP}_bias",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_MOE_KEYS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
             "expert_feed_forward_length": "moe_intermediate_size"}  # fmt: skip
_LOCAL_EXPERT_KEYS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
                      "expert_feed_forward_length": "intermediate_size"}  # fmt: skip
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}
_SOFTMAX = {"expert_gating_func": 1}
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", in_pairs=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", fixed=_NO_WINDOW),
    "qwen2moe": Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        keys=_MOE_KEYS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        fixed=_NO_WINDOW | {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        names=_EXPERTS | _SHARED_EXPERT,
        expected=_SOFTMAX | {"expert_weights_norm": False},
    ),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", fixed=_NO_WINDOW, names=_QK_NORMS),
    "qwen3moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        keys=_MOE_KEYS,
        fixed=_NO_WINDOW | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        names=_QK_NORMS | _EXPERTS,
        expected=_SOFTMAX | {"expert_weights_norm": True},
    ),
    "gemma": Family("gemma", "GemmaForCausalLM", adds_one=True),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        keys=_CAPS | _WINDOW,
        names=_AROUND,
        adds_one=True,
        window_pattern=2,
        big_layers=46,
    ),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        keys=_CAPS | _WINDOW,
        names=_QK_NORMS | _AROUND,
        adds_one=True,
        window_pattern=6,
        big_layers=62,
    ),
    "phi3": Family(
        "phi3",
        "Phi3ForCausalLM",
        keys=_WINDOW,
        fixed={"sliding_window": None},
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        is_partly_rotated=True,
    ),
    "granite": Family("granite", "GraniteForCausalLM", keys=_GRANITE, in_pairs=True),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", fixed=_NO_WINDOW | {"no_rope_layer_interval": 4}, in_pairs=True),
    "olmo2": Family("olmo2", "Olmo2ForCausalLM", names=_QK_NORMS | _AROUND | {"attn_norm": "", "ffn_norm": ""}),
    "starcoder2": Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        keys={"attention.layer_norm_epsilon": "norm_epsilon"},
        fixed={"sliding_window": None, "use_bias": True},
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "gpt-oss": Family(
        "gpt_oss",
        "GptOssForCausalLM",
        keys=_WINDOW | _LOCAL_EXPERT_KEYS,
        fixed={"attention_bias": True},
        names=_GPT_OSS,
        expected={"expert_gating_func": 3},
        window_pattern=2,
    ),
}
# Variants of the architecture "llama" that transformers has under other names.
MISTRAL = Family("mistral", "MistralForCausalLM", keys=_WINDOW, in_pairs=True)
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    keys=_WINDOW | _LOCAL_EXPERT_KEYS,
    fixed={"sliding_window": None},
    names=_MIXTRAL,
    expected=_SOFTMAX,
    in_pairs=True,
)


def family_of(architecture: str, keys: Mapping[str, Any]) -> Family | None:
    """Returns the row of an architecture; None where there is none."""
    if architecture == "llama" and keys.get("expert_count"):
        return MIXTRAL
    if architecture == "llama" and "attention.sliding_window" in keys:
        return MISTRAL
    return FAMILIES.get(architecture)
