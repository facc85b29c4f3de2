# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders: find them, read their sizes, check that they are complete. Needs no torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speccompile.checkpoints.config_values import (
    MAX_POSITION,
    POSITION_COLUMNS,
    check_heads,
    check_values,
    extra_keys,
    has_alibi,
    text_config,
    text_names,
)
from speccompile.checkpoints.folders import gguf_weights
from speccompile.checkpoints.layer_sizes import LATENT_WIDTHS, is_latent, layer_dims_from_config, with_stated_sizes
from speccompile.checkpoints.packed_schemes import Scheme, read_scheme
from speccompile.checkpoints.packed_weights import plain_headers
from speccompile.checkpoints.safetensors import TensorHeader, read_header, wrapper_prefix
from speccompile.common.json_reader import finite_number, kind_of, read_json_object, shown, whole_number
from speccompile.core.dims import ModelDims
from speccompile.errors import CheckpointError

# The keys of a size in config.json, the usual one first; older architectures have their own.
_NAMES = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads", "attention_heads", "n_heads"),
    "max_positions": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
}

MAX_SIZE = 2**31 - 1
_MAX_NAME_BYTES = 255
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MODELOPT = "hf_quant_config.json"  # says of ModelOpt's weights what a `quantization_config` would
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.bin", "consolidated.00.pth")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "backbone.embeddings.weight")
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.(\d+)\.(.+)$")
_EVERY_LAYER = re.compile(
    r"(attn|attention|norm|ln_).*\.(weight|bias)$"
)  # parts that every layer has; MLPs may differ by layer
# ModernBERT's embeddings are normalised already; A.X K1's first layer is dense.
_TIED = "shared_transformer."  # of Zamba 2: a block of several layers, stored with the first of them
_NOT_IN_THE_FIRST = ("attn_norm.weight", "post_mlp_layernorm.weight")


def read_config(source: Path) -> dict[str, Any]:
    """Returns the parsed config.json of a checkpoint folder."""
    path = source / "config.json"
    if not path.exists():
        expected = "the config of a transformers checkpoint"
        raise CheckpointError(str(path), "no such file", expected, "Check the folder's path.")
    config = read_json_object(path, CheckpointError, "Download the file again.")
    if not config.get("quantization_config") and (source / _MODELOPT).is_file():
        held = read_json_object(source / _MODELOPT, CheckpointError, "Download the file again.").get("quantization")
        if isinstance(held, dict) and held.get("quant_algo"):
            config["quantization_config"] = {**held, "quant_method": "modelopt"}
    return config


def read_text_config(source: Path) -> dict[str, Any]:
    """Returns the config of the decoder in `source`, flat: of a multimodal checkpoint that of its language model."""
    return with_stated_sizes(text_config(read_config(source)))


def layers_key(config: Mapping[str, Any]) -> str:
    return next(n for n in _NAMES["num_layers"] if config.get(n) is not None)


def _size(path: Path, config: Mapping[str, Any], field: str) -> int:
    value = next((config[n] for n in _NAMES[field] if config.get(n) is not None), None)
    if (size := whole_number(value, 1, MAX_SIZE)) is None:
        todo = "Only causal language models with a flat config are supported."
        if "text_config" in config:
            todo = "This is a multimodal checkpoint of a type that is not supported; use its text model alone."
        expected = f"a positive integer under {' or '.join(_NAMES[field])}"
        raise CheckpointError(str(path / "config.json"), shown(value), expected, todo)
    return size


def stated_size(
    source: Path,
    config: Mapping[str, Any],
    key: str,
    todo: str = "Download the file again.",
    default: int | None = None,
) -> int:
    """Returns a size of 1 to `MAX_SIZE` that a config states under one key. Raises CheckpointError: it is none.

    Args:
        default: where it is missing, null or 0; None: there must be one.
    """
    if (size := whole_number(config.get(key) or default, 1, MAX_SIZE)) is None:
        where = f"{source / 'config.json'} ({key})"
        raise CheckpointError(where, shown(config.get(key)), "a positive integer", todo)
    return size


def optional_size(where: str, config: Mapping[str, Any], keys: Sequence[str], default: int) -> int:
    """Returns a size of 1 to `MAX_SIZE` under the first present one of `keys`, or the default for missing and null.

    Raises:
        CheckpointError: it is none.
    """
    key = next((k for k in keys if config.get(k) is not None), keys[0])
    value = default if config.get(key) is None else config[key]
    if (size := whole_number(value, 1, MAX_SIZE)) is None:
        where, expected = f"{where} ({key})", f"a whole number from 1 to {MAX_SIZE}, or none"
        raise CheckpointError(where, shown(value), expected, "Correct it, or download the file again.")
    return size


def optional_number(where: str, config: Mapping[str, Any], key: str, default: float) -> float:
    """Returns a number of a config, or the default for missing and null. Raises CheckpointError: it is none."""
    value = default if config.get(key) is None else config[key]
    if (number := finite_number(value)) is None:
        todo = "Correct it, or download the file again."
        raise CheckpointError(f"{where} ({key})", shown(value), "a number, or none", todo)
    return number


def read_dims(source: Path) -> ModelDims:
    """Returns the sizes of the decoder in `source`, from its config.json alone; num_params stays 0."""
    config = read_text_config(source)
    check_values(str(source / "config.json"), config)
    if has_alibi(config):
        config = {_NAMES["max_positions"][0]: MAX_POSITION + 1, **config}
    sizes: dict[str, Any] = {field: _size(source, config, field) for field in _NAMES}
    heads, where = sizes["num_heads"], str(source / "config.json")
    kv_heads, has_dim = _kv_heads(where, config, heads), any(config.get(key) for key in ("head_dim", "kv_channels"))
    check_heads(where, (sizes["hidden_size"], heads, kv_heads), has_dim=has_dim or is_latent(config))
    head_dim = optional_size(where, config, ("head_dim", "kv_channels"), sizes["hidden_size"] // heads)
    head_dim += POSITION_COLUMNS if has_alibi(config) else 0
    model_type = "" if config.get("model_type") is None else config["model_type"]
    if not isinstance(model_type, str):
        expected = "a text such as 'llama'"
        raise CheckpointError(f"{where} (model_type)", shown(model_type), expected, "Download the file again.")
    if is_latent(config):
        kv_heads, head_dim = 1, sum(stated_size(source, config, key) for key in LATENT_WIDTHS)
    layer_dims = layer_dims_from_config(where, config, sizes["num_layers"], kv_heads, head_dim)
    return ModelDims(model_type=model_type, num_kv_heads=kv_heads, head_dim=head_dim, layer_dims=layer_dims, **sizes)


def scheme_of(source: Path) -> Scheme | None:
    """Returns how the weights in a folder are packed; None where they are plain, or the folder has no config.json."""
    return read_scheme(read_config(source), str(source)) if (source / "config.json").is_file() else None


def _kv_heads(where: str, config: Mapping[str, Any], heads: int) -> int:
    if config.get("new_decoder_architecture"):
        return optional_size(where, config, ("num_kv_heads",), heads)
    nested = config.get("attn_config")
    if isinstance(nested, Mapping) and nested.get("kv_n_heads") is not None:
        return optional_size(f"{where} (attn_config)", nested, ("kv_n_heads",), heads)
    return optional_size(where, config, ("num_key_value_heads",), 1 if config.get("multi_query") else heads)


def list_tensors(source: Path) -> dict[str, TensorHeader]:
    """Returns the headers of all weights by name, packed ones as they are read; every file must be complete."""
    stored, scheme = list_stored(source), scheme_of(source)
    return stored if scheme is None else plain_headers(scheme, stored)[0]


def list_stored(source: Path) -> dict[str, TensorHeader]:
    """Returns the headers of the tensors in a checkpoint's files by name, without a wrapper's prefix that all have.

    Raises:
        CheckpointError: no safetensors, a missing or damaged shard, an index that does not fit its shards.
    """
    held = list_raw(source)
    prefix = wrapper_prefix(held)
    return {key.removeprefix(prefix): header for key, header in held.items()}


def list_raw(source: Path) -> dict[str, TensorHeader]:
    """Returns the same by the keys as they are stored."""
    if (source / _SINGLE).is_file():
        return read_header(source / _SINGLE)
    if not (source / _INDEX).is_file():
        if (weights := gguf_weights(source)) is not None:
            return {key: weight.header for key, weight in weights.items()}
        pickled = next((n for n in _PICKLED if (source / n).exists()), None)
        todo = "Only safetensors are read, as unpickling runs code: convert with transformers' save_pretrained."
        if len(parts := sorted(source.glob("*.safetensors"))) > 0:
            got, expected = f"{len(parts)} files like {parts[0].name} without an index", f"{_SINGLE} or {_INDEX}"
            todo = f"Download {_INDEX} too, or write the weights anew with transformers' save_pretrained."
            raise CheckpointError(str(source), got, expected, todo)
        if pickled is None:
            todo = "Check the path, or build with random weights."
        raise CheckpointError(str(source), pickled or "no weights", f"{_SINGLE}, {_INDEX} or a GGUF file", todo)
    tensors: dict[str, TensorHeader] = {}
    by_shard: dict[str, list[str]] = defaultdict(list)
    for key, shard in read_index(source / _INDEX).items():
        by_shard[shard].append(key)
    for shard, keys in sorted(by_shard.items()):
        if not (source / shard).is_file():
            raise CheckpointError(
                str(source / shard), "no such file", f"a shard that {_INDEX} lists", "Download the folder again."
            )
        held = read_header(source / shard)
        missing = sorted(set(keys) - held.keys())
        if missing:
            expected = f"the {len(keys)} weights that {_INDEX} assigns to it"
            raise CheckpointError(
                str(source / shard), f"no {missing[0]} ({len(missing)} missing)", expected, "Download the folder again."
            )
        tensors |= {k: held[k] for k in keys}
    return tensors


def list_text_tensors(source: Path) -> dict[str, TensorHeader]:
    """Returns the headers of the decoder's (language model's) weights by their names in it; see `list_tensors`."""
    tensors = list_tensors(source)
    return {name: tensors[key] for name, key in text_names(tensors).items()}


def read_index(path: Path) -> dict[str, str]:
    """Returns the file of each weight from an index of shards. Raises CheckpointError: it names no such files."""
    todo = "Download the file again."
    found = read_json_object(path, CheckpointError, todo).get("weight_map")
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} (weight_map)", kind_of(found), "an object: file by weight", todo)
    if not found or not all(_is_file_name(shard) for shard in found.values()):
        raise CheckpointError(str(path), "a weight_map that is empty or leaves the folder", "weights by shard", todo)
    return found


def _is_file_name(value: Any) -> bool:
    is_name = isinstance(value, str) and "\0" not in value and Path(value).name == value
    return is_name and len(value.encode()) <= _MAX_NAME_BYTES


def count_params(source: Path) -> int:
    """Counts the parameters in the checkpoint's files; 0 when it has no weights in safetensors."""
    if not (source / _SINGLE).is_file() and not (source / _INDEX).is_file():
        return 0
    return sum(t.size for t in list_tensors(source).values())


def check_checkpoint(source: Path, dims: ModelDims) -> None:
    """Checks from the files' headers that the weights are complete and belong to the config.

    transformers checks exact names and shapes when it loads them. Drafting modules are no part: see `extra_modules`.
    """
    stored = list_text_tensors(source)
    extra = extra_keys(stored, dims.num_layers)
    tensors = {name: tensor for name, tensor in stored.items() if name not in extra}
    for name, tensor in tensors.items():
        if tensor.dtype.startswith("F8") or tensor.dtype in ("F4", "F6_E2M3", "F6_E3M2"):
            raise CheckpointError(
                str(source), f"{name} in {tensor.dtype}", "F32, F16 or BF16 weights", "Use the unquantised checkpoint."
            )
        if name.endswith(EMBEDDINGS) and tensor.shape[:1] != (dims.vocab_size,):
            raise CheckpointError(
                str(source),
                f"{name} of shape {list(tensor.shape)}",
                f"{dims.vocab_size} rows, the vocab_size of config.json",
                "Config and weights are of different models: fetch the folder again.",
            )
        scales = name.removesuffix("_blocks") + "_scales"  # of MXFP4: one for each group of 32 values
        if name.endswith("_blocks") and (scales not in tensors or tensors[scales].shape != tensor.shape[:-1]):
            got = f"{scales} of shape {list(tensors[scales].shape)}" if scales in tensors else f"no {scales}"
            expected = f"one of shape {list(tensor.shape[:-1])}, as {name} has groups"
            raise CheckpointError(str(source), got, expected, "Fetch the folder again.")
    _check_layers(source, tensors, dims)


def _check_layers(source: Path, tensors: Mapping[str, TensorHeader], dims: ModelDims) -> None:
    parts: dict[int, set[str]] = defaultdict(set)
    for name in tensors:
        if (match := _LAYER.search(name)) is not None:
            parts[int(match[1])].add(match[2])
    todo = "The download is incomplete or config.json is another model's: fetch the folder again."
    if set(parts) != set(range(dims.num_layers)):
        missing = sorted(set(range(dims.num_layers)) - set(parts))
        got = f"no weights of layer {missing[0]}" if missing else f"weights of layer {max(parts)}"
        raise CheckpointError(str(source), got, f"layers 0 to {dims.num_layers - 1}", todo)
    # Layers that keep the same have the same parts.
    for kind in set(dims.per_layer):
        alike = {layer: held for layer, held in parts.items() if dims.per_layer[layer] == kind}
        _compare_layers(source, alike, todo)


def _compare_layers(source: Path, parts: Mapping[int, set[str]], todo: str) -> None:
    everywhere = {p for held in parts.values() for p in held if _EVERY_LAYER.search(p) and not p.startswith(_TIED)}
    for layer, held in sorted(parts.items()):
        for part in sorted(everywhere - held):
            if layer == 0 and part in _NOT_IN_THE_FIRST:
                continue
            if all(part in other for index, other in parts.items() if index != layer) and len(parts) > 1:
                raise CheckpointError(
                    str(source), f"layer {layer} without {part}", "the weights that every other layer has", todo
                )


def special_tokens(source: Path) -> tuple[list[int], int | None]:
    """Returns (end-of-sequence ids, beginning-of-sequence id) of generation_config.json, else of config.json.

    Raises:
        CheckpointError: one of them is not a JSON object, or has other values than token ids there.
    """
    eos: list[int] = []
    bos: list[int] = []
    for name in ("config.json", "generation_config.json"):
        path = source / name
        if path.exists():
            data = text_config(read_json_object(path, CheckpointError, "Download the file again."))
            eos = eos if data.get("eos_token_id") is None else token_ids(path, data, "eos_token_id")
            bos = bos if data.get("bos_token_id") is None else token_ids(path, data, "bos_token_id")
    return eos, bos[0] if bos else None


def token_ids(path: Path, config: Mapping[str, Any], key: str) -> list[int]:
    """Returns the token ids of a key of a config, given as one number or as a list; [] for null."""
    given = config.get(key)
    rows = given if isinstance(given, list) else [] if given is None else [given]
    ids = [whole_number(row, 0, MAX_SIZE) for row in rows]
    found = [i for i in ids if i is not None]
    if len(found) != len(ids):
        expected = "a token id, or a list of them"
        raise CheckpointError(f"{path} ({key})", shown(given), expected, "Correct it, or download the file again.")
    return found
