# SPDX-License-Identifier: Apache-2.0
"""Headers of safetensors files, checked against the file's length; no tensor is read.

Layout: u64 little-endian header length n, n bytes of JSON, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speccompile.common.json_reader import JsonFault, kind_of, parse_json, shown, whole_number
from speccompile.errors import CheckpointError

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMS, _MAX_ITEMS = 32, 1 << 56  # numpy counts bytes in 63 bits
_ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class TensorHeader:
    """A tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    start_bytes: int = field(default=0, compare=False)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


# Of the names in a model that was saved within a wrapper: torch.compile's, those of parallel training, PEFT's.
_WRAPPERS = ("_orig_mod.", "module.", "base_model.model.")


def wrapper_prefix(keys: Iterable[str]) -> str:
    """Returns the prefix of wrappers that all keys have; empty where there is none."""
    held, prefix = list(keys), ""
    while held and (inner := next((w for w in _WRAPPERS if all(k.startswith(prefix + w) for k in held)), "")):
        prefix += inner
    return prefix


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Returns the tensors of one file by name. Raises CheckpointError: it is truncated, too long, or no safetensors."""
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(str(path), "no regular file", "a safetensors file", "Put the file in its place.")
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 0 < length <= min(size_bytes - 8, _MAX_HEADER_BYTES):
                raise _damaged(path, f"{size_bytes} bytes, of which the header would be {length}")
            header = parse_json(file.read(length))
    except JsonFault as fault:
        raise _damaged(path, f"a header that is {fault}") from fault
    except OSError as fault:
        raise CheckpointError(str(path), str(fault), "a readable file", "Check its permissions.") from fault
    if not isinstance(header, dict):
        raise _damaged(path, "a header that is no JSON object")
    header.pop("__metadata__", None)
    tensors: dict[str, TensorHeader] = {}
    ends: list[tuple[int, int, str]] = []
    for name, fields in header.items():
        tensors[name], end = _parse_tensor(path, name, fields, 8 + length)
        ends.append((tensors[name].start_bytes, 8 + length + end, name))
    expected_bytes = 8 + length
    for start, end, name in sorted(ends):
        if start != expected_bytes:
            how = "within another tensor" if start < expected_bytes else "after a gap"
            raise _damaged(path, f"{name} at byte {start}, {how}", f"it at byte {expected_bytes}, after the one before")
        expected_bytes = end
    if size_bytes != expected_bytes:
        how = "truncated" if size_bytes < expected_bytes else "too long"
        raise _damaged(path, f"{size_bytes} bytes, so the file is {how}", f"{expected_bytes} bytes as its header says")
    return tensors


def _parse_tensor(path: Path, name: str, fields: Any, base_bytes: int) -> tuple[TensorHeader, int]:
    if not isinstance(fields, dict):
        raise _damaged(path, f"{kind_of(fields)} for {name}", "dtype, shape and data_offsets")
    dtype, shape = fields.get("dtype"), _whole_numbers(path, name, fields, "shape", _MAX_DIMS)
    start, end = _whole_numbers(path, name, fields, "data_offsets", 2, least_items=2)
    if not isinstance(dtype, str) or dtype not in _ITEM_BITS:
        raise _damaged(path, f"{name} of the unknown dtype {str(dtype)[:40]}", "a dtype of the format")
    # An empty tensor may not hide a dim that no array can have.
    if (end - start) * 8 != math.prod(shape) * _ITEM_BITS[dtype] or math.prod(d or 1 for d in shape) > _MAX_ITEMS:
        raise _damaged(path, f"{end - start} bytes for {name}", f"{dtype} of shape {list(shape)}")
    return TensorHeader(dtype, shape, base_bytes + start), end


def _whole_numbers(
    path: Path, name: str, fields: Mapping[str, Any], key: str, most_items: int, least_items: int = 0
) -> tuple[int, ...]:
    given = fields.get(key)
    numbers = [whole_number(n, 0, _MAX_ITEMS) for n in given] if isinstance(given, list) else []
    found = tuple(n for n in numbers if n is not None)
    if not isinstance(given, list) or len(found) != len(given) or not least_items <= len(found) <= most_items:
        raise _damaged(path, f"{shown(given)} for {key} of {name}", f"whole numbers, {most_items} of them at most")
    return found


def _damaged(path: Path, got: str, expected: str = "a whole safetensors file") -> CheckpointError:
    return CheckpointError(str(path), got, expected, "The file is damaged: download it again.")
