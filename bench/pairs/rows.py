# SPDX-License-Identifier: Apache-2.0
"""The pairs of target family and published speculator, one row each, and the configs that are built for them.

Counted as one pair: a family and a kind of speculator that is published for it, whatever the number of sizes and
authors. Granite 3 and Granite 20B code, which share a line in IBM's releases, are two: their architectures are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.pairs import targets as t
from bench.pairs.narrow import hidden_size, narrow
from bench.pairs.targets import Config

TARGET, SPECULATOR = "target", "speculator"  # folders of the configs
MAX_VOCAB, MAX_DRAFT_VOCAB, MAX_EXPERTS, MAX_CHOSEN = 4096, 2048, 8, 4
NUM_LAYERS = 2
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "top_k_experts")
VOCAB = ("vocab_size", "vocab_size_per_layer_input")
MASK = ("mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True)
class Pair:
    """A pair.

    Args:
        name: short, unique.
        family: of the target.
        model: whose sizes the target has.
        speculator: kind of it, with who publishes some.
        target: config.json of the target, in published sizes but for its layers.
        method: of the recipe.
        drafter: config.json of the speculator; None: it is in the target's files.
        num_layers: of the target; 0: its config says.
        fields: further ones of the recipe's section `speculator`.
        max_experts: where the memory of a small machine needs fewer than `MAX_EXPERTS`.
    """

    name: str
    family: str
    model: str
    speculator: str
    target: Config
    method: str
    drafter: Config | None = None
    num_layers: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    max_experts: int = MAX_EXPERTS

    def configs(self, *, is_full: bool, is_narrow: bool = False) -> dict[str, Config]:
        """Returns the config by folder.

        Args:
            is_full: with all tokens and experts.
            is_narrow: with narrow layers, see `bench.pairs.narrow`.
        """
        made = {TARGET: with_layers(self.target, self.num_layers or _num_layers(self.target))}
        if self.drafter is not None:
            made[SPECULATOR] = dict(self.drafter)
        if is_narrow:
            known = {hidden_size(_text(self.target)): hidden_size(_text(narrow(self.target)))}
            made = {folder: narrow(config, known) for folder, config in made.items()}
        return made if is_full else {folder: cut(config, self.max_experts) for folder, config in made.items()}

    def recipe(self) -> dict[str, Any]:
        """Returns the recipe, without its engine."""
        model = {} if self.drafter is None else {"model": SPECULATOR}
        return {
            "target": {"model": TARGET, "weights": "random"},
            "speculator": {"method": self.method, **model, **self.fields},
        }


def _num_layers(config: Config) -> int:
    kinds = config.get("layer_types") or config.get("layers_block_type") or ()
    return len(kinds) or NUM_LAYERS


def with_layers(config: Config, num: int) -> Config:
    """Returns a config of `num` layers: those of the list of kinds, the first kind more often where it is shorter."""
    if isinstance(config.get("text_config"), dict):
        text = config["text_config"]
        return config | {"text_config": with_layers(text, max(num, _num_layers(text)))}
    made = dict(config)
    for name in ("layer_types", "layers_block_type", "no_rope_layers", "layer_rope_theta"):
        if name in made:
            held = made[name]
            made[name] = [held[0]] * (num - len(held)) + list(held)
    depth = "n_layer" if "n_layer" in made else "num_hidden_layers"
    return made if "layers_block_type" in made else made | {depth: num}


def cut(config: Config, max_experts: int) -> Config:
    """Returns a config with few tokens and experts; of all else it has the same sizes."""
    limits = {
        **dict.fromkeys(VOCAB, MAX_VOCAB),
        **dict.fromkeys(EXPERTS, max_experts),
        **dict.fromkeys(CHOSEN, min(MAX_CHOSEN, max_experts)),
        **dict.fromkeys(MASK, MAX_VOCAB - 1),
        "draft_vocab_size": MAX_DRAFT_VOCAB,
    }
    made = {name: min(value, limits[name]) if name in limits and value else value for name, value in config.items()}
    if made.get("n_group", 1) > 1:  # a group is scored by its two best experts
        made["n_group"] = min(config["n_group"], made["n_routed_experts"] // 2)
        made["topk_group"] = min(config["topk_group"], made["n_group"] // 2)
    for name, value in made.items():
        if isinstance(value, dict) and name not in ("rope_parameters", "rope_scaling"):
            made[name] = cut(value, max_experts)
    if "vocab_size" in made:
        made |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    return made


def _text(target: Config) -> Config:
    return target.get("text_config", target)


def _eagle3(target: Config, inner: int, draft_vocab: int = 32000, **more: Any) -> Config:
    """Returns the config of an EAGLE-3 drafter: one Llama layer of the target's width."""
    text = _text(target)
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    own = {name: text[name] for name in names if name in text}
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
            "intermediate_size": inner, "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
            "draft_vocab_size": draft_vocab, **own, **more}  # fmt: skip


def _peagle(target: Config, inner: int) -> Config:
    """Returns the config of a P-EAGLE drafter: EAGLE-3's, of several layers and with a mask token."""
    config = _eagle3(target, inner, architectures=["PeagleLlamaForCausalLM"], ptd_token_id=128000)
    return config | {"num_hidden_layers": 4, "parallel_drafting": True, "norm_before_residual": False}


def _dflash(target: Config, inner: int, heads: tuple[int, int], *, block: int = 16, **nested: Any) -> Config:
    """Returns the config of a DFlash drafter, of two of its five layers."""
    text = _text(target)
    own = {"mask_token_id": min(151669, text["vocab_size"] - 1), "target_layer_ids": [1, 9, 17, 25, 33], **nested}
    return {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": text["hidden_size"],
            "vocab_size": text["vocab_size"], "intermediate_size": inner, "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 128, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "block_size": block,
            "num_target_layers": 36, "dflash_config": own}  # fmt: skip


def _dflash2(target: Config, inner: int, heads: tuple[int, int], *, block: int = 8, **nested: Any) -> Config:
    """Returns the config of a DFlash 2 drafter: windows, convolutions and a selector."""
    own = {"block_size": block, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256,
           "selector_top_k": 16, **nested}  # fmt: skip
    layers = {"is_causal": False, "layer_types": [t.SLIDING] * NUM_LAYERS, "sliding_window": 2048,
              "use_sliding_window": True, "architectures": ["DFlash2DraftModel"]}  # fmt: skip
    return _dflash(target, inner, heads, block=block, **own) | layers


def _dspark(target: Config, inner: int, heads: tuple[int, int]) -> Config:
    """Returns the config of a DSpark drafter: DFlash's with a Markov head, all at the top level."""
    config = _dflash(target, inner, heads, block=7)
    own = config.pop("dflash_config")
    return config | own | {"markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True}


def _mlp(hidden: int, inner: int, num: int, vocab: int, *, is_tied: bool = False) -> Config:
    return {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": hidden,
            "inner_dim": inner, "n_predict": num, "vocab_size": vocab, "tie_weights": is_tied,
            "scale_input": is_tied}  # fmt: skip


_ASSISTANT: Config = {
    "model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"], "backbone_hidden_size": 1536,
    "use_ordered_embeddings": False, "tie_word_embeddings": True,
    "text_config": {
        "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 256, "intermediate_size": 2048,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_hidden_layers": 4,
        "num_kv_shared_layers": 4, "sliding_window": 512, "layer_types": [t.SLIDING, t.SLIDING, t.SLIDING, t.FULL],
        "rope_parameters": t.GEMMA4_ROPE, "tie_word_embeddings": True,
    },
}  # fmt: skip
_DSPARK_GEMMA4 = _dspark(t.GEMMA4_12B, 15360, (16, 1)) | {
    "model_type": "gemma4_text", "num_global_key_value_heads": 1, "global_head_dim": 512, "attention_k_eq_v": True,
    "head_dim": 512, "final_logit_softcapping": 30.0, "target_layer_ids": [5, 17, 29, 41, 46], "mask_token_id": 4,
    "rope_parameters": {t.FULL: t.GEMMA4_ROPE[t.FULL]},
}  # fmt: skip
_PARD_QWEN: Config = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": NUM_LAYERS,
    "tie_word_embeddings": True, "rope_theta": 1e6, "max_position_embeddings": 40960, "pard_token": 151670,
}  # fmt: skip
_PARD_LLAMA: Config = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": NUM_LAYERS,
    "tie_word_embeddings": True, "rope_theta": 5e5, "max_position_embeddings": 131072, "pard_token": 128255,
}  # fmt: skip
_CHAIN = {"tree": "chain"}
_DOMINO = {"projector_type": "domino", "emb_dim": 256, "gru_hidden_dim": 1024, "pure_draft_prefix_len": 1,
           "shift_label": True}  # fmt: skip
_LILICORR = {"lilicorr_enabled": True, "lilicorr_candidate_topk": 16, "lilicorr_hidden_size": 0,
             "lilicorr_num_layers": 2, "lilicorr_num_heads": 8, "lilicorr_mlp_ratio": 2.0, "lilicorr_factor_dim": 256,
             "lilicorr_vector_eps": 1e-4, "lilicorr_logit_scale": 8.0}  # fmt: skip

Q, QH, QM, G4, OSS = "Qwen3", "Qwen3.5, 3.6, 3.8", "Qwen3-MoE", "Gemma 4", "gpt-oss"
PAIRS = (
    Pair("qwen3-eagle3", Q, "Qwen3-1.7B", "EAGLE-3 (AngelSlim, RedHatAI)", t.QWEN3_1_7B, "eagle3",
         _eagle3(t.QWEN3_1_7B, 6144), 3),
    Pair("qwen3-dflash", Q, "Qwen3-1.7B", "DFlash (z-lab)", t.QWEN3_1_7B, "dflash",
         _dflash(t.QWEN3_1_7B, 6144, (16, 8))),
    Pair("qwen3-dspark", Q, "Qwen3-1.7B", "DSpark (deepseek-ai)", t.QWEN3_1_7B, "dflash",
         _dspark(t.QWEN3_1_7B, 6144, (16, 8))),
    Pair("qwen3-jetspec", Q, "Qwen3-1.7B", "JetSpec", t.QWEN3_1_7B, "dflash",
         _dflash(t.QWEN3_1_7B, 6144, (16, 8), causal_head=True)),
    Pair("qwen3-domino", Q, "Qwen3-1.7B", "Domino", t.QWEN3_1_7B, "dflash",
         _dflash(t.QWEN3_1_7B, 6144, (16, 8), **_DOMINO)),
    Pair("qwen3-pard", Q, "Qwen3-1.7B", "PARD (amd)", t.QWEN3_1_7B, "draft_model", _PARD_QWEN),
    Pair("qwen3.5-mtp", QH, "Qwen3.5-0.8B", "MTP (inside)", t.QWEN3_5_0_8B, "mtp"),
    Pair("qwen3.5-dflash", QH, "Qwen3.5-0.8B", "DFlash (z-lab)", t.QWEN3_5_0_8B, "dflash",
         _dflash(t.QWEN3_5_0_8B, 3584, (16, 8)), 0, _CHAIN),
    Pair("qwen3.8-dflash2", QH, "Qwen3.8-27B", "DFlash 2 (z-lab)", t.QWEN3_8_27B, "dflash",
         _dflash2(t.QWEN3_8_27B, 17408, (32, 8)), 0, _CHAIN),
    Pair("qwen3.5-eagle3", QH, "Qwen3.5-0.8B", "EAGLE-3 (PRISM, AQ-MedAI)", t.QWEN3_5_0_8B, "eagle3",
         _eagle3(t.QWEN3_5_0_8B, 3584), 3, _CHAIN),
    Pair("qwen4-exp-mtp", "Qwen3.8-Flash-Next", "Qwen3.8-Flash-Next", "MTP (inside)", t.QWEN4_EXP, "mtp"),
    Pair("qwen3-moe-eagle3", QM, "Qwen3-30B-A3B", "EAGLE-3 (lmsys, RedHatAI)", t.QWEN3_30B_A3B, "eagle3",
         _eagle3(t.QWEN3_30B_A3B, 12288), 3),
    Pair("qwen3-moe-peagle", QM, "Qwen3-Coder-30B-A3B", "P-EAGLE (amazon)", t.QWEN3_30B_A3B, "eagle3",
         _peagle(t.QWEN3_30B_A3B, 6144), 3),
    Pair("qwen3-moe-dflash", QM, "Qwen3-Coder-30B-A3B", "DFlash (z-lab)", t.QWEN3_30B_A3B, "dflash",
         _dflash(t.QWEN3_30B_A3B, 6144, (32, 4))),
    Pair("gemma4-assistant", G4, "Gemma 4 E2B", "assistant (google)", t.GEMMA4_E2B, "gemma4_assistant", _ASSISTANT),
    Pair("gemma4-eagle3", G4, "Gemma 4 26B-A4B", "EAGLE-3 (RedHatAI)", t.GEMMA4_26B_A4B, "eagle3",
         _eagle3(t.GEMMA4_26B_A4B, 8448), 3),
    Pair("gemma4-dflash", G4, "Gemma 4 26B-A4B", "DFlash (RedHatAI)", t.GEMMA4_26B_A4B, "dflash",
         _dflash(t.GEMMA4_26B_A4B, 8448, (32, 8))),
    Pair("gemma4-dspark", G4, "Gemma 4 12B", "DSpark (deepseek-ai)", t.GEMMA4_12B, "dflash", _DSPARK_GEMMA4),
    Pair("gemma3-eagle3", "Gemma 3", "Gemma 3 4B", "EAGLE-3 (community)", t.GEMMA3_4B, "eagle3",
         _eagle3(t.GEMMA3_4B, 10240), 3),
    Pair("gpt-oss-eagle3", OSS, "gpt-oss-20b", "EAGLE-3 (RedHatAI, NVIDIA)", t.GPT_OSS_20B, "eagle3",
         _eagle3(t.GPT_OSS_20B, 17280), 3),
    Pair("gpt-oss-peagle", OSS, "gpt-oss-20b", "P-EAGLE (amazon)", t.GPT_OSS_20B, "eagle3",
         _peagle(t.GPT_OSS_20B, 8640), 3),
    Pair("gpt-oss-dflash", OSS, "gpt-oss-20b", "DFlash", t.GPT_OSS_20B, "dflash",
         _dflash(t.GPT_OSS_20B, 8640, (32, 8))),
    Pair("llama3-eagle3", "Llama 3", "Llama 3.2 1B", "EAGLE-3 (yuhuili, RedHatAI, NVIDIA)", t.LLAMA32_1B, "eagle3",
         _eagle3(t.LLAMA32_1B, 8192), 3),
    Pair("llama3-dflash", "Llama 3", "Llama 3.2 1B", "DFlash (z-lab)", t.LLAMA32_1B, "dflash",
         _dflash(t.LLAMA32_1B, 8192, (32, 8), block=10)),
    Pair("llama3-pard", "Llama 3", "Llama 3.2 1B", "PARD (amd)", t.LLAMA32_1B, "draft_model", _PARD_LLAMA),
    Pair("llama3-mlp", "Llama 3", "Llama 3.2 1B", "MLP (ibm-ai-platform)", t.LLAMA32_1B, "mlp",
         _mlp(2048, 3072, 4, 128256)),
    Pair("llama4-eagle3", "Llama 4", "Llama 4 Scout", "EAGLE-3 (NVIDIA, yuhuili)", t.LLAMA4_SCOUT, "eagle3",
         _eagle3(t.LLAMA4_SCOUT, 8192), 3, max_experts=2),
    Pair("muse-dflash", "Muse-Glimmer", "Muse-Glimmer-30B", "DFlash (its own assistant)", t.MUSE_30B, "dflash",
         _dflash(t.MUSE_30B, 19968, (32, 8), final_logit_softcapping=20.0, output_multiplier=0.19611613513818404)),
    Pair("muse-dflash2", "Muse-Glimmer", "Muse-Glimmer-30B", "DFlash 2 (incoai)", t.MUSE_30B, "dflash",
         _dflash2(t.MUSE_30B, 19968, (32, 8), block=16, final_logit_softcapping=20.0,
                  output_multiplier=0.19611613513818404)),
    Pair("glm4-moe-mtp", "GLM-4.5, 4.6, 4.7", "GLM-4.5-Air", "MTP (inside)", t.GLM45_AIR, "mtp"),
    Pair("minimax-m2-dflash", "MiniMax-M2", "MiniMax-M2", "DFlash", t.MINIMAX_M2, "dflash",
         _dflash(t.MINIMAX_M2, 9216, (32, 8))),
    Pair("hunyuan-eagle3", "Hunyuan", "Hunyuan-1.8B", "EAGLE-3 (AngelSlim)", t.HUNYUAN_1_8B, "eagle3",
         _eagle3(t.HUNYUAN_1_8B, 6144), 3),
    Pair("deepseek-mtp", "DeepSeek-V3", "DeepSeek-V3", "MTP (inside)", t.DEEPSEEK_V3, "mtp", max_experts=8),
    Pair("kimi-eagle3", "Kimi K2", "Kimi K2", "EAGLE-3 (AQ-MedAI, NVIDIA)", t.KIMI_K2, "eagle3",
         _eagle3(t.KIMI_K2, 18432, num_attention_heads=64, num_key_value_heads=64, head_dim=128), 3, max_experts=4),
    Pair("kimi-dflash", "Kimi K2", "Kimi K2.5", "DFlash (z-lab)", t.KIMI_K2, "dflash",
         _dflash(t.KIMI_K2, 18432, (64, 8)), max_experts=4),
    Pair("nemotron-mtp", "Nemotron 3", "Nemotron 3 Nano 30B-A3B", "MTP (inside)", t.NEMOTRON3_NANO, "mtp"),
    Pair("nemotron-dflash", "Nemotron 3", "Nemotron 3 Nano 30B-A3B", "DFlash", t.NEMOTRON3_NANO, "dflash",
         _dflash(t.NEMOTRON3_NANO, 8064, (32, 8)), 0, _CHAIN),
    Pair("nemotron-lilicorr", "Nemotron 3", "Nemotron 3 Nano 30B-A3B", "LiLiCorr", t.NEMOTRON3_NANO, "dflash",
         _dflash(t.NEMOTRON3_NANO, 8064, (32, 8), **_LILICORR) | {"architectures": ["LiLiCorrDraftModel"]}, 0, _CHAIN),
    Pair("ministral3-eagle3", "Ministral 3", "Ministral 3 3B", "EAGLE-3", t.MINISTRAL3_3B, "eagle3",
         _eagle3(t.MINISTRAL3_3B, 9216), 3),
    Pair("granite3-mlp", "Granite 3", "Granite 3.0 8B", "MLP (ibm-granite)", t.GRANITE3_8B, "mlp",
         _mlp(4096, 3072, 5, 49155, is_tied=True)),
    Pair("granite-code-mlp", "Granite code", "Granite 20B code", "MLP (ibm-granite)", t.GRANITE_20B_CODE, "mlp",
         _mlp(6144, 4096, 4, 49152)),
    Pair("phi4-eagle3", "Phi-3, 4", "Phi-4-mini", "EAGLE-3 (community)", t.PHI4_MINI, "eagle3",
         _eagle3(t.PHI4_MINI, 8192), 3),
    Pair("lfm2-dflash", "LFM2", "LFM2.5 1.2B", "DFlash", t.LFM25_1_2B, "dflash",
         _dflash(t.LFM25_1_2B, 6144, (16, 4)), 0, _CHAIN),
)  # fmt: skip
BY_NAME = {pair.name: pair for pair in PAIRS}
