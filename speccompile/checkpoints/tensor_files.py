# SPDX-License-Identifier: Apache-2.0
"""The weights of a speculator's folder by key: headers at once, bytes on demand from memory-mapped files.

Pickles are read by torch's weights-only unpickler, which runs no code of the file; safetensors need no torch.
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from speccompile.checkpoints.checkpoint import list_stored, read_config, read_index, scheme_of
from speccompile.checkpoints.folders import gguf_weights, weight_files
from speccompile.checkpoints.gguf.tensors import GgufWeight
from speccompile.checkpoints.packed_schemes import Scheme, has_integers
from speccompile.checkpoints.packed_weights import IntegerWeight, PackedWeight, numbers, plain_headers
from speccompile.checkpoints.safetensors import TensorHeader, read_header, wrapper_prefix
from speccompile.errors import CheckpointError
from speccompile.ops.grid import Grid

if TYPE_CHECKING:
    import torch

# The files of a speculator that a build reads; all of them are in the digests.
SPECULATOR_FILES = ("config.json", "*.index.json", "*.safetensors", "*.gguf", "*.pt", "*.bin", "*.pth")
# Of torch's weights-only reader, which takes a pickle's operations as they come.
_PICKLE_FAULTS = (OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError,
                  MemoryError, ArithmeticError, struct.error)  # fmt: skip
_PICKLES = (".pt", ".bin", ".pth")
# Other files that trainers write beside the weights.
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler", "trainer_state")
# By the names of safetensors. bfloat16 and FP8 have no numpy types: their bits are read as uint16 and uint8.
NUMPY_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "|b1", "F8_E4M3": "|u1", "F8_E5M2": "|u1",
}  # fmt: skip
_TORCH_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


class TensorFiles:
    """Tensors of several files, none read yet.

    Args:
        files: by key; empty for tensors in memory.
        tensors: those in memory already, by key (of pickles: mapped, not read).
        scheme: of the folder's packed weights, which are then read as float32; None: all are plain.
    """

    def __init__(
        self,
        headers: Mapping[str, TensorHeader],
        files: Mapping[str, Path],
        tensors: Mapping[str, Any] | None = None,
        scheme: Scheme | None = None,
    ) -> None:
        self._stored, self.files, self._tensors = dict(headers), dict(files), dict(tensors or {})
        self.headers, self._packed = plain_headers(scheme, headers) if scheme is not None else (dict(headers), {})

    def array(self, key: str) -> np.ndarray:
        """Returns the tensor's elements, read on access; bfloat16 as uint16."""
        packed = self._packed.get(key)
        if packed is None:
            return self._stored_array(key)
        held = self._unpacked(packed)
        if isinstance(held, np.ndarray):
            return held
        grid = held.grid()
        return held.weight() if grid is None else grid.weight()

    @property
    def grid_keys(self) -> tuple[str, ...]:
        """The tensors that have levels of few bits, of which `grid` may return some."""
        return tuple(key for key, packed in self._packed.items() if packed.has_levels)

    def grid(self, key: str) -> Grid | None:
        """Returns a tensor [out, in] as the grid whose weights are those of `array`; None where it has none."""
        packed = self._packed.get(key)
        held = None if packed is None or not packed.has_levels else self._unpacked(packed)
        return held.grid() if isinstance(held, IntegerWeight) else None

    def _unpacked(self, packed: PackedWeight) -> IntegerWeight | np.ndarray:
        stored = {part: (self._stored_array(k), self._stored[k].dtype) for part, k in packed.parts.items()}
        return packed.unpack({part: numbers(array, dtype) for part, (array, dtype) in stored.items()})

    def _stored_array(self, key: str) -> np.ndarray:
        header = self._stored[key]
        if key in self._tensors:
            return _array_from_tensor(self._tensors[key])
        dtype = np.dtype(NUMPY_TYPES[header.dtype])
        if header.size == 0:
            return np.zeros(header.shape, dtype=dtype)
        # Copy on write: a reader may write to it, and the file stays unchanged.
        return np.memmap(self.files[key], dtype, "c", header.start_bytes, header.shape)

    def tensor(self, key: str) -> torch.Tensor:
        """Returns the same as a torch tensor, without a copy."""
        import torch

        if key in self._tensors:
            held: torch.Tensor = self._tensors[key]
            return held
        plain = torch.from_numpy(self.array(key))
        return plain.view(torch.bfloat16) if self.headers[key].dtype == "BF16" else plain


class GgufFiles(TensorFiles):
    """The tensors of a GGUF file."""

    def __init__(self, weights: Mapping[str, GgufWeight]) -> None:
        super().__init__({key: weight.header for key, weight in weights.items()}, {})
        self._weights = weights

    def array(self, key: str) -> np.ndarray:
        return self._weights[key].array()

    @property
    def grid_keys(self) -> tuple[str, ...]:
        return tuple(key for key, weight in self._weights.items() if weight.has_grid)

    def grid(self, key: str) -> Grid | None:
        return self._weights[key].grid()


def _array_from_tensor(tensor: Any) -> np.ndarray:
    import torch

    plain = tensor.detach().contiguous()
    array: np.ndarray = (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()
    return array


def files_from_tensors(tensors: Mapping[str, torch.Tensor]) -> TensorFiles:
    return TensorFiles({key: _header_from_tensor(t) for key, t in tensors.items()}, {}, tensors)


def _header_from_tensor(tensor: Any) -> TensorHeader:
    name = str(tensor.dtype).removeprefix("torch.")
    return TensorHeader(_TORCH_NAMES.get(name, name), tuple(tensor.shape))


def open_files(folder: Path) -> TensorFiles:
    """Opens all weights in a folder. Pickles are only opened where there are no safetensors.

    Raises:
        CheckpointError: no weights, a damaged file, a key in two files, or a pickle that would need code to be read.
    """
    if (folder / "model.safetensors.index.json").is_file() and not (folder / "model.safetensors").is_file():
        sharded = list_stored(folder)
        weight_map = read_index(folder / "model.safetensors.index.json")
        prefix = wrapper_prefix(weight_map)
        return TensorFiles(sharded, {k: folder / weight_map[prefix + k] for k in sharded}, scheme=scheme_of(folder))
    if (folder / "model.safetensors").is_file():
        paths = [folder / "model.safetensors"]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    pickles = [] if paths else sorted(p for p in folder.iterdir() if _is_pickle(p))
    if not paths and not pickles:
        if (weights := gguf_weights(folder)) is not None:
            return GgufFiles(weights)
        todo = "Check the path; a download may have left the weights out."
        raise CheckpointError(str(folder), "no weights", "*.safetensors, *.gguf, *.pt or *.bin", todo)
    headers: dict[str, TensorHeader] = {}
    files: dict[str, Path] = {}
    tensors: dict[str, Any] = {}
    for path in [*paths, *pickles]:
        loaded = {} if path in paths else _load_pickle(path)
        held = read_header(path) if path in paths else {k: _header_from_tensor(t) for k, t in loaded.items()}
        if double := sorted(held.keys() & headers.keys()):
            got = f"{double[0]} also in {files[double[0]].name}"
            raise CheckpointError(str(path), got, "every key in one file", "Remove the file that is left over.")
        headers |= held
        files |= dict.fromkeys(held, path)
        tensors |= loaded
    start = len(wrapper_prefix(headers))
    named = {k[start:]: h for k, h in headers.items()}, {k[start:]: f for k, f in files.items()}
    return TensorFiles(*named, {k[start:]: t for k, t in tensors.items()}, scheme_of(folder))


def has_grids(folder: Path) -> bool:
    """Returns whether a target's folder has weights of few bits, for `TensorFiles.grid`, or its config says so."""
    if weight_files(folder):
        return bool(open_files(folder).grid_keys)
    return has_integers(read_config(folder))


def _is_pickle(path: Path) -> bool:
    return path.suffix in _PICKLES and path.is_file() and not path.stem.startswith(_NO_WEIGHTS)


def _load_pickle(path: Path) -> dict[str, Any]:
    import torch

    todo = "Never unpickle it: ask its author for safetensors."
    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as fault:
            if "mmap can only be used" not in str(fault):
                raise
            loaded = torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
    except pickle.UnpicklingError as fault:
        wanted = re.search(r"GLOBAL ([\w.]+)", str(fault))
        why = f"it asks for {wanted[1]}" if wanted else "it is no pickle of tensors"
        got = f"a pickle that torch's weights-only reader refuses: {why}"
        raise CheckpointError(str(path), got, "a pickle of tensors alone", todo) from fault
    except _PICKLE_FAULTS as fault:
        got = f"a file that cannot be read ({_first_line(fault)})"
        raise CheckpointError(str(path), got, "a whole file", "The file is damaged: download it again.") from fault
    for wrapper in ("state_dict", "model_state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(wrapper), Mapping):
            loaded = loaded[wrapper]
    is_dict = isinstance(loaded, Mapping) and loaded and all(isinstance(t, torch.Tensor) for t in loaded.values())
    if not is_dict:
        got = f"{type(loaded).__name__} of other things than tensors"
        raise CheckpointError(str(path), got, "tensors by name", "Give the weights' own file.")
    return {str(key): tensor for key, tensor in loaded.items()}


def _first_line(fault: Exception) -> str:
    lines = [line for line in str(fault).strip().splitlines() if line.strip()]
    return lines[0][:160] if lines else type(fault).__name__
