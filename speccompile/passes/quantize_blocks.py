# SPDX-License-Identifier: Apache-2.0
"""Quantise weights to 4 or 8 bits in blocks of 32 along the input: com.microsoft::MatMulNBits.

Block 32 with accuracy level 4 (8-bit activations per block) gives every row the same bits, however many rows share
the step; larger blocks use different kernels for one row and for several and do not.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from speccompile.passes.base import Pass
from speccompile.passes.edit import Editor, nodes_of, replace, sizes_of, weight_of

BLOCK = 32
ACCURACY_LEVEL = 4


def blocks_from_weight(weight: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric block quantisation.

    Args:
        weight: [in, out] float32.
        bits: 4 or 8.

    Returns:
        [out, in / 32 rounded up, 32 * bits / 8] uint8, low nibble first, zero point 2^(bits - 1), and the scales
        [out, blocks] float32.
    """
    num_in, num_out = weight.shape
    num_blocks = -(-num_in // BLOCK)
    padded = np.zeros((num_out, num_blocks * BLOCK), np.float32)
    padded[:, :num_in] = weight.T
    rows = padded.reshape(num_out, num_blocks, BLOCK)
    middle = 1 << (bits - 1)
    # The value of largest magnitude maps to -middle, the one level without a positive counterpart.
    index = np.abs(rows).argmax(axis=2, keepdims=True)
    peak = np.take_along_axis(rows, index, axis=2)
    scale = (peak / np.float32(-middle)).astype(np.float32)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    levels = np.clip(np.rint(rows * inverse) + middle, 0, 2 * middle - 1).astype(np.uint8)
    if bits == 4:
        levels = levels[:, :, 0::2] | (levels[:, :, 1::2] << 4)
    return np.ascontiguousarray(levels), np.ascontiguousarray(scale[:, :, 0])


def quantize_blocks(model: ir.Model, bits: int) -> int:
    """Quantise every linear with constant weights [in, out]; returns their number."""
    model.opset_imports["com.microsoft"] = 1
    count = 0
    for node in nodes_of(model, "MatMul"):
        source, value = node.inputs
        weight = weight_of(value)
        if weight is None or value is None or value.name is None or len(weight.shape) != 2:
            continue
        levels, scale = blocks_from_weight(weight.numpy(), bits)
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
