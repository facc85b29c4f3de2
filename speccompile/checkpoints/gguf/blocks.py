# SPDX-License-Identifier: Apache-2.0
"""Block types of GGUF files: rows of blocks as the grids, or the values, that llama.cpp's reference means by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.common.extras import install_command
from speccompile.errors import CheckpointError
from speccompile.ops.grid import Grid

Bytes = NDArray[np.uint8]  # [rows, blocks, bytes of a block]
Array = NDArray[Any]


@dataclass(frozen=True)
class Block:
    """A block type."""

    name: str
    size: int
    size_bytes: int
    dtype: str = ""  # safetensors' name of a plain type; "": it is quantised
    grid: Callable[[Bytes], Grid] | None = None  # makes the grid of rows; None: the package `gguf` makes their values


def _halves(raw: Bytes, start: int, num: int = 1) -> Array:
    part = np.ascontiguousarray(raw[:, :, start : start + 2 * num])
    return part.view("<f2").reshape(len(raw), -1)


def _flat(levels: Array) -> NDArray[np.uint8]:
    return np.ascontiguousarray(levels, np.uint8).reshape(len(levels), -1)


def _nibbles(packed: Bytes) -> NDArray[np.uint8]:
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(raw: Bytes, start: int) -> NDArray[np.uint8]:
    return np.unpackbits(raw[:, :, start : start + 4], axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(raw: Bytes) -> Grid:
    return Grid(_flat(_nibbles(raw[:, :, 2:])), _halves(raw, 0), group=32, bits=4, zero=8)


def _q4_1(raw: Bytes) -> Grid:
    return Grid(_flat(_nibbles(raw[:, :, 4:])), _halves(raw, 0), group=32, bits=4, minimums=_halves(raw, 2))


def _q5_0(raw: Bytes) -> Grid:
    levels = _nibbles(raw[:, :, 6:]) | _fifth_bits(raw, 2)
    return Grid(_flat(levels), _halves(raw, 0), group=32, bits=5, zero=16)


def _q5_1(raw: Bytes) -> Grid:
    levels = _nibbles(raw[:, :, 8:]) | _fifth_bits(raw, 4)
    return Grid(_flat(levels), _halves(raw, 0), group=32, bits=5, minimums=_halves(raw, 2))


def _q8_0(raw: Bytes) -> Grid:
    return Grid(_flat(raw[:, :, 2:] ^ 128), _halves(raw, 0), group=32, bits=8, zero=128)


def _scales_and_minimums(raw: Bytes) -> tuple[Array, Array]:
    """Returns the scales and minimums of eight groups of 32 in a block of Q4_K or Q5_K, [rows, groups] float32.

    Six bits each in twelve bytes: the first four in the low bits of bytes 0 to 7, the others' low halves in bytes 8 to
    11, their high bits in the high bits of bytes 0 to 7. They are multiples of two float16.
    """
    low, high = raw[:, :, 4:12], raw[:, :, 12:16]
    scales = np.concatenate([low[..., :4] & 63, (high & 15) | (low[..., :4] >> 6) << 4], axis=-1)
    minimums = np.concatenate([low[..., 4:] & 63, high >> 4 | (low[..., 4:] >> 6) << 4], axis=-1)
    factors = _halves(raw, 0, 2).astype(np.float32).reshape(len(raw), -1, 2)
    return (
        (factors[..., :1] * scales.astype(np.float32)).reshape(len(raw), -1),
        -(factors[..., 1:] * minimums.astype(np.float32)).reshape(len(raw), -1),
    )


def _in_groups(packed: Bytes, num: int) -> Bytes:
    return packed.reshape(*packed.shape[:2], num, -1)


def _q4_k(raw: Bytes) -> Grid:
    scales, minimums = _scales_and_minimums(raw)
    return Grid(_flat(_nibbles(_in_groups(raw[:, :, 16:], 4))), scales, group=32, bits=4, minimums=minimums)


def _q5_k(raw: Bytes) -> Grid:
    scales, minimums = _scales_and_minimums(raw)
    # Bit g of byte n is the fifth bit of level n of group g.
    fifth = (raw[:, :, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    levels = _nibbles(_in_groups(raw[:, :, 48:], 4)).reshape(*raw.shape[:2], 8, 32) | fifth
    return Grid(_flat(levels), scales, group=32, bits=5, minimums=minimums)


def _q6_k(raw: Bytes) -> Grid:
    low = _nibbles(_in_groups(raw[:, :, :128], 2))  # [rows, blocks, 2, 128]
    levels = low.reshape(*raw.shape[:2], 2, 4, 32) | _two_bits(raw[:, :, 128:192]) << 4
    factors = _halves(raw, 208).astype(np.float32)[:, :, None]
    scales = factors * np.ascontiguousarray(raw[:, :, 192:208]).view(np.int8).astype(np.float32)
    return Grid(_flat(levels), scales.reshape(len(raw), -1), group=16, bits=6, zero=32)


def _two_bits(packed: Bytes) -> NDArray[np.uint8]:
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    levels: NDArray[np.uint8] = _in_groups(packed, 2)[:, :, :, None] >> shifts & np.uint8(3)
    return levels  # [rows, blocks, 2, 4, 32]


def _q2_k(raw: Bytes) -> Grid:
    factors = _halves(raw, 80, 2).astype(np.float32).reshape(len(raw), -1, 2)
    scales = factors[..., :1] * (raw[:, :, :16] & 15).astype(np.float32)
    minimums = -(factors[..., 1:] * (raw[:, :, :16] >> 4).astype(np.float32))
    flat = (scales.reshape(len(raw), -1), minimums.reshape(len(raw), -1))
    return Grid(_flat(_two_bits(raw[:, :, 16:80])), flat[0], group=16, bits=2, minimums=flat[1])


def _q3_k(raw: Bytes) -> Grid:
    third = raw[:, :, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # [rows, blocks, 8, 32]
    levels = _two_bits(raw[:, :, 32:96]).reshape(third.shape) | third << 2
    high = raw[:, :, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = (_nibbles(raw[:, :, 96:104]) | high.reshape(*raw.shape[:2], 16) << 4).astype(np.float32) - 32
    scales *= _halves(raw, 108).astype(np.float32)[:, :, None]
    return Grid(_flat(levels), scales.reshape(len(raw), -1), group=16, bits=3, zero=4)


def _tq2_0(raw: Bytes) -> Grid:
    return Grid(_flat(_two_bits(raw[:, :, :64])), _halves(raw, 64), group=256, bits=2, zero=1)


BLOCKS: dict[int, Block] = {
    0: Block("F32", 1, 4, "F32"),
    1: Block("F16", 1, 2, "F16"),
    30: Block("BF16", 1, 2, "BF16"),
    2: Block("Q4_0", 32, 18, grid=_q4_0),
    3: Block("Q4_1", 32, 20, grid=_q4_1),
    6: Block("Q5_0", 32, 22, grid=_q5_0),
    7: Block("Q5_1", 32, 24, grid=_q5_1),
    8: Block("Q8_0", 32, 34, grid=_q8_0),
    12: Block("Q4_K", 256, 144, grid=_q4_k),
    13: Block("Q5_K", 256, 176, grid=_q5_k),
    14: Block("Q6_K", 256, 210, grid=_q6_k),
    10: Block("Q2_K", 256, 84, grid=_q2_k),
    11: Block("Q3_K", 256, 110, grid=_q3_k),
    16: Block("IQ2_XXS", 256, 66),
    17: Block("IQ2_XS", 256, 74),
    18: Block("IQ3_XXS", 256, 98),
    19: Block("IQ1_S", 256, 50),
    20: Block("IQ4_NL", 32, 18),
    21: Block("IQ3_S", 256, 110),
    22: Block("IQ2_S", 256, 82),
    23: Block("IQ4_XS", 256, 136),
    29: Block("IQ1_M", 256, 56),
    34: Block("TQ1_0", 256, 54),
    35: Block("TQ2_0", 256, 66, grid=_tq2_0),
    39: Block("MXFP4", 32, 17),
}
# Known by name alone.
_OTHERS = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 4: "Q4_2", 5: "Q4_3",
    31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 40: "NVFP4",
}  # fmt: skip


def name_of_kind(kind: int) -> str:
    return BLOCKS[kind].name if kind in BLOCKS else _OTHERS.get(kind, f"the block type {kind}")


def values_from_rows(kind: int, rows: Bytes) -> Array:
    """Returns the values of rows [rows, bytes of a row]: plain types as they are (bfloat16 as uint16), else float32.

    Raises:
        CheckpointError: the package `gguf` is needed and missing.
    """
    block = BLOCKS[kind]
    if block.dtype:
        plain: Array = np.ascontiguousarray(rows).view({"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[block.dtype])
        return plain
    if block.grid is not None:
        return block.grid(in_blocks(kind, rows)).weight()
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as fault:
        todo = f"Run: {install_command('build')}."
        raise CheckpointError(f"blocks of {block.name}", str(fault), "the package gguf", todo) from fault
    with np.errstate(all="ignore"):
        values: Array = dequantize(np.ascontiguousarray(rows), GGMLQuantizationType(kind))
    return values


def in_blocks(kind: int, rows: Bytes) -> Bytes:
    """Returns [rows, blocks, bytes of a block] of [rows, bytes of a row]."""
    return rows.reshape(len(rows), -1, BLOCKS[kind].size_bytes)
