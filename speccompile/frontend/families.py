# SPDX-License-Identifier: Apache-2.0
"""What a config.json tells of an architecture that cannot be exported, said before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from speccompile.errors import ExportError

_HYBRID = "recurrent or linear-attention layers beside attention"

# Refused by name: the reason is a property of the architecture.
_REFUSED = {
    "bloom": "ALiBi position biases",
    "mpt": "ALiBi position biases",
    "falcon": "an attention that cannot be replaced",
    "gpt_oss": "attention sinks",
    "deepseek_v2": "latent attention, whose cache is no K and V per head",
    "deepseek_v3": "latent attention, whose cache is no K and V per head",
    "minicpm3": "latent attention, whose cache is no K and V per head",
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), "recurrent layers instead of attention"),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "minimax"), _HYBRID),
    **dict.fromkeys(("nemotron_h", "olmo_hybrid", "qwen3_next", "recurrent_gemma", "zamba", "zamba2"), _HYBRID),
}
_STATIC_ROPE = ("default", "linear", "llama3", "yarn", "longrope", "su")
_LAYER_KINDS = ("full_attention", "sliding_attention")


def check_config(config: Mapping[str, Any], max_seq_len: int) -> None:
    """Refuse what cannot be expressed.

    Args:
        config: the parsed config.json.
        max_seq_len: rows of the cache; some rotary embeddings and all position tables end.

    Raises:
        ExportError: with the reason.
    """
    where = str(config.get("model_type") or "config.json without model_type")
    reason = _REFUSED.get(where)
    if reason is None and config.get("is_encoder_decoder"):
        reason = "an encoder beside the decoder"
    if reason is None and (config.get("alibi") or config.get("position_embedding_type") == "alibi"):
        reason = "ALiBi position biases"
    if reason is None and config.get("quantization_config"):
        reason = f"weights quantised by {_quantizer(config)}"
    kinds = sorted(set(config.get("layer_types") or ()) - set(_LAYER_KINDS))
    if reason is None and kinds:
        reason = f"layers of the kind {', '.join(kinds)}"
    if reason is not None:
        raise ExportError(
            where,
            reason,
            "a decoder of full or sliding-window attention with unquantised weights",
            "This architecture cannot be exported; use another model.",
        )
    for rope in rope_parameters(config):
        _check_rope(where, rope, config, max_seq_len)


def _quantizer(config: Mapping[str, Any]) -> str:
    held = config["quantization_config"]
    return str(held.get("quant_method", "an unknown method") if isinstance(held, Mapping) else held)


def rope_parameters(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rotary parameters of a config: one set, or one for each kind of layer, under the old name or the new."""
    for name in ("rope_parameters", "rope_scaling"):
        held = config.get(name)
        if isinstance(held, Mapping):
            nested = [v for v in held.values() if isinstance(v, Mapping)]
            yield from nested or [held]


def rope_type(rope: Mapping[str, Any]) -> str:
    """The kind of a set of rotary parameters; older configs call it `type`."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _check_rope(where: str, rope: Mapping[str, Any], config: Mapping[str, Any], max_seq_len: int) -> None:
    kind = rope_type(rope)
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
