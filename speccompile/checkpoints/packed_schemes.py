# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's `quantization_config` says of its packed weights; see `packed_weights`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from speccompile.common.json_reader import shown, whole_number
from speccompile.errors import CheckpointError

MXFP4 = "mxfp4"  # of experts: transformers reads them, and float32 holds every value
METHODS = ("gptq", "awq", "compressed-tensors", "fp8")
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_TODO = "Download the folder again, or use the unquantised checkpoint."


@dataclass(frozen=True)
class Scheme:
    """What a checkpoint's `quantization_config` says of its weights.

    Args:
        method: one of `METHODS`.
        where: of errors.
        bits: of a level; 0: shapes say it.
        group_size: input columns that share a scale; 0: shapes or `g_idx` say it; -1: all columns.
        zero_offset: is added to stored zero points.
        block: rows and columns that share a scale, where scales are of blocks.
    """

    method: str
    where: str
    bits: int = 0
    group_size: int = 0
    zero_offset: int = 0
    block: tuple[int, int] = (0, 0)


def method_of(config: Mapping[str, Any]) -> str | None:
    """Returns the name of the method that packed a checkpoint's weights; None where they are plain."""
    held = config.get("quantization_config")
    if not held:
        return None
    name = held.get("quant_method") if isinstance(held, Mapping) else None
    return name if isinstance(name, str) else "an unknown method"


def read_scheme(config: Mapping[str, Any], where: str) -> Scheme | None:
    """Returns the scheme of a checkpoint's weights; None where they are plain.

    Args:
        config: the parsed config.json.
        where: the folder, for errors.

    Raises:
        CheckpointError: a method, or a variant of one, that is not read.
    """
    method = method_of(config)
    if method is None or method == MXFP4:
        return None
    where = f"{where} (quantization_config)"
    if method not in METHODS:
        todo = "Use the unquantised checkpoint."
        raise CheckpointError(where, f"weights quantised by {method}", f"one of {', '.join(METHODS)}", todo)
    held: Mapping[str, Any] = config["quantization_config"]
    return _SCHEMES[method](held, Scheme(method, where))


def _gptq_scheme(held: Mapping[str, Any], base: Scheme) -> Scheme:
    bits = _one_of(base, held, "bits", (2, 4, 8), None)
    layout = _one_of(base, held, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    return replace(base, bits=bits, group_size=_group_size(base, held), zero_offset=int(layout == "gptq"))


def _awq_scheme(held: Mapping[str, Any], base: Scheme) -> Scheme:
    bits = _one_of(base, held, "bits", (4,), 4)
    _one_of(base, held, "version", ("gemm", "GEMM"), "gemm")
    return replace(base, bits=bits, group_size=_group_size(base, held))


def _compressed_scheme(held: Mapping[str, Any], base: Scheme) -> Scheme:
    _one_of(base, held, "format", _COMPRESSED, "pack-quantized")
    groups = held.get("config_groups")
    described = list(groups.values()) if isinstance(groups, Mapping) else []
    stated = [group.get("weights") for group in described if isinstance(group, Mapping)]
    weights = [given for given in stated if isinstance(given, Mapping)]
    bits = sorted({_one_of(base, given, "num_bits", (2, 4, 8), 4) for given in weights})
    if len(bits) > 1:
        got = f"weights of {' and '.join(map(str, bits))} bits"
        raise CheckpointError(base.where, got, "one number of bits", "Use the unquantised checkpoint.")
    sizes = {_group_size(base, given) for given in weights if given.get("group_size") is not None}
    blocks = [_block(base, given["block_structure"], "block_structure") for given in weights if _has_block(given)]
    size = sizes.pop() if len(sizes) == 1 else 0
    return replace(base, bits=bits[0] if bits else 4, group_size=size, block=blocks[0] if blocks else (0, 0))


def _has_block(weights: Mapping[str, Any]) -> bool:
    return bool(weights.get("block_structure"))


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
        raise CheckpointError(base.where, f"{field} {shown(value)}", expected, "Use the unquantised checkpoint.")
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
