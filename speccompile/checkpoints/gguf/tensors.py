# SPDX-License-Identifier: Apache-2.0
"""The tensors of a GGUF file under transformers' names: their grids and values, one at a time from the mapped file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.checkpoints.gguf.blocks import BLOCKS, in_blocks, values_from_rows
from speccompile.checkpoints.gguf.config import ROPE_TENSORS, TODO, find_family, own_keys
from speccompile.checkpoints.gguf.families import GATE_UP, LAYER, TOP, Family
from speccompile.checkpoints.gguf.header import GgufHeader, GgufTensor
from speccompile.checkpoints.safetensors import TensorHeader
from speccompile.errors import CheckpointError
from speccompile.ops.grid import Grid

Array = NDArray[Any]
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True)
class GgufWeight:
    """A weight of a model and what it is made of."""

    shape: tuple[int, ...]
    tensors: tuple[GgufTensor, ...]  # of the file; several ones go through `change`
    part: int | None = None  # index of an expert, of whose rows it is made; None: of all rows
    heads: int = 0  # whose halves are stored in turns; 0: rows as they are
    change: Callable[..., Array] | None = None  # makes it, float32, of tensors' values; None: they are it

    @property
    def header(self) -> TensorHeader:
        dtype = BLOCKS[self.tensors[0].kind].dtype if self.change is None else ""
        return TensorHeader(dtype or "F32", self.shape)

    @property
    def has_grid(self) -> bool:
        return BLOCKS[self.tensors[0].kind].grid is not None and self.change is None and len(self.shape) == 2

    def grid(self) -> Grid | None:
        """Returns the grid of a matrix, in the order of its rows; None: it has none."""
        kind = self.tensors[0].kind
        make = BLOCKS[kind].grid
        if make is None or not self.has_grid:
            return None
        return make(in_blocks(kind, self._rows(self.tensors[0])))

    def array(self) -> Array:
        """Returns the values, quantised ones as float32, bfloat16 as uint16."""
        if self.change is None:
            return values_from_rows(self.tensors[0].kind, self._rows(self.tensors[0])).reshape(self.shape)
        values = [values_from_rows(t.kind, self._rows(t)).reshape(t.shape) for t in self.tensors]
        kinds = [BLOCKS[t.kind].dtype for t in self.tensors]
        return self.change(*[_float32(v, kind) for v, kind in zip(values, kinds, strict=True)]).reshape(self.shape)

    def _rows(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        block = BLOCKS[tensor.kind]
        num_rows = math.prod(tensor.shape[:-1]) if self.heads == 0 or len(tensor.shape) > 1 else tensor.shape[0]
        row_bytes = math.prod(tensor.shape) // block.size * block.size_bytes // max(num_rows, 1)
        if num_rows == 0 or row_bytes == 0:
            return np.zeros((num_rows, row_bytes), np.uint8)
        held = np.memmap(tensor.file, np.uint8, "c", tensor.start_bytes, (num_rows, row_bytes))
        rows: NDArray[np.uint8] = held
        if self.part is not None:
            size = num_rows // tensor.shape[0]
            rows = rows[self.part * size : (self.part + 1) * size]
        if self.heads:
            rows = rows[np.arange(num_rows).reshape(self.heads, -1, 2).swapaxes(1, 2).ravel()]
        return rows


def weights_from_gguf(header: GgufHeader) -> dict[str, GgufWeight]:
    """Returns the weights of the model in a file by transformers' names."""
    return _Names(header, find_family(header)).read()


class _Names:
    def __init__(self, header: GgufHeader, family: Family) -> None:
        self.header, self.family = header, family
        self.names = {**LAYER, **family.names}
        keys = own_keys(header)
        heads = keys.get("attention.head_count")
        self.heads = {"attn_q": heads, "attn_k": keys.get("attention.head_count_kv", heads)} if family.in_pairs else {}

    def read(self) -> dict[str, GgufWeight]:
        made: dict[str, GgufWeight] = {}
        unknown: list[str] = []
        for name, tensor in self.header.tensors.items():
            if name in ROPE_TENSORS or self._is_partner(name):
                continue
            found = self._weights(name, tensor)
            unknown += [] if found else [name]
            made |= found
        if unknown:
            some = ", ".join(sorted(unknown)[:4]) + (f" and {len(unknown) - 4} more" if len(unknown) > 4 else "")
            got = f"{len(unknown)} tensors that the model does not have ({some})"
            raise CheckpointError(str(self.header.path), got, f"tensors of {self.family.model_type}", TODO)
        return made

    def _is_partner(self, name: str) -> bool:
        is_up = ".ffn_up_exps." in name and self.names.get("ffn_gate_exps.weight") == GATE_UP
        return is_up and name.replace("ffn_up", "ffn_gate") in self.header.tensors

    def _weights(self, name: str, tensor: GgufTensor) -> dict[str, GgufWeight]:
        """Returns the weights that a tensor makes, by name; {} where the model has none of that name."""
        match = _LAYER_NAME.fullmatch(name)
        prefix, own = (f"model.layers.{int(match[1])}.", match[2]) if match else ("", name)
        stem, _, ending = own.rpartition(".")
        names = self.names if match else TOP
        if own in names:
            return {prefix + names[own]: self._joined(name, tensor)} if names[own] else {}
        if ending not in ("weight", "bias") or not names.get(stem):
            return {}
        key = f"{prefix}{names[stem]}.{ending}"
        if "{}" in key:
            if len(tensor.shape) != 3 or ending != "weight":
                return {}
            return {
                key.format(part): GgufWeight(tensor.shape[1:], (tensor,), part=part) for part in range(tensor.shape[0])
            }
        if stem.endswith("norm") and ending == "weight" and self.family.adds_one:
            return {key: GgufWeight(tensor.shape, (tensor,), change=_minus_one)}
        if stem == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
            return {key: GgufWeight((1, *tensor.shape), (tensor,))}
        return {key: GgufWeight(tensor.shape, (tensor,), heads=self._heads(stem, name, tensor))}

    def _heads(self, stem: str, name: str, tensor: GgufTensor) -> int:
        heads = self.heads.get(stem) or 0
        if heads and (type(heads) is not int or not tensor.shape or tensor.shape[0] % (2 * heads)):
            got, expected = f"shape {list(tensor.shape)}", f"rows of {heads} heads of an even width"
            raise CheckpointError(f"{self.header.path} ({name})", got, expected, TODO)
        return heads

    def _joined(self, name: str, tensor: GgufTensor) -> GgufWeight:
        other = self.header.tensors.get(name.replace("ffn_gate_exps", "ffn_up_exps"))
        if "ffn_gate_exps" in name:
            if other is None or other.shape != tensor.shape:
                got = f"{'no tensor' if other is None else list(other.shape)} for its partner ffn_up_exps"
                raise CheckpointError(f"{self.header.path} ({name})", got, f"one of {list(tensor.shape)}", TODO)
            num, out, *inputs = tensor.shape
            return GgufWeight((num, *inputs, 2 * out), (tensor, other), change=_in_turns)
        if len(tensor.shape) == 3:
            num, out, size = tensor.shape
            return GgufWeight((num, size, out), (tensor,), change=_inputs_first)
        return GgufWeight(tensor.shape, (tensor,))


def _minus_one(values: Array) -> Array:
    return values - np.float32(1)


def _inputs_first(values: Array) -> Array:
    return np.ascontiguousarray(values.swapaxes(1, 2))


def _in_turns(gate: Array, up: Array) -> Array:
    both = np.stack([gate, up], axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])
    return _inputs_first(both) if both.ndim == 3 else both


def _float32(values: Array, dtype: str) -> NDArray[np.float32]:
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
