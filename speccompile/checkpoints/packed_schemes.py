# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's `quantization_config` says of its packed weights; see `packed_weights`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from speccompile.common.json_reader import shown, whole_number
from speccompile.errors import CheckpointError, SpecCompileError

MXFP4 = "mxfp4"  # of experts: transformers reads them, and float32 holds every value
METHODS = ("gptq", "awq", "compressed-tensors", "fp8")
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_TODO = "Download the folder again, or use the unquantised checkpoint."
_PLAIN = "Use the unquantised checkpoint."
# Fields of compressed-tensors: those read, and those of activations, of caches and of how levels were found.
_COMPRESSED_FIELDS = (
    "quant_method", "format", "config_groups", "sparsity_config", "transform_config",
    "ignore", "kv_cache_scheme", "quantization_status", "global_compression_ratio", "version", "run_compressed",
)  # fmt: skip
_GROUP_FIELDS = ("weights", "format", "targets", "input_activations", "output_activations")
_WEIGHT_FIELDS = (
    "num_bits", "group_size", "block_structure", "type", "symmetric", "strategy",
    "dynamic", "actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype",
)  # fmt: skip
_OFFLINE = ("weight_input", "weight_output")  # of a transform: it is in the stored weights already


@dataclass(frozen=True)
class Scheme:
    """What a checkpoint's `quantization_config` says of its weights."""

    method: str
    where: str
    bits: int = 0  # of a level; 0: shapes say it
    group_size: int = 0  # input columns that share a scale; 0: shapes or `g_idx` say it; -1: all columns
    zero_offset: int = 0
    block: tuple[int, int] = (0, 0)  # rows and columns that share a scale, where scales are of blocks


def method_of(config: Mapping[str, Any]) -> str | None:
    """Returns the name of the method that packed a checkpoint's weights; None where they are plain."""
    held = config.get("quantization_config")
    if not held:
        return None
    given: Mapping[str, Any] = held if isinstance(held, Mapping) else {}
    name = given.get("quant_method")
    if name is None and any(key.startswith(("load_in_", "bnb_")) for key in given):
        name = "bitsandbytes"  # whose older files do not name it
    if name == "modelopt" and isinstance(algorithm := given.get("quant_algo"), str):
        return f"ModelOpt ({algorithm})"
    return name if isinstance(name, str) else "an unknown method"


def error_of_method(where: str, method: str, kind: type[SpecCompileError] = CheckpointError) -> SpecCompileError:
    expected = f"plain weights, or packed by {', '.join((*METHODS, MXFP4))} (docs/reference/families.md)"
    return kind(where, f"weights quantised by {method}", expected, _PLAIN)


def read_scheme(config: Mapping[str, Any], where: str) -> Scheme | None:
    """Returns the scheme of a checkpoint's weights; None where they are plain."""
    method = method_of(config)
    if method is None or method == MXFP4:
        return None
    where = f"{where} (quantization_config)"
    if method not in METHODS:
        raise error_of_method(where, method)
    held: Mapping[str, Any] = config["quantization_config"]
    return _SCHEMES[method](held, Scheme(method, where))


def has_integers(config: Mapping[str, Any]) -> bool:
    """Returns whether a config says of weights that they are packed integers."""
    method = method_of(config)
    if method != "compressed-tensors":
        return method in ("gptq", "awq")
    groups = _mapping(_mapping(config["quantization_config"]).get("config_groups")).values()
    return any(_mapping(_mapping(group).get("weights")).get("type", "int") == "int" for group in groups)


def _gptq_scheme(held: Mapping[str, Any], base: Scheme) -> Scheme:
    bits = _one_of(base, held, "bits", (2, 4, 8), None)
    layout = _one_of(base, held, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    rules = held.get("dynamic") or {}
    # A rule that begins with "-:" leaves layers as they are.
    if others := [rule for rule in rules if not (isinstance(rule, str) and rule.startswith("-:"))]:
        got = f"dynamic, which quantises layers in other ways ({shown(others[0])})"
        raise CheckpointError(base.where, got, "bits and group_size that hold for every quantised layer", _PLAIN)
    _refuse_others(base, "", {field: held.get(field) for field in ("adapter", "is_marlin_format")}, ())
    return replace(base, bits=bits, group_size=_group_size(base, held), zero_offset=int(layout == "gptq"))


def _awq_scheme(held: Mapping[str, Any], base: Scheme) -> Scheme:
    bits = _one_of(base, held, "bits", (4,), 4)
    _one_of(base, held, "version", ("gemm", "GEMM"), "gemm")
    return replace(base, bits=bits, group_size=_group_size(base, held))


def _compressed_scheme(held: Mapping[str, Any], base: Scheme) -> Scheme:
    _one_of(base, held, "format", _COMPRESSED, "pack-quantized")
    _refuse_others(base, "", held, _COMPRESSED_FIELDS)
    sparsity = _mapping(held.get("sparsity_config"))
    _one_of(base, sparsity, "format", ("dense",), "dense")
    _check_transforms(base, _mapping(held.get("transform_config")))
    groups = [group for group in _mapping(held.get("config_groups")).values() if isinstance(group, Mapping)]
    for group in groups:
        _refuse_others(base, "config_groups.", group, _GROUP_FIELDS)
        _one_of(base, group, "format", _COMPRESSED, "pack-quantized")
    weights = [given for group in groups if (given := _mapping(group.get("weights")))]
    for given in weights:
        _refuse_others(base, "weights.", given, _WEIGHT_FIELDS)
    bits = sorted({_one_of(base, given, "num_bits", (2, 4, 8), 4) for given in weights})
    if len(bits) > 1:
        got = f"weights of {' and '.join(map(str, bits))} bits"
        raise CheckpointError(base.where, got, "one number of bits", _PLAIN)
    # Where layers differ, the shapes of their scales say it.
    sizes = {_group_size(base, given) if given.get("group_size") is not None else 0 for given in weights}
    blocks = {_block(base, b, "block_structure") for given in weights if (b := given.get("block_structure"))}
    if len(blocks) > 1:
        raise CheckpointError(base.where, f"blocks of {len(blocks)} sizes", "blocks of one size", _PLAIN)
    size = sizes.pop() if len(sizes) == 1 else 0
    return replace(base, bits=bits[0] if bits else 4, group_size=size, block=blocks.pop() if blocks else (0, 0))


def _check_transforms(base: Scheme, held: Mapping[str, Any]) -> None:
    _refuse_others(base, "transform_config.", held, ("config_groups",))
    for name, group in _mapping(held.get("config_groups")).items():
        applied = group.get("apply") if isinstance(group, Mapping) else None
        locations = [_mapping(a).get("location") for a in applied] if isinstance(applied, list) else [None]
        if online := [location for location in locations if location not in _OFFLINE]:
            got = f"transform_config with {shown(name)} applied to {shown(online[0])}, at every step"
            expected = f"transforms of {' and '.join(_OFFLINE)} alone, which the stored weights hold"
            raise CheckpointError(base.where, got, expected, _PLAIN)


def _refuse_others(base: Scheme, path: str, held: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for field, value in held.items():
        if field not in known and value not in (None, False, {}, []):
            raise CheckpointError(base.where, f"{path}{field} {shown(value)}", "fields that are read", _PLAIN)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _fp8_scheme(held: Mapping[str, Any], base: Scheme) -> Scheme:
    block = held.get("weight_block_size")
    return replace(base, block=_block(base, block, "weight_block_size")) if block else base


_SCHEMES: dict[str, Callable[[Mapping[str, Any], Scheme], Scheme]] = {
    "gptq": _gptq_scheme,
    "awq": _awq_scheme,
    "compressed-tensors": _compressed_scheme,
    "fp8": _fp8_scheme,
}


def _one_of(base: Scheme, held: Mapping[str, Any], field: str, known: tuple[Any, ...], default: Any) -> Any:
    value = held.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or value not in known:
        expected = f"{field} {' or '.join(str(v) for v in dict.fromkeys(known))}"
        raise CheckpointError(base.where, f"{field} {shown(value)}", expected, _PLAIN)
    return value


def _group_size(base: Scheme, held: Mapping[str, Any]) -> int:
    value = held.get("group_size", -1)
    if value == -1 or (size := whole_number(value, 1, 1 << 20)) is None:
        if value != -1:
            expected = "a number of columns, or -1 for all"
            raise CheckpointError(base.where, f"group_size {shown(value)}", expected, _TODO)
        return -1
    return size


def _block(base: Scheme, value: Any, field: str) -> tuple[int, int]:
    sizes = value if isinstance(value, list | tuple) else ()
    numbers = [whole_number(size, 1, 1 << 20) for size in sizes]
    if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
        raise CheckpointError(base.where, f"{field} {shown(value)}", "two positive integers", _TODO)
    return numbers[0], numbers[1]
