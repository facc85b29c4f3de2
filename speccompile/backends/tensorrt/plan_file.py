# SPDX-License-Identifier: Apache-2.0
"""What a plan holds, read from its bytes: nothing in it is deserialised, so nothing in it can run.

The layout is not documented. What is read here was found in plans of TensorRT-RTX 1.7.1 and is recognised by its
marks: a header with the plan's size and the builder's version, a table of sections (engine, weights), records of
tensors and plugins, and the text of the compiled graphs. A plan of another layout gives fewer facts, never wrong ones:
what is not recognised is None or empty.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from speccompile.errors import BundleError

MAGIC = b"vtrt"
_SECTION_TABLE, _MAX_SECTIONS = 0x40, 16
_SECTION = struct.Struct("<4s4xQQ")
_ENGINE, _WEIGHTS = b"ENGN"[::-1], b"WGHT"[::-1]
_DTYPES = ("float32", "float16", "int8", "int32", "bool", "uint8", "float8", "bfloat16", "int64", "int4")
_PROFILE = re.compile(r" \[profile (\d+)\]$")

# A field is its number, 80 01 00, and a value; the value is 07 80 01 00 and an int32, or a list: 01 80, the type of its
# items, 80 01 00, a count and the items. Type 09 is int64, 0c a character.
_INT32 = b"\x07\x80\x01\x00"
_TEXT = b"\x01\x80\x0c\x80\x01\x00"
_INT64S = b"\x01\x80\x09\x80\x01\x00"
_BEHIND_NAME = b"\x1c\x80\x01\x00\x03\x80\x01\x00"
_PLUGIN, _STRING = b"\x5b\x80\x01\x00", b"\x13\x80\x01\x00"
_DTYPE, _DIMS, _SIDE = (number + b"\x80\x01\x00" + _INT32 for number in (b"\x0d", b"\x59", b"\x28"))
_MAX_NAME, _NEAR = 512, 256
_GRAPH, _MAIN, _SHAPES, _ANY_ACCELERATOR = b"header {\n", b"\nmain {\n", b"\nshape_main {", b"accelerators={*}"
# Steps of a compiled graph that are no kernels.
_NO_KERNELS = frozenset({"signal", "wait", "shape_call", "assert"})
_STEP = re.compile(rb"^ {1,2}(?P<kind>[a-z_]+)=\{ name=\"?(?P<name>[^\"\s]+)", re.MULTILINE)
_REGION = re.compile(rb"region = \{ name=(?P<name>\S+) size=(?P<size>\d+)[^}]*?place=accelerator")


@dataclass(frozen=True)
class PlanTensor:
    """An input or output of a plan.

    Args:
        name: its name.
        dims: -1 is a dynamic dim.
        dtype: numpy name.
        is_output: which side it is on.
    """

    name: str
    dims: tuple[int, ...]
    dtype: str
    is_output: bool


@dataclass(frozen=True)
class PlanPlugin:
    """A plugin that a plan asks for when it is loaded.

    Args:
        name, version, namespace: how its creator is found.
        num_layers: layers of it in one profile.
    """

    name: str
    version: str
    namespace: str
    num_layers: int


@dataclass(frozen=True)
class PlanFacts:
    """What was recognised in a plan.

    Args:
        size_bytes: of the file.
        version: of the TensorRT that built it, e.g. "1.7.1.116".
        sections: bytes by section.
        weights_bytes: of the section of weights; None where there is none.
        accelerators: GPU architectures named in the compiled graphs.
        tensors: inputs, then outputs, each by name.
        num_profiles: optimization profiles.
        plugins: of its layers, by name.
        kernels: how often each kernel stands in each compiled graph; plugins cut a profile into several graphs.
        scratch_bytes: device memory of the activations of each compiled graph, at its profile's largest sizes.
    """

    size_bytes: int
    version: str
    sections: dict[str, int]
    weights_bytes: int | None
    accelerators: tuple[str, ...]
    tensors: tuple[PlanTensor, ...]
    num_profiles: int
    plugins: tuple[PlanPlugin, ...]
    kernels: tuple[dict[str, int], ...]
    scratch_bytes: tuple[int, ...]

    def json_from_facts(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return asdict(self)


def read_plan(path: Path) -> PlanFacts:
    """Read what can be recognised.

    Raises:
        BundleError: no plan, or one that was cut short.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, data)
    except (OSError, ValueError) as fault:  # an empty file cannot be mapped: ValueError
        raise BundleError(str(path), str(fault), "a TensorRT plan", "Check the path.") from fault


def _read(path: Path, data: mmap.mmap) -> PlanFacts:
    if data[:4] != MAGIC or len(data) < _SECTION_TABLE:
        raise BundleError(str(path), f"a file that begins with {data[:4]!r}", "a TensorRT plan", "Check the path.")
    (size,) = struct.unpack_from("<Q", data, 0x10)
    if size != len(data):
        raise BundleError(str(path), f"{len(data)} bytes", f"{size} bytes, as its header says", "Build it again.")
    sections = _read_sections(data)
    # Weights look like anything: only what lies before them is searched.
    start, length = sections.get(_ENGINE, (0, len(data)))
    engine = data[start : start + length]
    tensors = _read_tensors(engine)
    graphs = _read_graphs(engine)
    num_profiles = 1 + max([int(m[1]) for t in tensors if (m := _PROFILE.search(t.name))], default=0)
    return PlanFacts(
        size_bytes=len(data),
        version=".".join(str(n) for n in data[0x18:0x1C]),
        sections={tag[::-1].decode(): length for tag, (_, length) in sections.items()},
        weights_bytes=sections[_WEIGHTS][1] if _WEIGHTS in sections else None,
        accelerators=_read_accelerators(graphs),
        tensors=_merge_profiles(tensors),
        num_profiles=num_profiles,
        plugins=_read_plugins(engine, num_profiles),
        kernels=tuple(_count_kernels(g) for g in graphs),
        scratch_bytes=tuple(_sum_regions(g) for g in graphs),
    )


def _read_sections(data: mmap.mmap) -> dict[bytes, tuple[int, int]]:
    """(start, bytes) by tag, in the file's order."""
    found: dict[bytes, tuple[int, int]] = {}
    for index in range(_MAX_SECTIONS):
        tag, start, length = _SECTION.unpack_from(data, _SECTION_TABLE + index * _SECTION.size)
        if not tag.isalpha() or not tag.isupper() or start + length > len(data):
            break
        found[tag] = (start, length)
    return found


def _read_tensors(engine: bytes) -> list[PlanTensor]:
    """One record a profile and tensor; the names of all profiles but the first say which."""
    found, place = [], engine.find(_BEHIND_NAME)
    while place >= 0:
        tensor = _read_tensor(engine, place)
        if tensor is not None:
            found.append(tensor)
        place = engine.find(_BEHIND_NAME, place + 1)
    return found


def _read_tensor(engine: bytes, place: int) -> PlanTensor | None:
    """The record whose name ends at `place`; None where it is something else."""
    text = engine.rfind(_TEXT, max(place - _MAX_NAME, 0), place) + len(_TEXT)
    name = engine[text + 8 : place]
    dtype = place + len(_BEHIND_NAME) + 1
    dims = engine.find(_DIMS, dtype, dtype + _NEAR) + len(_DIMS)
    side = engine.find(_SIDE, dims, dims + _NEAR) + len(_SIDE)
    is_record = text >= len(_TEXT) and len(name) == _int64(engine, text) and engine.startswith(_DTYPE, dtype)
    if not is_record or dims < dtype or side < dims or not engine.startswith(_INT64S, dims + 4):
        return None
    rank = _int32(engine, dims)
    first = dims + 4 + len(_INT64S) + 8
    sizes = tuple(max(_int64(engine, first + 8 * i), -1) for i in range(rank))
    number = _int32(engine, dtype + len(_DTYPE))
    known = _DTYPES[number] if 0 <= number < len(_DTYPES) else f"type {number}"
    return PlanTensor(name.decode(errors="replace"), sizes, known, bool(_int32(engine, side)))


def _merge_profiles(tensors: list[PlanTensor]) -> tuple[PlanTensor, ...]:
    """One tensor a name: a dim is static where it is the same in every profile."""
    merged: dict[str, PlanTensor] = {}
    for tensor in tensors:
        name = _PROFILE.sub("", tensor.name)
        first = merged.setdefault(name, replace(tensor, name=name))
        dims = tuple(a if a == b else -1 for a, b in zip(first.dims, tensor.dims, strict=False))
        merged[name] = replace(first, dims=dims)
    return tuple(sorted(merged.values(), key=lambda t: (t.is_output, t.name)))


def _read_graphs(engine: bytes) -> list[bytes]:
    """The texts of the compiled graphs; those of single kernels are for any accelerator."""
    found, place = [], engine.find(_GRAPH)
    while place >= 0:
        end = engine.find(b"\0", place)
        text = engine[place : end if end >= 0 else len(engine)]
        if _MAIN in text and _ANY_ACCELERATOR not in text:
            found.append(text)
        place = engine.find(_GRAPH, place + 1)
    return found


def _int32(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 4], "little", signed=True)


def _int64(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 8], "little", signed=True)


def _read_plugins(engine: bytes, num_profiles: int) -> tuple[PlanPlugin, ...]:
    """The plugins of all layers. A layer has a record in every profile: name, version and namespace."""
    counts: Counter[tuple[str, str, str]] = Counter()
    mark = _PLUGIN + _STRING
    place = engine.find(mark)
    while place >= 0:
        texts: list[str] = []
        at = place + len(_PLUGIN)
        while len(texts) < 3 and (read := _read_string(engine, at)) is not None:
            text, at = read
            texts.append(text)
        if len(texts) == 3:
            counts[texts[0], texts[1], texts[2]] += 1
        place = engine.find(mark, place + 1)
    rows = sorted(counts.items())
    return tuple(PlanPlugin(*texts, num_layers=-(-count // num_profiles)) for texts, count in rows)


def _read_string(engine: bytes, place: int) -> tuple[str, int] | None:
    """The string field at `place` and where it ends; None where there is none."""
    length = _int64(engine, place + len(_STRING))
    first = place + len(_STRING) + 8 + len(_TEXT) + 8
    is_string = engine.startswith(_STRING, place) and engine.startswith(_TEXT, first - 8 - len(_TEXT))
    if not is_string or not 0 <= length <= _MAX_NAME or _int64(engine, first - 8) != length:
        return None
    return engine[first : first + length].decode(errors="replace"), first + length


def _read_accelerators(graphs: list[bytes]) -> tuple[str, ...]:
    names = {name for g in graphs for text in re.findall(rb"accelerators=\{([^}]*)\}", g) for name in text.split()}
    return tuple(sorted(name.decode() for name in names))


def _count_kernels(graph: bytes) -> dict[str, int]:
    """Kernels by name; one that the runtime chooses, as for matrix products, has its kind for a name."""
    counts: Counter[str] = Counter()
    end = graph.find(_SHAPES)
    for step in _STEP.finditer(graph, graph.find(_MAIN), end if end >= 0 else len(graph)):
        kind, name = step["kind"].decode(), step["name"].decode()
        if kind not in _NO_KERNELS:
            counts[name if kind in ("function", "runtime_fusion") else kind] += 1
    return dict(counts.most_common())


def _sum_regions(graph: bytes) -> int:
    regions = ((r["name"], int(r["size"])) for r in _REGION.finditer(graph))
    return sum(size for name, size in regions if name.startswith(b"devmem"))
