# SPDX-License-Identifier: Apache-2.0
"""Sums and products whose bits depend on the number of rows -> products of which each row has bits of its own.

Sums over the middle axis of [rows, parts, width], as a mixture of experts has, become products of one row of weights
with each row's parts: ONNX Runtime's ReduceSum over it adds in an order that depends on the number of rows (1.31.1 with
8 parts). Weights multiplied in before the sum become that row, others are ones. A product with a matrix for each head
or expert, [.., rows, inner] with [.., inner, width], has another kernel for a single row (1.31.1): it gets its last row
twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from speccompile.passes.base import Property, as_pass
from speccompile.passes.edit import Editor, nodes_of
from speccompile.passes.match import int_attribute, ints, only_use, operands, producer, rank, replace_tree, static_dim


@dataclass(frozen=True)
class _Sum:
    """A sum over the middle axis."""

    node: ir.Node
    parts: ir.Value  # [rows, parts, width], or [rows * parts, width] where `weights` are known
    weights: ir.Value | None  # [rows * parts] that each part is to be multiplied with; None: none
    num_parts: int
    width: int


def _find(node: ir.Node) -> _Sum | None:
    source = node.inputs[0]
    axes = ints(node.inputs[1]) if len(node.inputs) > 1 else None
    if source is None or axes not in ([1], [-2]) or rank(source) != 3 or source.dtype != ir.DataType.FLOAT:
        return None
    num_parts, width = static_dim(source, 1), static_dim(source, 2)
    if num_parts is None or width is None:
        return None
    reshape = producer(source, "Reshape")
    if reshape is not None and only_use(source) is node:
        mul = producer(reshape.inputs[0], "Mul")
        is_only = mul is not None and only_use(mul.outputs[0]) is reshape
        for parts, factor in operands(mul) if is_only else ():
            column = producer(factor, "Unsqueeze")
            is_column = column is not None and rank(column.inputs[0]) == 1 and ints(column.inputs[1]) in ([1], [-1])
            if column is not None and is_column and rank(parts) == 2 and static_dim(parts, 1) == width:
                return _Sum(node, parts, column.inputs[0], num_parts, width)
    return _Sum(node, source, None, num_parts, width)


def _is_batched(node: ir.Node) -> bool:
    a, b = node.inputs
    num = rank(a)
    if a is None or num is None or num < 3 or (rank(b) or 0) < 3 or a.dtype != ir.DataType.FLOAT:
        return False
    return static_dim(a, num - 2) is None and not _has_two(a)


def _has_two(rows: ir.Value) -> bool:
    joined = producer(rows, "Concat")
    last = producer(joined.inputs[1], "Slice") if joined is not None and len(joined.inputs) == 2 else None
    return joined is not None and last is not None and last.inputs[0] is joined.inputs[0]


def _double_last(model: ir.Model, node: ir.Node) -> None:
    edit, (a, b) = Editor(model, node), node.inputs
    axis = (rank(a) or 0) - 2
    last = edit.op("Slice", a, edit.ints([-1]), edit.ints([np.iinfo(np.int64).max]), edit.ints([axis]))
    rows = edit.op("Concat", a, last, axis=axis)
    product = edit.op("MatMul", rows, b)
    for value in (last, rows, product):
        value.type = node.outputs[0].type
    out = edit.op("Slice", product, edit.ints([0]), edit.ints([-1]), edit.ints([axis]))
    out.type, out.shape = node.outputs[0].type, node.outputs[0].shape
    replace_tree(node, out)


def _first_left(model: ir.Model) -> str | None:
    left = next((node for node in nodes_of(model, "ReduceSum") if _find(node) is not None), None)
    if left is not None:
        return f"node {left.name} adds over the middle axis"
    left = next((node for node in nodes_of(model, "MatMul") if _is_batched(node)), None)
    return None if left is None else f"node {left.name} multiplies one row in another way than several"


ROWS_HAVE_THEIR_BITS = Property("rows_have_their_bits", _first_left)


@as_pass(ensures=(ROWS_HAVE_THEIR_BITS,))
def mix_rows(model: ir.Model) -> int:
    """Rewrite every such sum with static parts and width, and every such product; returns their number."""
    batched = [node for node in nodes_of(model, "MatMul") if _is_batched(node)]
    for node in batched:
        _double_last(model, node)
    found = [known for node in nodes_of(model, "ReduceSum") if (known := _find(node)) is not None]
    for known in found:
        edit = Editor(model, known.node)
        if known.weights is None:
            row, parts = (
                edit.const(np.ones((1, 1, known.num_parts), np.float32), f"ones.{known.num_parts}"),
                known.parts,
            )
        else:
            row = edit.op("Reshape", known.weights, edit.ints([-1, 1, known.num_parts]))
            parts = edit.op("Reshape", known.parts, edit.ints([-1, known.num_parts, known.width]))
        out = edit.op("MatMul", row, parts)
        if int_attribute(known.node, "keepdims", 1) == 0:
            out = edit.op("Squeeze", out, edit.ints([1]))
        out.type, out.shape = known.node.outputs[0].type, known.node.outputs[0].shape
        replace_tree(known.node, out)
    return len(found) + len(batched)
