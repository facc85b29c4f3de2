# SPDX-License-Identifier: Apache-2.0
"""Values of a config.json: of other kinds than transformers' classes take, or of a language model's tower."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from speccompile.common.json_reader import shown
from speccompile.errors import CheckpointError

TODO = "Correct config.json, or use the checkpoint as its author published it."
OBJECTS = ("text_config", "transformer_layer_config", "layer_config")  # that describe layers as well
_TOKEN = re.compile(r"(^|_)(bos|eos|pad|sep)_token_id$")
_FLAG = re.compile(r"^(use_cache|tie_word_embeddings|\w+_bias|use_sliding_window)$")
_NUMBER = re.compile(r"(_eps|_epsilon|^rope_theta|_dropout|_pdrop|^initializer_range|_softcapping)$")
_SHARE, _WIDTH = re.compile("^partial_rotary_factor$"), re.compile("^(moe_)?intermediate_size$")
_LEAST = {"rope_theta": 0.0, "rms_norm_eps": 0.0}


def plain_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config whose values have the kinds that transformers asks for, where their meaning is plain.

    Numbers with a point become whole, 0 and 1 false and true, a list of one token that token, null the default.
    """
    made: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and name in OBJECTS:
            value = plain_values(value)
        elif _TOKEN.search(name):
            value = value[0] if isinstance(value, list) and len(value) == 1 else value
            value = int(value) if isinstance(value, float) and value.is_integer() else value
        elif _FLAG.match(name) and (value is None or value in (0, 1)):
            if name == "use_cache":  # it changes no number
                continue
            value = bool(value)
        elif _NUMBER.search(name):
            if value is None and name in ("initializer_range", "attention_dropout"):
                continue
            value = float(value) if type(value) is int else value
        made[name] = value
    return made


def wrong_values(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields (key, value as text, what was expected) of values that cannot be meant, in a config of layers."""
    checks: tuple[tuple[re.Pattern[str], Callable[[str, Any], bool], str], ...] = (
        (_TOKEN, lambda name, v: _is_token(v) or (isinstance(v, list) and all(map(_is_token, v))), "a token, or none"),
        (_FLAG, lambda name, v: isinstance(v, bool), "true or false"),
        (_NUMBER, lambda name, v: _is_number(v) and v >= _LEAST.get(name, v), "a number"),
        (_SHARE, lambda name, v: _is_number(v) and 0 < v <= 1, "a share of a head, at most 1"),
        (_WIDTH, lambda name, v: isinstance(v, list) or (type(v) is int and v > 0), "a number of columns"),
        (re.compile("^hidden_act(ivation)?$"), lambda name, v: isinstance(v, str), "the name of an activation"),
        (re.compile("^sliding_window$"), lambda name, v: type(v) is int and v >= 0, "a number of tokens, or none"),
        (re.compile("^rope_(scaling|parameters)$"), lambda name, v: isinstance(v, Mapping), "an object"),
    )
    if "hidden_act" in config and config["hidden_act"] is None and config.get("hidden_activation") is None:
        yield "hidden_act", "None", "the name of an activation"
    for name, value in plain_values(config).items():
        for pattern, is_right, expected in checks:
            if pattern.search(name) and value is not None and not is_right(name, value):
                yield name, shown(value), expected


def check_values(where: str, config: Mapping[str, Any]) -> None:
    """Refuses a model's config with such values, more experts a token than it has, or kinds of other layers."""
    for name, got, expected in wrong_values(config):
        raise CheckpointError(f"{where} ({name})", got, expected, TODO)
    experts = next((config[k] for k in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(k)), None)
    chosen = config.get("num_experts_per_tok")
    if type(experts) is int and type(chosen) is int and not 1 <= chosen <= max(experts, 1):
        expected = f"1 to {experts}, the number of experts"
        raise CheckpointError(f"{where} (num_experts_per_tok)", str(chosen), expected, TODO)
    kinds, num = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is not None and type(num) is int and not (isinstance(kinds, list) and len(kinds) == num):
        got = f"{len(kinds)} kinds" if isinstance(kinds, list) else shown(kinds)
        raise CheckpointError(f"{where} (layer_types)", got, f"a list of {num}, the num_hidden_layers", TODO)


def check_heads(where: str, sizes: tuple[int, int, int], *, has_dim: bool) -> None:
    """Refuses heads that do not share their keys evenly, or that do not divide the width where they must.

    `sizes` are hidden size, heads, key and value heads.
    """
    hidden, heads, kv_heads = sizes
    if heads % kv_heads:
        expected = f"a divisor of {heads}, the num_attention_heads"
        raise CheckpointError(f"{where} (num_key_value_heads)", str(kv_heads), expected, TODO)
    if not has_dim and hidden % heads:
        expected = f"a divisor of {hidden}, the hidden_size, as there is no head_dim"
        raise CheckpointError(f"{where} (num_attention_heads)", str(heads), expected, TODO)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_token(value: Any) -> bool:
    return type(value) is int


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
    """Returns the flat config of the language model; values of the top level win where both levels have them."""
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
