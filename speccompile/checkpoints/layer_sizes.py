# SPDX-License-Identifier: Apache-2.0
"""What each layer of a decoder keeps of a sequence, from its config alone. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speccompile.checkpoints.mamba_sizes import FULL, LINEAR, MIXER_TYPES, mixer_layer_dims
from speccompile.common.json_reader import shown, whole_number
from speccompile.core.dims import LayerDims, RecurrentDims
from speccompile.errors import CheckpointError

# Gated DeltaNet layers beside full attention.
DELTA_TYPES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
DELTA_KINDS = (FULL, LINEAR)
# Latent attention: a row of its one cache has the latent and the rotated part of the key, which all heads share.
LATENT_TYPES = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
LATENT_WIDTHS = ("kv_lora_rank", "qk_rope_head_dim")
# Two kinds of attention, each with its own heads; the last layers may read K and V of others.
GEMMA4_TYPES = ("gemma4_text", "gemma4_unified_text")
SLIDING = "sliding_attention"
_MAX_SIZE = 2**20
# Sizes of a Gated DeltaNet layer, and what transformers takes where a config lacks them.
_DELTA_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_INTERVAL = 4  # every fourth layer has full attention


def is_latent(config: Mapping[str, Any]) -> bool:
    """Whether the attention of a model of this config is latent: one cache holds what K and V are computed from."""
    return config.get("model_type") in LATENT_TYPES and bool(config.get("kv_lora_rank"))


def layer_kinds(config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """Returns the kind of each layer where they differ: as stated, or full attention at a fixed interval."""
    if isinstance(stated := config.get("layer_types"), list) and stated:
        return tuple(str(kind) for kind in stated)
    interval = whole_number(config.get("full_attention_interval"), 1, _MAX_SIZE) or _INTERVAL
    return tuple(LINEAR if (i + 1) % interval else FULL for i in range(num_layers))


def layer_dims_from_config(
    where: str, config: Mapping[str, Any], num_layers: int, num_kv_heads: int, head_dim: int
) -> tuple[LayerDims, ...]:
    """Returns what each layer keeps; empty where all keep K and V of the same sizes.

    Raises:
        CheckpointError: a size is none, or the list of kinds is shorter than the model.
    """
    if is_latent(config):
        return (LayerDims(num_kv_heads, head_dim, is_latent=True),) * num_layers
    if config.get("model_type") == "mimo_v2_flash":
        return _window_dims(where, config, num_layers, num_kv_heads, head_dim)
    if config.get("model_type") in MIXER_TYPES:
        return mixer_layer_dims(where, config, num_layers, LayerDims(num_kv_heads, head_dim))
    if config.get("model_type") in GEMMA4_TYPES:
        return _gemma4_dims(where, config, num_layers, num_kv_heads, head_dim)
    if config.get("model_type") not in DELTA_TYPES:
        return ()
    attention, recurrent = LayerDims(num_kv_heads, head_dim), LayerDims(recurrent=_delta_dims(where, config))
    kinds = layer_kinds(config, num_layers)
    if len(kinds) < num_layers or not set(DELTA_KINDS) >= set(kinds):
        expected = f"{num_layers} times {FULL} or {LINEAR}"
        raise CheckpointError(f"{where} (layer_types)", shown(list(kinds)), expected, "Download the file again.")
    return tuple(attention if kind == FULL else recurrent for kind in kinds[:num_layers])


def _window_dims(
    where: str, config: Mapping[str, Any], num_layers: int, num_kv_heads: int, head_dim: int
) -> tuple[LayerDims, ...]:
    stated = config.get("layer_types")
    if not isinstance(stated, list) or len(stated) < num_layers:
        expected = f"the kind of each of {num_layers} layers"
        raise CheckpointError(f"{where} (layer_types)", shown(stated), expected, "Save the config by transformers.")
    return tuple(
        LayerDims(num_kv_heads * (2 if kind == "sliding_attention" else 1), head_dim) for kind in stated[:num_layers]
    )


def gemma4_kinds(where: str, config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """Returns the kind of each layer: as stated, or every sixth with full attention; the last one always has it.

    Args:
        config: flat, of one of `GEMMA4_TYPES`.

    Raises:
        CheckpointError: the list of kinds is too short, or has others.
    """
    stated = config.get("layer_types") or [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(num_layers)]
    if not isinstance(stated, list) or len(stated) < num_layers or not {FULL, SLIDING} >= set(map(str, stated)):
        expected = f"{num_layers} times {FULL} or {SLIDING}"
        raise CheckpointError(f"{where} (layer_types)", shown(stated), expected, "Download the file again.")
    return (*(str(kind) for kind in stated[: num_layers - 1]), FULL)


def _gemma4_dims(
    where: str, config: Mapping[str, Any], num_layers: int, num_kv_heads: int, head_dim: int
) -> tuple[LayerDims, ...]:
    """Full layers have heads of their own; the last `num_kv_shared_layers` read the last own one of their kind."""
    kinds = gemma4_kinds(where, config, num_layers)
    by_layer = config.get("per_layer_config")  # of transformers, by the layer's number
    todo = "Correct it, or download the file again."

    def size(layer: int, name: str, default: int) -> int:
        own = by_layer.get(str(layer), by_layer.get(layer)) if isinstance(by_layer, Mapping) else None
        value = own.get(name, default) if isinstance(own, Mapping) else default
        if (found := whole_number(value, 1, _MAX_SIZE)) is None:
            raise CheckpointError(f"{where} (layer {layer}: {name})", shown(value), "a positive integer", todo)
        return found

    is_stated = isinstance(by_layer, Mapping)
    full_dim = head_dim if is_stated else config.get("global_head_dim") or 512
    own_heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    full_heads = num_kv_heads if is_stated or own_heads is None else own_heads
    num_shared = whole_number(config.get("num_kv_shared_layers") or 0, 0, num_layers - 1)
    if num_shared is None:
        got, expected = shown(config.get("num_kv_shared_layers")), f"0 to {num_layers - 1}, below the layers"
        raise CheckpointError(f"{where} (num_kv_shared_layers)", got, expected, todo)
    first, made = num_layers - num_shared, []
    for i, kind in enumerate(kinds):
        heads, width = (full_heads, full_dim) if kind == FULL else (num_kv_heads, head_dim)
        if i < first:
            made.append(LayerDims(size(i, "num_key_value_heads", heads), size(i, "head_dim", width)))
            continue
        sources = [layer for layer in range(first) if kinds[layer] == kind]
        if not sources:
            got, expected = f"layer {i} of {kind}", f"a layer of that kind among the first {first}"
            raise CheckpointError(f"{where} (num_kv_shared_layers)", got, expected, todo)
        made.append(LayerDims(source=sources[-1]))
    return tuple(made)


def _delta_dims(where: str, config: Mapping[str, Any]) -> RecurrentDims:
    sizes = {}
    for name, default in _DELTA_SIZES.items():
        value = default if config.get(name) is None else config[name]
        if (size := whole_number(value, 1, _MAX_SIZE)) is None:
            todo = "Correct it, or download the file again."
            raise CheckpointError(f"{where} ({name})", shown(value), "a positive integer", todo)
        sizes[name] = size
    key_heads, value_heads, key_dim, value_dim, kernel = sizes.values()
    if value_heads % key_heads:
        got, expected = f"{value_heads} with {key_heads} key heads", "a multiple of the key heads"
        raise CheckpointError(f"{where} (linear_num_value_heads)", got, expected, "Download the file again.")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return RecurrentDims(key_heads, value_heads, key_dim, value_dim, channels, kernel)
