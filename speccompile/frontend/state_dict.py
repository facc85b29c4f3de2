# SPDX-License-Identifier: Apache-2.0
"""Weights of a speculator's checkpoint: safetensors, or a pickle of nothing but tensors."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.errors import CheckpointError
from speccompile.frontend.checkpoint import list_tensors

if TYPE_CHECKING:
    import torch

PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
_SAFE = ("model.safetensors", "model.safetensors.index.json")
Shape = tuple[int, ...]


def read_shapes(folder: Path) -> dict[str, Shape]:
    """Shapes of all weights by name. Safetensors need no torch for it.

    Raises:
        CheckpointError: no weights, or a damaged file.
    """
    if not _is_safe(folder) and _pickles(folder):
        return {name: tuple(tensor.shape) for name, tensor in read_tensors(folder).items()}
    return {name: header.shape for name, header in list_tensors(folder).items()}


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All weights by name, in the files' dtypes, mapped from the disk where the format allows it.

    Raises:
        CheckpointError: no weights, a damaged file, or a pickle that holds more than tensors.
    """
    if _is_safe(folder) or not _pickles(folder):
        from safetensors.torch import load_file

        list_tensors(folder)  # what is truncated or missing is named there
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        return tensors
    tensors = {}
    for file in _pickles(folder):
        tensors |= _unpickle(file)
    return tensors


def _is_safe(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _SAFE)


def _pickles(folder: Path) -> list[Path]:
    if (folder / PICKLED).is_file():
        return [folder / PICKLED]
    index = folder / PICKLED_INDEX
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
        got = f"{type(fault).__name__}: {fault}"
        raise CheckpointError(str(index), got, "a JSON object with weight_map", "Download the file again.") from fault
    if any(Path(name).name != name for name in names):
        raise CheckpointError(str(index), "a shard outside the folder", "names of files in it", "Download it again.")
    return [folder / name for name in names]


def _unpickle(path: Path) -> dict[str, torch.Tensor]:
    import torch

    todo = "Only tensors are unpickled, as anything else may run code: download it again, or use safetensors."
    try:
        held: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as fault:
        lines = str(fault).strip().splitlines() or [type(fault).__name__]
        raise CheckpointError(str(path), lines[0], "a file of tensors by name", todo) from fault
    if not isinstance(held, dict) or not all(isinstance(t, torch.Tensor) for t in held.values()):
        raise CheckpointError(str(path), f"a {type(held).__name__}", "tensors by name", todo)
    return {str(name): tensor for name, tensor in held.items()}


def check_shapes(folder: Path, held: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> None:
    """Every wanted weight is there in its shape, and no other.

    Raises:
        CheckpointError: names the first fault.
    """
    todo = "The weights do not belong to this config.json, or the download is incomplete: fetch the folder again."
    missing, extra = sorted(wanted.keys() - held.keys()), sorted(held.keys() - wanted.keys())
    for keys, what in ((missing, "no"), (extra, "an unknown")):
        if keys:
            got = f"{what} {keys[0]}" + (f" ({len(keys)} such)" if len(keys) > 1 else "")
            raise CheckpointError(str(folder), got, f"the {len(wanted)} weights that config.json implies", todo)
    for name, shape in wanted.items():
        if held[name] != shape:
            got, expected = f"{name} of shape {list(held[name])}", f"{list(shape)} as config.json says"
            raise CheckpointError(str(folder), got, expected, todo)
