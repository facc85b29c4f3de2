# SPDX-License-Identifier: Apache-2.0
"""The language model of a multimodal checkpoint: its config, and the names of its weights. Needs no torch.

Its sizes stand in `text_config`, the names of its weights have a prefix, and beside them are
those of images and sound. Loaded
alone it gives the logits of the whole model on text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Multimodal types whose language model has equal logits alone (tests/export/test_text_towers.py).
TOWERS = {
    "aria", "exaone4_5", "gemma3", "gemma4", "gemma4_unified", "idefics3", "internvl", "lighton_ocr",
    "llava", "llava_next", "llava_onevision", "mistral3", "muse_glimmer", "qwen2_5_vl", "qwen2_vl", "qwen3_5",
    "qwen3_5_moe", "qwen3_vl", "smolvlm", "vipllava",
}  # fmt: skip
# Language models without a causal class of their own, which are those of another type where there is only text.
SAME_AS = {"qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
# Older configs of these have the sizes of the language model at the top level.
_FLAT = {"qwen2_5_vl": "qwen2_5_vl_text", "qwen2_vl": "qwen2_vl_text"}
# Sizes that the files of these models leave to their class.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"vocab_size": 262208, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
                    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072},
    "gemma4_text": {"vocab_size": 262144, "hidden_size": 2304, "num_hidden_layers": 30, "num_attention_heads": 8,
                    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072},
    "gemma4_unified_text": {"vocab_size": 262144, "hidden_size": 2304, "num_hidden_layers": 30,
                            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                            "max_position_embeddings": 262144},
    "llama": {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
              "intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 131072},
}  # fmt: skip
_SHARED = ("tie_word_embeddings", "quantization_config", "bos_token_id", "eos_token_id", "architectures")
_CONFIGS = ("vision_config", "audio_config", "audio_encoder_config")

# Regular expressions of the names' beginnings in the files, and the beginning in the language model.
RENAMED = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.text_model\.": "model.",
}
_OTHER_PARTS = re.compile(
    r"^(model\.)?(visual|vision_tower|vision_model|vision_encoder|vision_adapter|vision_projection|connector"
    r"|multi_modal_projector"
    r"|image_newline|audio_tower|embed_vision|embed_audio)(\.|$)"
    r"|^mtp\."
)


def is_tower(config: Mapping[str, Any]) -> bool:
    """Whether it is the config of a multimodal model whose language model can be taken alone."""
    kind = config.get("model_type")
    return (
        isinstance(kind, str) and kind in TOWERS and (isinstance(config.get("text_config"), Mapping) or kind in _FLAT)
    )


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the flat config of the language model; a copy of `config` where it is not `is_tower`.

    What stands at the top level (whether embeddings are tied, special tokens) counts where both levels have it.
    """
    if not is_tower(config):
        return dict(config)
    if isinstance(held := config.get("text_config"), Mapping):
        shared = {name: config[name] for name in _SHARED if config.get(name) is not None}
    else:
        held, shared = {name: value for name, value in config.items() if name not in _CONFIGS}, {}
        shared["model_type"] = _FLAT[str(config["model_type"])]
    made = {**held, **shared}
    made["model_type"] = SAME_AS.get(str(made.get("model_type")), made.get("model_type"))
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := made.get(name), Mapping):
            made[name] = _text_rope(rope)
    return {**_DEFAULTS.get(str(made["model_type"]), {}), **{k: v for k, v in made.items() if v is not None}}


def _text_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    names = ("type", "rope_type")
    return {k: "default" if k in names and v == "mrope" else v for k, v in rope.items()}


def is_other_part(name: str) -> bool:
    """Whether a weight in a multimodal file belongs to images, sound or a draft head."""
    return _OTHER_PARTS.match(name) is not None


def text_name(name: str) -> str:
    for pattern, replacement in RENAMED.items():
        name = re.sub(pattern, replacement, name, count=1)
    return name


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the names in the files of a multimodal model by the names in its language model; other parts left out."""
    return {text_name(name): name for name in names if not is_other_part(name)}
