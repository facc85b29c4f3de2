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
    """Returns the kind of each layer of a hybrid: as stated, or full attention at a fixed interval.

    Args:
        config: flat, of one of `DELTA_TYPES`.
        num_layers: how many.
    """
    if isinstance(stated := config.get("layer_types"), list) and stated:
        return tuple(str(kind) for kind in stated)
    interval = whole_number(config.get("full_attention_interval"), 1, _MAX_SIZE) or _INTERVAL
    return tuple(LINEAR if (i + 1) % interval else FULL for i in range(num_layers))


def layer_dims_from_config(
    where: str, config: Mapping[str, Any], num_layers: int, num_kv_heads: int, head_dim: int
) -> tuple[LayerDims, ...]:
    """Returns what each layer keeps; empty where all keep K and V of the same sizes.

    Args:
        where: the config's file, for messages.
        config: flat.
        num_layers: how many.
        num_kv_heads: of the attention layers.
        head_dim: of the attention layers.

    Raises:
        CheckpointError: a size is none, or the list of kinds is shorter than the model.
    """
    if is_latent(config):
        return (LayerDims(num_kv_heads, head_dim, is_latent=True),) * num_layers
    if config.get("model_type") == "mimo_v2_flash":
        return _window_dims(where, config, num_layers, num_kv_heads, head_dim)
    if config.get("model_type") in MIXER_TYPES:
        return mixer_layer_dims(where, config, num_layers, LayerDims(num_kv_heads, head_dim))
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
    """Layers with a window have twice the KV heads; V is narrower than K, and its rows are filled up."""
    stated = config.get("layer_types")
    if not isinstance(stated, list) or len(stated) < num_layers:
        expected = f"the kind of each of {num_layers} layers"
        raise CheckpointError(f"{where} (layer_types)", shown(stated), expected, "Save the config by transformers.")
    return tuple(
        LayerDims(num_kv_heads * (2 if kind == "sliding_attention" else 1), head_dim) for kind in stated[:num_layers]
    )


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
