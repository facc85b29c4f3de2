# SPDX-License-Identifier: Apache-2.0
"""What each layer of a decoder keeps of a sequence, from its config alone. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from speccompile.common.json_reader import finite_number, shown, whole_number
from speccompile.core.dims import LayerDims, RecurrentDims
from speccompile.errors import CheckpointError

FULL, LINEAR = "full_attention", "linear_attention"
CONV, PARALLEL = "conv", "hybrid"  # a short convolution; attention and a mixer in one layer
_TODO = "Correct it, or download the file again."
_OLD_KINDS = {"mamba": LINEAR, "attention": FULL}
_PATTERN = {"M": LINEAR, "*": FULL, "E": "moe", "-": "mlp"}  # of Nemotron-H
# What transformers takes where a config of Zamba 2 lacks the kinds.
_ZAMBA_KINDS = "m" + 7 * "mmmmmh" + "mmmmh" + "mmmh" + "mm"


@dataclass(frozen=True)
class _Sizes:
    """The keys of a mixer's sizes in a config, the usual one first, and the default of transformers."""

    heads: tuple[tuple[str, ...], int]
    groups: tuple[tuple[str, ...], int]
    state: tuple[tuple[str, ...], int]
    kernel: tuple[tuple[str, ...], int]
    width: Callable[[Mapping[str, Any]], Any]


def _expanded(key: str) -> Callable[[Mapping[str, Any]], Any]:
    def width(config: Mapping[str, Any]) -> Any:
        factor, hidden = finite_number(config.get(key, 2)), whole_number(config.get("hidden_size"), 1, _MAX_SIZE)
        return None if factor is None or hidden is None or factor > _MAX_SIZE else int(factor * hidden)

    return width


def _falcon_width(config: Mapping[str, Any]) -> Any:
    stated = config.get("mamba_d_ssm", 1024)
    return _expanded("mamba_expand")(config) if stated is None else stated


def _by_heads(heads: str, head_dim: str) -> Callable[[Mapping[str, Any]], Any]:
    def width(config: Mapping[str, Any]) -> Any:
        factors = whole_number(config.get(heads, 128), 1, _MAX_SIZE), whole_number(config.get(head_dim, 64), 1, 2**10)
        return None if None in factors else (factors[0] or 0) * (factors[1] or 0)

    return width


def _bamba_sizes(width: Callable[[Mapping[str, Any]], Any]) -> _Sizes:
    keys = (("mamba_n_heads",), 128), (("mamba_n_groups",), 1), (("mamba_d_state",), 256), (("mamba_d_conv",), 4)
    return _Sizes(*keys, width)


_MIXERS = {
    "bamba": _bamba_sizes(_expanded("mamba_expand")),
    "falcon_h1": _bamba_sizes(_falcon_width),
    "granitemoehybrid": _bamba_sizes(_expanded("mamba_expand")),
    "mamba2": _Sizes(
        (("num_heads",), 128),
        (("n_groups",), 8),
        (("state_size",), 128),
        (("conv_kernel",), 4),
        _by_heads("num_heads", "head_dim"),
    ),
    "nemotron_h": _Sizes(
        (("mamba_num_heads",), 128),
        (("n_groups", "mamba_n_groups"), 8),
        (("ssm_state_size",), 128),
        (("conv_kernel", "mamba_d_conv"), 4),
        _by_heads("mamba_num_heads", "mamba_head_dim"),
    ),
    "zamba2": _Sizes(
        (("n_mamba_heads",), 8),
        (("mamba_ngroups",), 1),
        (("mamba_d_state",), 64),
        (("mamba_d_conv",), 4),
        _expanded("mamba_expand"),
    ),
}
_CONV_TYPES = ("lfm2", "lfm2_moe")
MIXER_TYPES = (*_MIXERS, *_CONV_TYPES)
# Kinds of layers by type; those that keep nothing are only in Nemotron-H.
MIXER_KINDS = {
    **dict.fromkeys(("bamba", "granitemoehybrid"), (FULL, LINEAR)),
    **dict.fromkeys(_CONV_TYPES, (FULL, CONV)),
    "falcon_h1": (PARALLEL,),
    "mamba2": (LINEAR,),
    "nemotron_h": tuple(_PATTERN.values()),
    "zamba2": (LINEAR, PARALLEL),
}


def mixer_kinds(config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """Returns the kind of each layer, as it is stated or as transformers takes it where nothing is."""
    kind = config["model_type"]
    stated = config.get("layers_block_type") or config.get("layer_types")
    if kind == "nemotron_h" and not stated:
        stated = [_PATTERN.get(letter, letter) for letter in str(config.get("hybrid_override_pattern") or "ME*-")]
    if isinstance(stated, list) and kind not in ("bamba", "falcon_h1", "mamba2"):
        return tuple(_OLD_KINDS.get(str(name), str(name)) for name in stated)
    if kind == "falcon_h1":
        return (PARALLEL,) * num_layers
    if kind == "zamba2":
        return tuple(PARALLEL if letter == "h" else LINEAR for letter in _ZAMBA_KINDS)
    own, others = {"bamba": ("attn_layer_indices", LINEAR), "lfm2": ("full_attn_idxs", CONV)}.get(kind, ("", LINEAR))
    indices = config.get(own)
    if kind == "lfm2" and indices is None:
        return (FULL,) * num_layers
    known = set(indices) if isinstance(indices, list) and all(isinstance(i, int) for i in indices) else set()
    return tuple(FULL if i in known else others for i in range(num_layers))


def with_stated_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a flat config with the sizes that some types leave to be computed: layers, head widths, positions."""
    made = dict(config)
    if made.get("model_type") == "nemotron_h":
        made["layers_block_type"] = list(mixer_kinds(made, 0))
        made["num_hidden_layers"] = len(made["layers_block_type"])
        made.pop("hybrid_override_pattern", None)
    if made.get("model_type") == "mamba2":
        made.setdefault("max_position_embeddings", _MAX_SIZE)
    if made.get("model_type") == "zamba2":
        heads, hidden = (whole_number(made.get(k), 1, _MAX_SIZE) for k in ("num_attention_heads", "hidden_size"))
        made["head_dim"] = 2 * (hidden or 0) // (heads or 1)
    return made


def mixer_layer_dims(
    where: str, config: Mapping[str, Any], num_layers: int, attention: LayerDims
) -> tuple[LayerDims, ...]:
    """Returns what each layer keeps. Raises CheckpointError: a wrong size, or too few or unknown kinds of layers."""
    model_type, kinds = config["model_type"], mixer_kinds(config, num_layers)
    if len(kinds) < num_layers or not set(MIXER_KINDS[model_type]) >= set(kinds):
        expected = f"{num_layers} times {' or '.join(MIXER_KINDS[model_type])}"
        raise CheckpointError(f"{where} (layer_types)", shown(list(kinds)), expected, "Download the file again.")
    recurrent = _conv_dims(where, config) if model_type in _CONV_TYPES else _mixer_dims(where, config)
    kept = {
        FULL: attention,
        LINEAR: LayerDims(recurrent=recurrent),
        CONV: LayerDims(recurrent=recurrent),
        PARALLEL: LayerDims(attention.num_kv_heads, attention.head_dim, recurrent),
    }
    return tuple(kept.get(kind, LayerDims()) for kind in kinds[:num_layers])


def _size(where: str, config: Mapping[str, Any], keys: tuple[str, ...], default: int) -> int:
    key = next((k for k in keys if config.get(k) is not None), keys[0])
    value = default if config.get(key) is None else config[key]
    if (size := whole_number(value, 1, _MAX_SIZE)) is None:
        raise CheckpointError(f"{where} ({key})", shown(value), "a positive integer", _TODO)
    return size


def _mixer_dims(where: str, config: Mapping[str, Any]) -> RecurrentDims:
    names = _MIXERS[config["model_type"]]
    heads, groups, state, kernel = (
        _size(where, config, *own) for own in (names.heads, names.groups, names.state, names.kernel)
    )
    if (width := whole_number(names.width(config), 1, 2**30)) is None or width % heads:
        got, expected = shown(names.width(config)), f"a multiple of the {heads} heads ({names.heads[0][0]})"
        raise CheckpointError(f"{where} (width of a Mamba 2 mixer)", got, expected, _TODO)
    if heads % groups:
        got, expected = f"{groups} groups with {heads} heads", "a divisor of the heads"
        raise CheckpointError(f"{where} ({names.groups[0][0]})", got, expected, _TODO)
    return RecurrentDims(groups, heads, state, width // heads, width + 2 * groups * state, kernel)


def _conv_dims(where: str, config: Mapping[str, Any]) -> RecurrentDims:
    hidden, kernel = _size(where, config, ("hidden_size",), 0), _size(where, config, ("conv_L_cache",), 3)
    return RecurrentDims(0, 0, 0, 0, hidden, kernel)


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
