# SPDX-License-Identifier: Apache-2.0
"""Values of config.json: their types, and the architectures that cannot be exported, before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from speccompile.checkpoints.layer_sizes import (
    DELTA_KINDS,
    DELTA_TYPES,
    MIXER_KINDS,
    MIXER_TYPES,
    is_latent,
    mixer_kinds,
)
from speccompile.checkpoints.packed_schemes import METHODS, MXFP4, error_of_method, method_of
from speccompile.common.json_reader import shown
from speccompile.errors import CheckpointError, ExportError

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


_HYBRID = "recurrent or linear-attention layers beside attention"
_LATENT = "multi-head latent attention, whose cache is no K and V per head"
_OWN_ATTENTION = "attention that does not go through transformers' attention interface"
_ENCODER = "an encoder of masked tokens, whatever its config says of decoding"
_INDEXED = "sparse attention to keys that an index chooses"

# Refused by name: the reason is a property of the architecture.
_REFUSED = {
    "mpt": "ALiBi position biases",
    **dict.fromkeys(("cpmant", "reformer", "trocr", "xlm", "xlnet"), _OWN_ATTENTION),
    "longcat_flash": _LATENT,
    **dict.fromkeys(("axk2", "deepseek_v32", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4"), _INDEXED),
    "deepseek_v4": "sparse attention to compressed keys",
    **dict.fromkeys(("falcon_mamba", "mamba", "rwkv", "xlstm"), "recurrent layers instead of attention"),
    **dict.fromkeys(("bailing_hybrid", "jamba", "kimi_linear", "lfm3", "minimax", "olmo_hybrid"), _HYBRID),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "zamba"), _HYBRID),
    **dict.fromkeys(("inkling_text", "inkling2_text"), "convolutions over keys and values and relative positions"),
    **dict.fromkeys(("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra"), _ENCODER),
    **dict.fromkeys(("ernie", "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert"), _ENCODER),
    **dict.fromkeys(("roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"), _ENCODER),
    "zaya": "attention over compressed keys that a convolution makes",
    "blt": "byte patches of a second model in place of tokens",
    "diffllama": "differential attention",
    "doge": "attention masks that depend on the values",
    "git": "images as a prefix of the text",
    **dict.fromkeys(("gemma3n", "gemma3n_text"), "four residual streams that layers mix (AltUp)"),
    **{f"{target}_assistant": "attention to another model's cache" for target in ("gemma4", "gemma4_unified")},
    "hrm_text": "layers that run more than once a step",
    "phi4_multimodal": "images and sound beside the text",
}
_STATIC_ROPE = ("default", "linear", "llama3", "yarn", "longrope", "su", "proportional")
_LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
_ALIBI = ("bloom",)
# ALiBi's slope * position(key) as a product: K and Q get columns for the position, V as many that are not used. Eight,
# so that widths stay multiples of it, which TensorRT's kernels need.
POSITION_COLUMNS = 8
MAX_POSITION = 2**16 - 1  # the largest that two of the columns hold exactly in any type of a cache
_OTHER_MODALITIES = ("text_config", "vision_config", "audio_config", "audio_encoder_config")
_TODO = "This architecture cannot be exported; use another model."


def has_alibi(config: Mapping[str, Any]) -> bool:
    """Whether a model of this config has position biases, for which its caches are `POSITION_COLUMNS` wider."""
    return config.get("model_type") in _ALIBI


def check_config(config: Mapping[str, Any], max_seq_len: int) -> None:
    """Refuses what cannot be expressed in a cache of `max_seq_len` rows, which bounds rotary and position tables."""
    check_architecture(config)
    config = text_config(config)
    _check_chunks(config, max_seq_len)
    for rope in rope_parameters(config):
        _check_rope(str(config.get("model_type")), rope, config, max_seq_len)


def check_architecture(config: Mapping[str, Any]) -> None:
    """Refuses a model that is not supported at any length. Raises ExportError: with its type and the property."""
    where = str(config.get("model_type") or "config.json without model_type")
    reason, todo = _REFUSED.get(where), _TODO
    if reason is None and is_tower(config):
        check_architecture(text_config(config))
        return
    if reason is None and any(isinstance(config.get(name), Mapping) for name in _OTHER_MODALITIES):
        reason, todo = "a multimodal checkpoint", "Use its text model alone."  # of no type in `text_towers.TOWERS`
    if reason is None and (method := method_of(config)) not in (None, MXFP4, *METHODS):
        raise error_of_method(where, str(method), ExportError)
    if reason is None:
        reason = _property(config)
    if reason is not None:
        raise ExportError(where, reason, "a decoder of full or sliding-window attention", todo)


def _property(config: Mapping[str, Any]) -> str | None:
    if config.get("is_encoder_decoder"):
        return "an encoder beside the decoder"
    if config.get("alibi") or config.get("position_embedding_type") == "alibi":
        return "ALiBi position biases"
    if config.get("kv_lora_rank") and not is_latent(config):
        return _LATENT
    known: tuple[str, ...] = DELTA_KINDS if config.get("model_type") in DELTA_TYPES else _LAYER_KINDS
    found = config.get("layer_types") or ()
    if config.get("model_type") in MIXER_TYPES:
        known, found = MIXER_KINDS[config["model_type"]], mixer_kinds(config, 0)
    kinds = sorted(set(found) - set(known))
    return f"layers of the kind {', '.join(kinds)}" if kinds else None


def rope_parameters(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the rotary parameters of a config: one set, or one per kind of layer, under the old or new name."""
    for name in ("rope_parameters", "rope_scaling"):
        held = config.get(name)
        if isinstance(held, Mapping):
            nested = [v for v in held.values() if isinstance(v, Mapping)]
            yield from nested or [held]


def rope_type(rope: Mapping[str, Any]) -> str:
    """Returns the kind of rotary parameters (`type` in older configs), which for texts is `default` of `mrope`."""
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    return "default" if kind == "mrope" else kind


def _check_chunks(config: Mapping[str, Any], max_seq_len: int) -> None:
    size = config.get("attention_chunk_size")
    if "chunked_attention" in (config.get("layer_types") or ()) and not (size and max_seq_len <= int(size)):
        raise ExportError(
            str(config.get("model_type")),
            f"max_seq_len {max_seq_len} with chunked attention",
            f"at most attention_chunk_size, which is {size}",
            "Beyond it these layers hide earlier chunks. Lower engine.max_seq_len.",
        )


def _check_rope(where: str, rope: Mapping[str, Any], config: Mapping[str, Any], max_seq_len: int) -> None:
    kind = rope_type(rope)
    if kind == "dynamic" and rope.get("alpha") and str(config.get("model_type")).startswith("hunyuan_v1"):
        return  # Hunyuan's name for a base that `alpha` stretches once and for all
    if kind not in _STATIC_ROPE:
        raise ExportError(
            where,
            f"rope type {kind!r}",
            f"one of {', '.join(_STATIC_ROPE)}",
            "Its angles depend on the sequence's length, so cached keys would have to be rotated again.",
        )
    if kind in ("longrope", "su"):
        limit = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        if limit is not None and max_seq_len > int(limit):
            raise ExportError(
                where,
                f"max_seq_len {max_seq_len} with rope type longrope",
                f"at most original_max_position_embeddings, which is {limit}",
                "Beyond it all angles change while a text grows. Lower engine.max_seq_len.",
            )


# Of Qwen3-Next, Qwen3.5 and others: in a tree of their own beside the model.
_BESIDE = re.compile(r"^(model\.)?(mtp\.|mtp_layers\.)")
# Of DeepSeek-V3 and GLM: numbered as further layers, each with this projection.
_NUMBERED = re.compile(r"^(.*\blayers\.(\d+)\.)eh_proj\.weight$")


def extra_keys(keys: Iterable[str], num_layers: int) -> set[str]:
    """Returns the keys of drafting modules among those of a model's weights."""
    held = list(keys)
    found = (_NUMBERED.match(key) for key in held)
    prefixes = tuple(match[1] for match in found if match is not None and int(match[2]) >= num_layers)
    return {key for key in held if _BESIDE.match(key) or key.startswith(prefixes)}
