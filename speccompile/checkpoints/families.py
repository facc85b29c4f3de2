# SPDX-License-Identifier: Apache-2.0
"""Refuses architectures that cannot be exported by their config.json, before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from speccompile.checkpoints.config_values import is_tower, text_config
from speccompile.checkpoints.layer_sizes import (
    DELTA_KINDS,
    DELTA_TYPES,
    MIXER_KINDS,
    MIXER_TYPES,
    is_latent,
    mixer_kinds,
)
from speccompile.checkpoints.packed_schemes import METHODS, MXFP4, error_of_method, method_of
from speccompile.errors import ExportError

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
