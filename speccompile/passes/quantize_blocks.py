# SPDX-License-Identifier: Apache-2.0
"""Quantise weights to 4 or 8 bits in blocks along the input: com.microsoft::MatMulNBits.

Blocks of 32 with accuracy level 4 (8-bit activations per block) give every row the same bits, however many share the
step, but for int4 on a CPU with AVX2 and without VNNI (docs/explanation/lossless.md). Blocks of other sizes use
different kernels for one row and for several.
"""

from __future__ import annotations

from dataclasses import replace as replaced

import numpy as np
import onnx_ir as ir

from speccompile.ops.grid import Array, Grid
from speccompile.passes.attach_grids import grid_of, linears_of
from speccompile.passes.base import Pass
from speccompile.passes.edit import Editor, replace

BLOCK = 32
ACCURACY_LEVEL = 4
MAX_SCALE = np.float32(65504)  # of float16


def levels_from_weight(weight: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric rounding of `weight` [in, out] to 4 or 8 bits in blocks of 32 along the input.

    Returns:
        [in, out] int8 levels and [in / 32 rounded up, out] float16 scales, to which they were rounded before the levels
        were computed; a scale may be negative.
    """
    num_in, num_out = weight.shape
    padded = np.pad(weight, ((0, -num_in % BLOCK), (0, 0))).reshape(-1, BLOCK, num_out)
    middle = 1 << (bits - 1)
    # The value of largest magnitude maps to -middle, the one level without a positive counterpart.
    index = np.abs(padded).argmax(axis=1, keepdims=True)
    peak = np.take_along_axis(padded, index, axis=1)
    scales = np.clip(peak / np.float32(-middle), -MAX_SCALE, MAX_SCALE).astype(np.float16)
    wide = scales.astype(np.float32)
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide != 0)
    levels = np.clip(np.rint(padded * inverse), -middle, middle - 1).astype(np.int8)
    return levels.reshape(-1, num_out)[:num_in], scales[:, 0]


def grid_from_weight(weight: np.ndarray, bits: int) -> Grid:
    """Returns weights [in, out] float32 rounded by `levels_from_weight`."""
    levels, scales = levels_from_weight(weight, bits)
    middle = 1 << (bits - 1)
    return Grid((levels.T.astype(np.int16) + middle).astype(np.uint8), scales.T, BLOCK, bits, middle)


def zeros_and_rest(grid: Grid) -> tuple[Array, Array | None]:
    """Returns zero points [out, groups] uint8, and what they leave of the minimums; None: nothing.

    A weight is scale * (level - zero) + rest. The zero point is the level nearest to 0, so that multiplied levels are
    small; 0 where float32 does not hold the rest.
    """
    if grid.minimums is None:
        return np.full(grid.scales.shape, grid.zero, np.uint8), None
    scales, minimums = grid.scales.astype(np.float64), grid.minimums.astype(np.float64)
    ratio = np.divide(-minimums, scales, out=np.zeros_like(scales), where=scales != 0)
    zeros = np.clip(np.rint(ratio), 0, (1 << grid.bits) - 1)
    rest = minimums + zeros * scales
    is_exact = rest.astype(np.float32) == rest
    zeros, rest = np.where(is_exact, zeros, 0), np.where(is_exact, rest, minimums).astype(np.float32)
    return zeros.astype(np.uint8), rest if rest.any() else None


def in_blocks(grid: Grid) -> Grid:
    """Returns the same weights in groups of `BLOCK` inputs, or of 16 where a grid has these."""
    kind = grid.kind
    return grid if kind.group in (16, BLOCK) else grid.to(replaced(kind, group=BLOCK))


def pack_rows(numbers: Array, bits: int) -> Array:
    """Returns [..., n] uint8 below 2^bits, of 4 bits with two in a byte, the first in the low bits."""
    if bits == 8:
        return np.ascontiguousarray(numbers)
    even = np.pad(numbers, [*[(0, 0)] * (numbers.ndim - 1), (0, numbers.shape[-1] % 2)])
    return np.ascontiguousarray(even[..., 0::2] | (even[..., 1::2] << 4))


def _product(edit: Editor, source: ir.Value, grid: Grid, name: str) -> ir.Value:
    """Returns x [..., in] times the weights of a grid in blocks."""
    num_out, num_in = grid.levels.shape
    bits, num_groups = 4 if grid.bits <= 4 else 8, grid.scales.shape[1]
    levels = np.full((num_out, num_groups * grid.group), 1 << (bits - 1), np.uint8)
    levels[:, :num_in] = grid.levels
    zeros, rest = zeros_and_rest(grid)
    default = 1 << (bits - 1)
    out: ir.Value = edit.op(
        "MatMulNBits",
        source,
        edit.const(pack_rows(levels.reshape(num_out, num_groups, grid.group), bits), f"{name}.int{bits}"),
        edit.const(np.ascontiguousarray(grid.scales, np.float32), f"{name}.scale"),
        *([] if (zeros == default).all() else [edit.const(pack_rows(zeros, bits), f"{name}.zero")]),
        domain="com.microsoft",
        K=num_in,
        N=num_out,
        bits=bits,
        block_size=grid.group,
        accuracy_level=ACCURACY_LEVEL,
    )
    if rest is None:
        return out
    shares = edit.op("MatMul", _sums(edit, source, grid), edit.const(rest.T.copy(), f"{name}.rest"))
    total: ir.Value = edit.op("Add", out, shares)
    return total


def _sums(edit: Editor, source: ir.Value, grid: Grid) -> ir.Value:
    num_in, rank = grid.levels.shape[1], len(source.shape or (0, 0, 0))
    if padding := -num_in % grid.group:
        source = edit.op("Pad", source, edit.ints([*[0] * (2 * rank - 1), padding]))
    parts = edit.op("Reshape", source, edit.ints([*[0] * (rank - 1), -1, grid.group]))
    sums: ir.Value = edit.op("ReduceSum", parts, edit.ints([-1]), keepdims=0)
    return sums


def quantize_blocks(model: ir.Model, bits: int | None) -> int:
    """Quantises linears with constant weights [in, out]; returns their number.

    Args:
        bits: 4 or 8 of weights to which no grid is attached; None: these stay as they are.
    """
    model.opset_imports["com.microsoft"] = 1
    count = 0
    for node, value in linears_of(model):
        weight, source = value.const_value, node.inputs[0]
        assert weight is not None and source is not None
        grid = grid_of(weight) or (None if bits is None else grid_from_weight(weight.numpy(), bits))
        if grid is None:
            continue
        out = _product(Editor(model, node), source, in_blocks(grid), str(value.name))
        out.shape, out.type = node.outputs[0].shape, node.outputs[0].type
        replace(node, out)
        if not list(value.uses()):
            del model.graph.initializers[str(value.name)]
        count += 1
    return count


def quantize_blocks_pass(bits: int | None) -> Pass:
    """Returns the pass for 4 or 8 bits; None: for the weights that come quantised."""
    return Pass(f"quantize_blocks{'' if bits is None else f'_int{bits}'}", lambda model: quantize_blocks(model, bits))
