# SPDX-License-Identifier: Apache-2.0
"""GGUF files: where one is, and its keys and tensors, read within bounds.

Layout, little-endian: magic, u32 version, u64 tensors, u64 keys; keys as (text, u32 type, value); tensors as (text,
u32 dims, u64 dims (fastest first), u32 type, u64 offset); the tensors' bytes, from the next multiple of the alignment.
A text is u64 bytes and UTF-8; an array is u32 type, u64 items, items.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from speccompile.checkpoints.gguf.blocks import BLOCKS, name_of_kind
from speccompile.common.json_reader import shown
from speccompile.errors import CheckpointError

SUFFIX, MAGIC = ".gguf", b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_ITEMS = 1 << 22  # of all arrays together: vocabularies and their merges have some hundred thousand
_MAX_DIMS, _MAX_NAME = 4, 1 << 16
_MAX_SIZE = 1 << 40  # of a dim, so that products stay in bounds
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
_AGAIN = "Download the file again."


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a file."""

    kind: int
    shape: tuple[int, ...]  # slowest dim first: of a weight [out, in]
    start_bytes: int
    file: Path


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of itself."""

    path: Path
    fields: Mapping[str, Any]  # by key; arrays as tuples, unread ones of texts as their number
    tensors: Mapping[str, GgufTensor]
    digest: str  # SHA-256 of the headers' bytes and the files' sizes
    files: tuple[Path, ...] = field(default=())


def split_names(name: str) -> list[str]:
    """Returns the names of all files of a model, of which one is given; [name] where it is in one file."""
    match = _SPLIT.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match[1]}-{number:05d}-of-{match[3]}{match[4]}" for number in range(1, int(match[3]) + 1)]


def read_gguf(path: Path, *, texts: bool = False) -> GgufHeader:
    """Returns the keys and tensors of a model in one or several GGUF files. Raises CheckpointError: see `_Header`."""
    names = split_names(path.name)
    if len(names) > 1 and (missing := [name for name in names if not (path.parent / name).is_file()]):
        got = f"no {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        raise CheckpointError(str(path), got, f"all {len(names)} files of the model", "Download what is missing.")
    paths = [path.with_name(name) for name in names]
    read = [_read_file(part, texts) for part in paths]
    first, tensors = read[0], dict(read[0].tensors)
    if (count := first.fields.get("split.count", 1)) != len(paths) and count:
        expected = "files named NAME-00001-of-0000N.gguf beside each other, one a part"
        raise CheckpointError(str(path), f"one of {count} parts of a model", expected, "Give the parts their names.")
    for number, part in enumerate(read):
        if len(paths) > 1 and part.fields.get("split.no") != number:
            got = f"part {shown(part.fields.get('split.no'))} (split.no)"
            raise CheckpointError(str(part.path), got, f"part {number}", "Give the parts the names that they had.")
        if number and (double := part.tensors.keys() & tensors.keys()):
            raise CheckpointError(str(part.path), f"{min(double)} again", "every tensor in one file", _AGAIN)
        tensors |= part.tensors
    if (total := first.fields.get("split.tensors.count")) is not None and total != len(tensors):
        raise CheckpointError(str(path), f"{len(tensors)} tensors in its files", f"{total}, as it says", _AGAIN)
    digest = hashlib.sha256("".join(part.digest for part in read).encode()).hexdigest()
    return replace(first, tensors=tensors, digest=digest, files=tuple(paths))


def _read_file(path: Path, texts: bool) -> GgufHeader:
    if not path.is_file():
        got = "no regular file" if path.exists() else "no such file"
        raise CheckpointError(str(path), got, "a GGUF file", "Check the path.")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(path, data, texts).read()
    except (OSError, ValueError) as fault:  # mmap refuses an empty file with a ValueError
        raise CheckpointError(str(path), str(fault), "a readable GGUF file", "Check the file.") from fault


class _Header:
    """Reads one file's header.

    Raises:
        CheckpointError: no GGUF file, a header that is cut off, nested or too long, an unknown block type, or a tensor
            outside the file.
    """

    def __init__(self, path: Path, data: mmap.mmap, texts: bool) -> None:
        self.path, self.data, self.texts, self.at, self.num_items = path, data, texts, 0, 0

    def read(self) -> GgufHeader:
        magic, version, num_tensors, num_keys = self.unpack("4sIQQ")
        if magic != MAGIC or version not in _VERSIONS:
            got = f"version {version}" if magic == MAGIC else f"a file that begins with {bytes(magic)!r}"
            todo = "Give a GGUF file; one of another version or byte order is converted by llama.cpp's tools."
            raise CheckpointError(str(self.path), got, "a little-endian GGUF file of version 2 or 3", todo)
        fields: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.text(_MAX_NAME)
            if key in fields:
                raise self.damaged(f"the key {key!r} twice")
            fields[key] = self.value(self.unpack("I")[0], key)
        found: dict[str, GgufTensor] = {}
        for _ in range(num_tensors):
            name = self.text(_MAX_NAME)
            (dims,) = self.unpack("I")
            if name in found or dims > _MAX_DIMS:
                raise self.damaged(f"the tensor {name!r} twice" if name in found else f"{name!r} of {dims} dims")
            *shape, kind, offset = self.unpack(f"{dims}QIQ")
            found[name] = GgufTensor(kind, tuple(reversed(shape)), offset, self.path)
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self.damaged(f"general.alignment {shown(alignment)}")
        start = -(-self.at // alignment) * alignment
        tensors = {name: replace(t, start_bytes=start + t.start_bytes) for name, t in found.items()}
        for name, tensor in tensors.items():
            self.check(name, tensor)
        digest = hashlib.sha256(self.data[: self.at] + struct.pack("<Q", len(self.data))).hexdigest()
        return GgufHeader(self.path, fields, tensors, digest)

    def check(self, name: str, tensor: GgufTensor) -> None:
        if tensor.kind not in BLOCKS:
            known = ", ".join(block.name for block in BLOCKS.values())
            todo = "Use a file of another quantisation; llama.cpp's llama-quantize makes one."
            raise CheckpointError(f"{self.path} ({name})", name_of_kind(tensor.kind), f"one of {known}", todo)
        block = BLOCKS[tensor.kind]
        shape = tensor.shape or (1,)
        if not 0 < min(shape) <= max(shape) <= _MAX_SIZE or shape[-1] % block.size:
            raise self.damaged(f"{name} of {block.name} and shape {list(tensor.shape)}")
        end = tensor.start_bytes + math.prod(tensor.shape) // block.size * block.size_bytes
        if end > len(self.data):
            raise self.damaged(f"{len(self.data)} bytes, where {name} ends at byte {end}")

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
        if kind in _SCALARS:
            return self.unpack(f"{num}{_SCALARS[kind]}")
        if kind != _TEXT:
            raise self.damaged(f"an array of the unknown type {kind} for {key!r}")
        if self.texts:
            return tuple(self.text() for _ in range(num))
        self.skip_texts(num)
        return num

    def skip_texts(self, num: int) -> None:
        data, at, end, size = self.data, self.at, len(self.data), struct.Struct("<Q").unpack_from
        for _ in range(num):
            if at + 8 > end:
                raise self.damaged(f"{end} bytes, which end within the header")
            (size_bytes,) = size(data, at)
            at += 8 + size_bytes
            if at > end:
                raise self.damaged(f"a text of {size_bytes} bytes")
        self.at = at

    def damaged(self, got: str) -> CheckpointError:
        return CheckpointError(str(self.path), got, "a whole GGUF file of a model", _AGAIN)
