# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with packed weights (GPTQ, AWQ, compressed-tensors, FP8), read as the float32 weights that they mean.

`NAME.qweight`, `NAME.scales` and `NAME.qzeros` of a layer are `NAME.weight` [out, in] float32: (level - zero) * scale,
with one rounding. A build that keeps the weights reads their levels too (`IntegerWeight`). Scales of activations and
caches are not read: activations are not quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speccompile.checkpoints.packed_schemes import Scheme
from speccompile.checkpoints.safetensors import TensorHeader
from speccompile.errors import CheckpointError
from speccompile.ops.grid import Grid, has_float16

_EXACT_BITS = 16  # significant bits of a scale whose product with a level of 8 bits float32 holds


@dataclass(frozen=True)
class IntegerWeight:
    """A weight [out, in]: scale * (level - zero)."""

    levels: NDArray[np.uint8]  # [out, in] uint8
    zeros: NDArray[np.int32]  # [out, groups] int32
    scales: NDArray[np.float32]  # [out, groups] float32
    group_of: NDArray[np.int64]  # [in], the group of each input
    bits: int

    def weight(self) -> NDArray[np.float32]:
        differences = (self.levels - self.zeros[:, self.group_of]).astype(np.float32)
        weight: NDArray[np.float32] = differences * self.scales[:, self.group_of]
        return weight

    def grid(self) -> Grid | None:
        """Returns the grid that has the same numbers; None where there is none.

        One zero for all makes a symmetric grid; others are minimums where exact, else level - zero of 8 bits.
        """
        held = self._in_order()
        if held is None:
            return None
        levels, group, repeats, order = held
        zeros, scales = (np.repeat(values, repeats, axis=1) for values in (self.zeros, self.scales))
        bits, first = self.bits, int(zeros.flat[0])
        fits = 128 if bits > 4 else 8
        if (zeros == first).all() and (1 << bits) - fits <= first <= fits:
            kind = np.float16 if has_float16(scales) else np.float32
            return Grid(levels, scales.astype(kind), group, bits, first, order=order)
        if not np.isfinite(scales).all():
            return None
        if not (scales.view(np.uint32) & ((1 << (24 - _EXACT_BITS)) - 1)).any():
            minimums = -zeros * scales
            kind = np.float16 if has_float16(scales) and has_float16(minimums) else np.float32
            minimums = minimums.astype(kind)
            return Grid(levels, scales.astype(kind), group, bits, minimums=minimums, order=order)
        spread = np.repeat(zeros, group, axis=1)[:, : levels.shape[1]]
        differences = levels.astype(np.int16) - spread
        if differences.min() < -128 or differences.max() > 127:
            return None
        return Grid((differences + 128).astype(np.uint8), scales, group, bits=8, zero=128, order=order)

    def _in_order(self) -> tuple[NDArray[np.uint8], int, int, NDArray[np.int32] | None] | None:
        num_in, num_groups = len(self.group_of), self.scales.shape[1]
        order = np.argsort(self.group_of, kind="stable").astype(np.int32)
        counts = np.bincount(self.group_of, minlength=num_groups)
        size = int(counts.max())
        if (self.group_of[order] != np.arange(num_in) // size).any() or -(-num_in // size) != num_groups:
            return None
        whole = size >= num_in
        if size % 16 and not whole:
            return None
        repeats = 1 if whole or size == 16 or size % 32 == 0 else size // 16
        if (order == np.arange(num_in)).all():
            return self.levels, size // repeats, repeats, None
        return self.levels[:, order], size // repeats, repeats, order


_FP8 = ("F8_E4M3", "F8_E5M2")
# Scales of activations and of K and V.
_UNUSED = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale",
)  # fmt: skip
# Column of the n-th 4 bits of a word, lowest first, within the word's eight columns (AutoAWQ's GEMM layout).
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
_TODO = "Download the folder again, or use the unquantised checkpoint."
Arrays = Mapping[str, np.ndarray]  # by the part's name, as `scales`


@dataclass(frozen=True)
class PackedWeight:
    """One weight that is stored in parts; `unpack` makes it, [out, in] float32 or its integers, of `numbers`."""

    shape: tuple[int, int]  # [out, in] of the weight
    parts: Mapping[str, str]  # keys of its tensors by the part's name
    unpack: Callable[[Arrays], IntegerWeight | np.ndarray]
    has_levels: bool


def plain_headers(
    scheme: Scheme, headers: Mapping[str, TensorHeader]
) -> tuple[dict[str, TensorHeader], dict[str, PackedWeight]]:
    """Returns headers by key, packed weights as float32, in the order of the files; and the packed weights by key.

    Raises:
        CheckpointError: a part is missing, or its dtype or shape does not fit the others.
    """
    made: dict[str, TensorHeader] = {}
    packed: dict[str, PackedWeight] = {}
    used: set[str] = set()
    for key, header in headers.items():
        name, _, part = key.rpartition(".")
        if part not in _KNOWN_BY[scheme.method]:
            made[key] = header
            continue
        parts = {p: f"{name}.{p}" for p in (part, *_OTHER_PARTS) if f"{name}.{p}" in headers}
        weight = _packed_weight(scheme, name, {p: headers[k] for p, k in parts.items()}, parts)
        if weight is None:
            made[key] = header
        else:
            made[f"{name}.weight"] = TensorHeader("F32", weight.shape)
            packed[f"{name}.weight"] = weight
            used |= set(parts.values()) - {f"{name}.weight"}
    left_out = {key for key in made if key in used or key.endswith(_UNUSED)}
    return {key: header for key, header in made.items() if key not in left_out}, packed


# The part by which a packed weight is known; `weight` itself where its dtype says that it is packed.
_KNOWN_BY: dict[str, tuple[str, ...]] = {
    "gptq": ("qweight",),
    "awq": ("qweight",),
    "compressed-tensors": ("weight_packed", "weight"),
    "fp8": ("weight",),
}
_OTHER_PARTS = (
    "qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_g_idx",
    "weight_shape",
)  # fmt: skip


def _packed_weight(
    scheme: Scheme, name: str, headers: Mapping[str, TensorHeader], parts: Mapping[str, str]
) -> PackedWeight | None:
    layer = _Layer(scheme, name, headers)
    read: tuple[tuple[int, int], Callable[[Arrays], IntegerWeight | np.ndarray]]
    if "qweight" in headers:
        read = layer.awq() if scheme.method == "awq" else layer.gptq()
    elif "weight_packed" in headers:
        read = layer.bits()
    elif headers["weight"].dtype in (*_FP8, "I8"):
        read = layer.scaled()
    else:
        return None
    return PackedWeight(read[0], parts, read[1], "weight" not in headers or headers["weight"].dtype == "I8")


@dataclass(frozen=True)
class _Layer:
    """The parts of one layer, checked."""

    scheme: Scheme
    name: str
    headers: Mapping[str, TensorHeader]

    def part(self, name: str, dtypes: tuple[str, ...], dims: int) -> tuple[int, ...]:
        """Returns the shape of a part."""
        header = self.headers.get(name)
        where = f"{self.name}.{name}"
        if header is None:
            raise CheckpointError(where, "no such tensor", f"a part of the {self.scheme.method} weight", _TODO)
        if header.dtype not in dtypes or len(header.shape) != dims:
            got = f"{header.dtype} {list(header.shape)}"
            raise CheckpointError(where, got, f"{' or '.join(dtypes)} of {dims} dims", _TODO)
        return header.shape

    def expect(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            raise CheckpointError(f"{self.name}.{name}", f"shape {list(shape)}", f"{list(expected)}", _TODO)

    def gptq(self) -> tuple[tuple[int, int], Callable[[Arrays], IntegerWeight]]:
        """Words along the input: qweight [in * bits / 32, out], scales and qzeros by group."""
        bits, offset = self.scheme.bits, self.scheme.zero_offset
        per_word = 32 // bits
        words, num_out = self.part("qweight", ("I32",), 2)
        num_in = words * per_word
        groups, scaled = self.part("scales", _FLOATS, 2)
        self.expect("scales", (groups, scaled), (groups, num_out))
        self.expect("qzeros", self.part("qzeros", ("I32",), 2), (groups, -(-num_out // per_word)))
        has_order = "g_idx" in self.headers
        if has_order:
            self.expect("g_idx", self.part("g_idx", ("I32", "I64"), 1), (num_in,))
        group_of = self.groups(num_in, groups)

        def unpack(parts: Arrays) -> IntegerWeight:
            levels = unpack_words(parts["qweight"].T, bits)  # [out, in]
            zeros = unpack_words(parts["qzeros"], bits)[:, :num_out].astype(np.int32) + offset  # [groups, out]
            groups_of = self.order(parts["g_idx"], groups) if has_order else group_of
            return IntegerWeight(levels, zeros.T, parts["scales"].T.astype(np.float32), groups_of, bits)

        return (num_out, num_in), unpack

    def awq(self) -> tuple[tuple[int, int], Callable[[Arrays], IntegerWeight]]:
        """Words along the output: qweight [in, out / 8], scales and qzeros by group."""
        num_in, words = self.part("qweight", ("I32",), 2)
        num_out = words * 8
        groups, scaled = self.part("scales", _FLOATS, 2)
        self.expect("scales", (groups, scaled), (groups, num_out))
        self.expect("qzeros", self.part("qzeros", ("I32",), 2), (groups, words))
        group_of = self.groups(num_in, groups)

        def unpack(parts: Arrays) -> IntegerWeight:
            levels, zeros = (_awq_levels(parts[p]).T for p in ("qweight", "qzeros"))  # [out, in or groups]
            scales = parts["scales"].T.astype(np.float32)
            return IntegerWeight(np.ascontiguousarray(levels), zeros.astype(np.int32), scales, group_of, bits=4)

        return (num_out, num_in), unpack

    def bits(self) -> tuple[tuple[int, int], Callable[[Arrays], IntegerWeight]]:
        """compressed-tensors' words along the input: level + 2^(bits - 1), [out, ceil(in * bits / 32)]."""
        num_out, words = self.part("weight_packed", ("I32",), 2)
        self.expect("weight_shape", self.part("weight_shape", ("I64", "I32"), 1), (2,))
        groups = self.scale_groups(num_out)
        bits = self.scheme.bits
        num_in = words * 32 // bits
        group_of = self.groups(num_in, groups)
        has_order = "weight_g_idx" in self.headers
        if "weight_zero_point" in self.headers:
            zero_shape = self.part("weight_zero_point", ("I32",), 2)
            self.expect("weight_zero_point", zero_shape, (-(-num_out * bits // 32), groups))

        def unpack(parts: Arrays) -> IntegerWeight:
            asked = tuple(int(size) for size in parts["weight_shape"])
            self.expect("weight_shape (its values)", asked, (num_out, num_in))
            levels = unpack_words(parts["weight_packed"], bits)
            zeros = np.full((num_out, groups), 1 << (bits - 1), np.int32)
            if "weight_zero_point" in parts:
                zeros = unpack_words(parts["weight_zero_point"].T, bits).T[:num_out].astype(np.int32)
            order = self.order(parts["weight_g_idx"], groups) if has_order else group_of
            scales = np.broadcast_to(parts["weight_scale"].astype(np.float32), (num_out, groups))
            return IntegerWeight(levels, zeros, scales, order, bits)

        return (num_out, num_in), unpack

    def scaled(self) -> tuple[tuple[int, int], Callable[[Arrays], IntegerWeight | np.ndarray]]:
        """8-bit levels [out, in], integers or FP8, and scales of the tensor, of rows, of groups or of blocks."""
        num_out, num_in = self.part("weight", (*_FP8, "I8"), 2)
        scale = "weight_scale_inv" if "weight_scale_inv" in self.headers else "weight_scale"
        header = self.headers.get(scale)
        dims = len(header.shape) if header is not None else 1
        shape = self.part(scale, _FLOATS, dims)
        rows, columns = self.scale_steps(scale, shape, (num_out, num_in))
        if "weight_zero_point" in self.headers:
            self.expect("weight_zero_point", self.headers["weight_zero_point"].shape, shape)

        def by_row(values: np.ndarray) -> np.ndarray:
            table = values.reshape((1, 1) if values.size == 1 else (len(values), -1))
            return np.repeat(table, rows, axis=0)[:num_out]

        def unpack(parts: Arrays) -> IntegerWeight | np.ndarray:
            levels, scales = parts["weight"], by_row(parts[scale].astype(np.float32))
            if levels.dtype == np.int8:
                zeros = np.full(scales.shape, 128, np.int32)
                if "weight_zero_point" in parts:
                    zeros += by_row(parts["weight_zero_point"].astype(np.int32))
                group_of = np.arange(num_in) // columns
                return IntegerWeight(levels.view(np.uint8) ^ np.uint8(128), zeros, scales, group_of, bits=8)
            weight: np.ndarray = levels.astype(np.float32) * np.repeat(scales, columns, axis=1)[:, :num_in]
            return weight

        return (num_out, num_in), unpack

    def scale_steps(self, name: str, shape: tuple[int, ...], weight: tuple[int, int]) -> tuple[int, int]:
        """Returns the rows and columns of the weight that share a scale."""
        num_out, num_in = weight
        if shape in ((), (1,), (1, 1)):
            return num_out, num_in
        if shape in ((num_out,), (num_out, 1)):
            return 1, num_in
        rows, columns = self.scheme.block
        if rows and shape == (-(-num_out // rows), -(-num_in // columns)):
            return rows, columns
        if len(shape) == 2 and shape[0] == num_out and num_in % shape[1] == 0:
            return 1, num_in // shape[1]
        expected = f"one scale, one a row of {num_out}, or one a group or block of [{num_out}, {num_in}]"
        raise CheckpointError(f"{self.name}.{name}", f"shape {list(shape)}", expected, _TODO)

    def scale_groups(self, num_out: int) -> int:
        """Returns the number of groups of a row, from the shape of compressed-tensors' scales."""
        header = self.headers.get("weight_scale")
        shape = self.part("weight_scale", _FLOATS, len(header.shape) if header is not None else 2)
        if shape in ((), (1,)):
            return 1
        rows, groups = (*shape, 1)[:2]
        self.expect("weight_scale", shape[:1], (num_out,) if rows != 1 else (1,))
        return groups

    def groups(self, num_in: int, groups: int) -> np.ndarray:
        """Returns the group of each input column, [in] int64."""
        size = self.scheme.group_size
        if size in (0, -1):
            size = -(-num_in // groups)
        if -(-num_in // size) != groups:
            expected = f"{-(-num_in // size)} groups of {size} columns"
            raise CheckpointError(f"{self.name} (scales)", f"{groups} groups of {num_in} columns", expected, _TODO)
        return np.arange(num_in) // size

    def order(self, given: np.ndarray, groups: int) -> np.ndarray:
        """Returns the group of each input column from a stored list."""
        order = given.astype(np.int64)
        if order.size and not 0 <= order.min() <= order.max() < groups:
            got = f"group {order.min() if order.min() < 0 else order.max()}"
            raise CheckpointError(f"{self.name} (g_idx)", got, f"groups below {groups}", _TODO)
        return order


_FLOATS = ("F16", "BF16", "F32")


def numbers(array: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the elements of an array as `TensorFiles` reads it; bfloat16 (uint16) and FP8 (uint8) as float32."""
    if dtype == "BF16":
        floats: np.ndarray = (array.astype(np.uint32) << 16).view(np.float32)
        return floats
    if dtype in _FP8:
        import ml_dtypes

        kind = ml_dtypes.float8_e4m3fn if dtype == "F8_E4M3" else ml_dtypes.float8_e5m2
        widened: np.ndarray = np.asarray(array).view(kind).astype(np.float32)
        return widened
    return array


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Returns [rows, words * 32 / bits] uint8 numbers of words [rows, words] int32, lowest bits first.

    `bits` is a divisor of 32, at most 8.
    """
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = (np.ascontiguousarray(words).view(np.uint32)[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)
    return numbers.astype(np.uint8).reshape(len(words), -1)


def _awq_levels(words: np.ndarray) -> np.ndarray:
    stored = unpack_words(words, 4).reshape(len(words), -1, 8)
    levels = np.empty_like(stored)
    levels[:, :, list(_AWQ_COLUMNS)] = stored
    return levels.reshape(len(words), -1)
