# SPDX-License-Identifier: Apache-2.0
"""The kernels as a CPU library (plugins/host), loaded with ctypes and fed with numpy arrays."""

import ctypes
import functools
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from speccompile.backends.tensorrt.launches import (
    DTYPES,
    SpecVerifyArgs,
    rollback_args,
    rollback_launches,
    rollback_vector_bytes,
    verify_launches,
    verify_workspace_bytes,
)
from tests import store

PLUGINS = Path(__file__).parents[2] / "plugins"
NUMPY_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_GUARD = 4096  # bytes after the workspace and around outputs that must not be written
_GARBAGE = 0xA5
_FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-DSPECCOMPILE_HOST", "-fPIC")
_SUFFIXES, _LIBRARY = (".cuh", ".h", ".cpp"), "kernels.so"


def _compile(sources: Path, *arguments: str) -> None:
    done = subprocess.run(["g++", *_FLAGS, f"-I{sources}", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _fetch(sources: Path, library: Path, options: Sequence[str], make: Callable[[Path], None]) -> ctypes.CDLL:
    """Loads the new file `library`, compiled by `make` now or before from the same sources and options."""
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    names = (p.relative_to(sources) for p in sorted(sources.rglob("*.*")) if p.suffix in _SUFFIXES)
    texts = {name.as_posix(): (sources / name).read_text() for name in names if name.parts[0] != "cpu"}
    folder = library.with_suffix(".made")
    store.fetch("host", {"sources": texts, "options": [*_FLAGS, *options], "g++": version}, folder, make)
    (folder / _LIBRARY).rename(library)
    return ctypes.CDLL(str(library))


def build(sources: Path, library: Path, *options: str) -> ctypes.CDLL:
    """Compiles the tree `sources` (that of plugins/) for the CPU and loads it."""

    def make(folder: Path) -> None:
        _compile(sources, *options, "-shared", str(sources / "host/host.cpp"), "-o", str(folder / _LIBRARY))

    return _fetch(sources, library, options, make)


def build_watched(sources: Path, folder: Path) -> ctypes.CDLL:
    """The same with plugins/host/races: it counts accesses to shared memory, and races among them."""
    parts = {"host.cpp": ("-fsanitize=thread",), "races.cpp": ("-fno-sanitize=thread", "-O3")}  # its own work is most

    def make(dest: Path) -> None:
        for name, options in parts.items():
            made = str(folder / f"{name}.o")
            _compile(sources, "-DSPECCOMPILE_RACES", *options, "-c", str(sources / "host" / name), "-o", made)
        objects = [str(folder / f"{name}.o") for name in parts]
        _compile(sources, "-shared", *objects, "-o", str(dest / _LIBRARY))  # without the sanitizer's own library

    return _fetch(sources, folder / "watched.so", ["watched", *itertools.chain(*parts.values())], make)


def load_watched(folder: Path) -> ctypes.CDLL:
    """Loads what `build_watched` has built."""
    return ctypes.CDLL(str(folder / "watched.so"))


def races(library: ctypes.CDLL) -> tuple[int, int]:
    """Returns accesses to shared memory since the last call, and those that were part of a race."""
    counts = (ctypes.c_long * 2)()
    library.host_races(counts)
    return counts[0], counts[1]


@functools.cache
def kernels(*options: str) -> ctypes.CDLL:
    """Returns the library of the unchanged sources; one compilation per process and set of options."""
    assert shutil.which("g++"), "the tests of the kernels need g++"
    folder = Path(tempfile.mkdtemp(prefix="speccompile-kernels-"))
    try:
        return build(PLUGINS, folder / "kernels.so", *options)
    finally:
        shutil.rmtree(folder)  # it stays mapped


class Guarded:
    """An array of garbage between two guards."""

    def __init__(self, shape: Sequence[int], dtype: type, align: int = 16) -> None:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.raw = np.full(size + 2 * _GUARD + 64, _GARBAGE, np.uint8)
        self.start = _GUARD + (align - (self.raw.ctypes.data + _GUARD) % 64) % 64
        self.end = self.start + size
        self.array = self.raw[self.start : self.end].view(dtype).reshape(shape)

    @property
    def address(self) -> int:
        return self.raw.ctypes.data + self.start

    def check(self) -> None:
        assert (self.raw[: self.start] == _GARBAGE).all(), "written before the array"
        assert (self.raw[self.end :] == _GARBAGE).all(), "written after the array"


def verify(
    library: ctypes.CDLL, case: Mapping[str, np.ndarray], *, d2t: np.ndarray | None = None, seed: int = 0
) -> list[np.ndarray]:
    """SpecVerify by the kernels: path, num_accepted, next_token."""
    batch, nodes, vocab = case["logits"].shape
    dtype = next(name for name, kind in NUMPY_DTYPES.items() if case["logits"].dtype == kind)
    held = {name: np.ascontiguousarray(array) for name, array in case.items()}
    if d2t is not None:
        held["d2t"] = np.ascontiguousarray(d2t)
    logits = Guarded(held["logits"].shape, held["logits"].dtype)
    logits.array[...] = held["logits"]
    outputs = {"path": (batch, nodes), "num_accepted": (batch,), "next_token": (batch,)}
    guarded = {name: Guarded(shape, np.int64) for name, shape in outputs.items()}
    work = Guarded((verify_workspace_bytes(batch, nodes, vocab, d2t is not None),), np.uint8)
    args = SpecVerifyArgs(
        **{name: array.ctypes.data for name, array in held.items()},
        **{name: out.address for name, out in guarded.items()},
        workspace=work.address,
        batch=batch,
        nodes=nodes,
        vocab=vocab,
        draft_vocab=held["draft_probs"].shape[-1],
        dtype=DTYPES.index(dtype),
    )
    args.logits = logits.address
    scan, flush = verify_launches(batch, nodes, vocab, dtype)
    library.host_spec_verify(ctypes.byref(args), scan.grid[0], ctypes.c_ulong(flush.shared_bytes), seed)
    for array in (*guarded.values(), work):
        array.check()
    return [out.array.copy() for out in guarded.values()]


def rollback(
    library: ctypes.CDLL,
    caches: Sequence[np.ndarray],
    lengths: np.ndarray,
    path: np.ndarray,
    *,
    align: int = 16,
    seed: int = 0,
) -> list[np.ndarray]:
    """KVRollback by the kernels, on copies of the caches."""
    batch, kv_heads, max_seq, head_dim = caches[0].shape
    dtype = next(name for name, kind in NUMPY_DTYPES.items() if caches[0].dtype == kind)
    guarded = [Guarded(cache.shape, cache.dtype, align) for cache in caches]
    for guard, cache in zip(guarded, caches, strict=True):
        guard.array[...] = cache
    pointers = [guard.address for guard in guarded]
    unit = rollback_vector_bytes(head_dim, dtype, pointers)
    vectors = head_dim * caches[0].dtype.itemsize // unit
    lengths, path = np.ascontiguousarray(lengths), np.ascontiguousarray(path)
    for launch, group in rollback_launches(pointers, batch, kv_heads, head_dim, dtype):
        args = rollback_args(group, lengths.ctypes.data, path.ctypes.data, path.shape[1], kv_heads, max_seq, vectors)
        library.host_kv_rollback(ctypes.byref(args), unit, *launch.grid, seed)
    for guard in guarded:
        guard.check()
    return [guard.array.copy() for guard in guarded]
