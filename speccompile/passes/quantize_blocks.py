# SPDX-License-Identifier: Apache-2.0
"""Quantise weights to 4 or 8 bits in blocks of 32 along the input: com.microsoft::MatMulNBits.

Block 32 with accuracy level 4 (8-bit activations per block) gives every row the same bits, however many rows share
the step; larger blocks use different kernels for one row and for several and do not.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from speccompile.passes.attach_blocks import quantised_of
from speccompile.passes.base import Pass
from speccompile.passes.edit import Editor, nodes_of, replace, sizes_of, weight_of

BLOCK = 32
ACCURACY_LEVEL = 4
MAX_SCALE = np.float32(65504)  # of float16


def levels_from_weight(weight: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric rounding in blocks of 32 along the input.

    Args:
        weight: [in, out] float32.
        bits: 4 or 8.

    Returns:
        [in, out] int8 levels and [in / 32 rounded up, out] float16 scales, to which they were rounded before the
        levels were computed; a scale may be negative.
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


def blocks_from_levels(levels: np.ndarray, scales: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Lays quantised weights out as MatMulNBits reads them.

    Args:
        levels: [in, out] int8.
        scales: [in / 32 rounded up, out] float16.
        bits: 4 or 8.

    Returns:
        [out, in / 32 rounded up, 32 * bits / 8] uint8, low nibble first, zero point 2^(bits - 1), and the scales
        [out, blocks] float32.
    """
    num_in, num_out = levels.shape
    stored = np.full((num_out, len(scales) * BLOCK), 1 << (bits - 1), np.uint8)
    stored[:, :num_in] += levels.T.view(np.uint8)  # modulo 256
    rows: np.ndarray = stored.reshape(num_out, len(scales), BLOCK)
    if bits == 4:
        rows = rows[:, :, 0::2] | (rows[:, :, 1::2] << 4)
    return np.ascontiguousarray(rows), np.ascontiguousarray(scales.T.astype(np.float32))


def quantize_blocks(model: ir.Model, bits: int) -> int:
    """Quantise every linear with constant weights [in, out], attached levels first; returns their number."""
    model.opset_imports["com.microsoft"] = 1
    count = 0
    for node in nodes_of(model, "MatMul"):
        source, value = node.inputs
        weight = weight_of(value)
        if weight is None or value is None or value.name is None or len(weight.shape) != 2:
            continue
        quantised = quantised_of(weight, bits) or levels_from_weight(weight.numpy(), bits)
        levels, scale = blocks_from_levels(*quantised, bits)
        num_in, num_out = sizes_of(weight)
        edit = Editor(model, node)
        out = edit.op(
            "MatMulNBits",
            source,
            edit.const(levels, f"{value.name}.int{bits}"),
            edit.const(scale, f"{value.name}.scale"),
            domain="com.microsoft",
            K=num_in,
            N=num_out,
            bits=bits,
            block_size=BLOCK,
            accuracy_level=ACCURACY_LEVEL,
        )
        out.shape, out.dtype = node.outputs[0].shape, node.outputs[0].dtype
        replace(node, out)
        if not list(value.uses()):
            del model.graph.initializers[value.name]
        count += 1
    return count


def quantize_blocks_pass(bits: int) -> Pass:
    """Returns the pass for 4 or 8 bits."""
    return Pass(f"quantize_blocks_int{bits}", lambda model: quantize_blocks(model, bits))
