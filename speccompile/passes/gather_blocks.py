# SPDX-License-Identifier: Apache-2.0
"""Gather the rows of a tied embedding from the quantised weights of the LM head that ONNX Runtime multiplies with."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from speccompile.passes.base import as_pass
from speccompile.passes.edit import Editor, nodes_of, replace, sizes_of
from speccompile.passes.match import int_attribute, only_use, rank


def _unpacked(edit: Editor, bytes_: ir.Value, bits: int, num_dims: int, width: int) -> ir.Value:
    levels = bytes_
    if bits == 4:
        low = edit.op("BitwiseAnd", bytes_, edit.const(np.uint8(15), "uint8.15"))
        high = edit.op("BitShift", bytes_, edit.const(np.uint8(4), "uint8.4"), direction="RIGHT")
        halves = [edit.op("Unsqueeze", half, edit.ints([-1])) for half in (low, high)]
        levels = edit.op("Concat", *halves, axis=-1)
        levels = edit.op("Reshape", levels, edit.ints([*[0] * num_dims, -1]))
        levels = edit.op("Slice", levels, edit.ints([0]), edit.ints([width]), edit.ints([-1]))
    wide: ir.Value = edit.op("Cast", levels, to=ir.DataType.FLOAT)
    return wide


def _rows_of_blocks(edit: Editor, product: ir.Node, rest: ir.Value | None, tokens: ir.Value) -> ir.Value:
    """Returns rows [..., K] of what MatMulNBits multiplies with."""
    bits, block = int_attribute(product, "bits", 4), int_attribute(product, "block_size", 32)
    num_dims, (levels, scales) = rank(tokens) or 0, product.inputs[1:3]
    assert levels is not None and levels.const_value is not None
    num_groups = sizes_of(levels.const_value)[1]
    numbers = _unpacked(edit, edit.op("Gather", levels, tokens, axis=0), bits, num_dims + 1, block)
    zero_points = product.inputs[3] if len(product.inputs) > 3 else None
    if zero_points is None:
        numbers = edit.op("Sub", numbers, edit.const(np.float32(1 << (bits - 1)), f"float.{1 << (bits - 1)}"))
    else:
        zeros = _unpacked(edit, edit.op("Gather", zero_points, tokens, axis=0), bits, num_dims, num_groups)
        numbers = edit.op("Sub", numbers, edit.op("Unsqueeze", zeros, edit.ints([-1])))
    steps = edit.op("Unsqueeze", edit.op("Gather", scales, tokens, axis=0), edit.ints([-1]))
    numbers = edit.op("Mul", numbers, steps)
    if rest is not None:
        columns = edit.op("Transpose", edit.op("Gather", rest, tokens, axis=1), perm=[*range(1, num_dims + 1), 0])
        numbers = edit.op("Add", numbers, edit.op("Unsqueeze", columns, edit.ints([-1])))
    flat = edit.op("Reshape", numbers, edit.ints([*[0] * num_dims, -1]))
    ends = edit.ints([int_attribute(product, "K", 0)])
    rows: ir.Value = edit.op("Slice", flat, edit.ints([0]), ends, edit.ints([-1]))
    return rows


def _rows_of_levels(edit: Editor, product: ir.Node, tokens: ir.Value) -> ir.Value:
    num_dims = rank(tokens) or 0
    columns = edit.op("Gather", product.inputs[1], tokens, axis=1)
    levels = edit.op("Cast", edit.op("Transpose", columns, perm=[*range(1, num_dims + 1), 0]), to=ir.DataType.FLOAT)
    steps = edit.op("Gather", product.inputs[3], tokens, axis=0)
    steps = edit.op("Mul", steps, edit.const(np.float32(127), "int8.levels"))
    rows: ir.Value = edit.op("Mul", levels, edit.op("Unsqueeze", steps, edit.ints([-1])))
    return rows


@as_pass()
def gather_blocks(model: ir.Model) -> int:
    """Replace gathers of the columns of a quantised weight, after `tie_embedding`; returns their number."""
    products = {
        str(node.inputs[1].name): node
        for op in ("MatMulNBits", "MatMulIntegerToFloat")
        for node in nodes_of(model, op, "com.microsoft")
        if node.inputs[1] is not None
    }
    count = 0
    for node in nodes_of(model, "Gather"):
        value, tokens = node.inputs
        turn = only_use(node.outputs[0])
        if value is None or tokens is None or turn is None or turn.op_type != "Transpose":
            continue
        product = products.get(f"{value.name}.int4") or products.get(f"{value.name}.int8")
        if product is None or int_attribute(node, "axis", 0) != 1:
            continue
        edit, rest = Editor(model, node), model.graph.initializers.get(f"{value.name}.rest")
        is_blocks = product.op_type == "MatMulNBits"
        rows = _rows_of_blocks(edit, product, rest, tokens) if is_blocks else _rows_of_levels(edit, product, tokens)
        rows.type, rows.shape = turn.outputs[0].type, turn.outputs[0].shape
        replace(turn, rows)
        model.graph.remove(node, safe=True)
        if not list(value.uses()):
            model.graph.initializers.pop(str(value.name), None)
        count += 1
    return count
