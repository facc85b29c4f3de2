# SPDX-License-Identifier: Apache-2.0
"""GGUF files: where one is, and its keys and tensors, read within bounds before any other reader opens it.

Layout, little-endian: magic, u32 version, u64 tensors, u64 keys; keys as (text, u32 type, value); tensors as (text,
u32 dims, u64 dims, u32 type, u64 offset). A text is u64 bytes and UTF-8; an array is u32 type, u64 items, items.
"""

from __future__ import annotations

import mmap
import shlex
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.errors import CheckpointError

_SUFFIX, _MAGIC = ".gguf", b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_ITEMS = 1 << 22  # of all arrays together: vocabularies and their merges have some hundred thousand
_MAX_DIMS, _MAX_NAME = 4, 1 << 16


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of itself.

    Args:
        fields: values by key; of an array its number of items alone.
        tensors: number of the block type by name.
    """

    fields: dict[str, Any]
    tensors: dict[str, int]


def find_gguf(path: Path) -> Path | None:
    """Returns `path` where it is a GGUF file by its name or its first bytes, or the first one in this folder."""
    if path.is_dir():
        return min((f for f in path.iterdir() if f.name.lower().endswith(_SUFFIX)), default=None)
    if path.name.lower().endswith(_SUFFIX):
        return path
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return path if file.read(len(_MAGIC)) == _MAGIC else None


def todo_for_gguf(file: Path) -> str:
    """Returns what to do with a GGUF file where a checkpoint is expected."""
    return f"Make a checkpoint of the GGUF file first: speccompile convert {shlex.quote(str(file))} -o FOLDER."


def read_gguf_header(path: Path) -> GgufHeader:
    """Returns the keys and the tensors' names of a GGUF file.

    Raises:
        CheckpointError: no regular file, no GGUF file, a header that is cut off, nested or unreasonably long.
    """
    if not path.is_file():
        got = "no regular file" if path.exists() else "no such file"
        raise CheckpointError(str(path), got, "a GGUF file", "Check the path.")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(str(path), data).read()
    except (OSError, ValueError) as fault:  # mmap refuses an empty file with a ValueError
        raise CheckpointError(str(path), str(fault), "a readable GGUF file", "Check the file.") from fault


class _Header:
    def __init__(self, where: str, data: mmap.mmap) -> None:
        self.where, self.data, self.at, self.num_items = where, data, 0, 0

    def read(self) -> GgufHeader:
        magic, version, num_tensors, num_keys = self.unpack("4sIQQ")
        if magic != _MAGIC or version not in _VERSIONS:
            got = f"version {version}" if magic == _MAGIC else f"a file that begins with {bytes(magic)!r}"
            todo = "Give a GGUF file; one of another version or byte order is converted by llama.cpp's tools."
            raise CheckpointError(self.where, got, "a little-endian GGUF file of version 2 or 3", todo)
        fields: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.text(_MAX_NAME)
            if key in fields:
                raise self.damaged(f"the key {key!r} twice")
            fields[key] = self.value(self.unpack("I")[0], key)
        tensors: dict[str, int] = {}
        for _ in range(num_tensors):
            name = self.text(_MAX_NAME)
            (dims,) = self.unpack("I")
            if name in tensors or dims > _MAX_DIMS:
                raise self.damaged(f"the tensor {name!r} twice" if name in tensors else f"{name!r} of {dims} dims")
            *_, tensors[name], _ = self.unpack(f"{dims}QIQ")
        return GgufHeader(fields, tensors)

    def unpack(self, form: str) -> tuple[Any, ...]:
        size_bytes = struct.calcsize(f"<{form}")
        if size_bytes > len(self.data) - self.at:
            raise self.damaged(f"{len(self.data)} bytes, which end within the header")
        self.at += size_bytes
        return struct.unpack_from(f"<{form}", self.data, self.at - size_bytes)

    def text(self, max_bytes: int | None = None) -> str:
        (size_bytes,) = self.unpack("Q")
        if size_bytes > min(len(self.data) - self.at, max_bytes or len(self.data)):
            raise self.damaged(f"a text of {size_bytes} bytes")
        self.at += size_bytes
        return self.data[self.at - size_bytes : self.at].decode(errors="replace")

    def value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])[0]
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise self.damaged(f"a value of the unknown type {kind} for {key!r}")
        kind, num = self.unpack("IQ")
        self.num_items += num
        if kind == _ARRAY or self.num_items > _MAX_ITEMS:
            raise self.damaged(f"arrays in an array for {key!r}" if kind == _ARRAY else f"{num} items for {key!r}")
        for _ in range(num):
            self.value(kind, key)
        return num

    def damaged(self, got: str) -> CheckpointError:
        return CheckpointError(self.where, got, "a whole GGUF file of a model", "Download the file again.")
