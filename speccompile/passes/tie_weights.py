# SPDX-License-Identifier: Apache-2.0
"""Replace a weight that is another one's transposed view by a Transpose of it, so that a plan stores it once."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from speccompile.passes.attach_grids import linears_of, table_of
from speccompile.passes.base import as_pass
from speccompile.passes.edit import Editor, nodes_of, replace, sizes_of
from speccompile.passes.match import rank

_MIN_ELEMENTS = 4096  # smaller weights do not justify a node


def _key(array: np.ndarray) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return int(array.__array_interface__["data"][0]), array.shape, array.strides


@as_pass()
def tie_weights(model: ir.Model) -> int:
    """Replace every such weight; returns their number. Views are found by their address, not compared."""
    matrices = [v for v in model.graph.initializers.values() if _is_matrix(v)]
    held = {_key(v.const_value.numpy()): v for v in matrices if v.const_value is not None}
    count = 0
    for value in matrices:
        assert value.const_value is not None and value.name is not None
        array = value.const_value.numpy()
        other = held.get(_key(array.T))
        if other is None or other is value or array.flags.c_contiguous:
            continue
        uses = list(value.uses())
        for user, index in uses:
            turned = Editor(model, user).op("Transpose", other, perm=[1, 0])
            turned.type, turned.shape = ir.TensorType(value.const_value.dtype), value.shape
            user.replace_input_with(index, turned)
        del model.graph.initializers[value.name]
        count += 1
    return count


def _is_matrix(value: ir.Value) -> bool:
    tensor = value.const_value
    if tensor is None or len(tensor.shape) != 2 or tensor.size < _MIN_ELEMENTS or not value.uses():
        return False
    return not isinstance(tensor, ir.LazyTensor)  # each view of these is a new object


_ROWS_AT_ONCE = 4096


def _is_tied(table: ir.Value, value: ir.Value) -> bool:
    first, second = table.const_value, value.const_value
    assert first is not None and second is not None
    if sizes_of(first) != sizes_of(second)[::-1] or first.dtype != second.dtype:
        return False
    rows, columns = first.numpy(), second.numpy()
    if rows.ctypes.data == columns.ctypes.data and rows.strides == columns.strides[::-1]:
        return True
    blocks = (slice(start, start + _ROWS_AT_ONCE) for start in range(0, len(rows), _ROWS_AT_ONCE))
    return all(np.array_equal(rows[block], columns[:, block].T) for block in (slice(0, 1), *blocks))


@as_pass()
def tie_embedding(model: ir.Model) -> int:
    """Replace each Gather of a table that is a linear's transposed weight by one of columns; returns their number."""
    gathers = [node for node in nodes_of(model, "Gather") if table_of(node) is not None and rank(node.inputs[1])]
    values = list(dict.fromkeys(value for _, value in linears_of(model))) if gathers else []
    count = 0
    for node in gathers:
        table, tokens = node.inputs
        assert table is not None and tokens is not None
        if (tied := next((value for value in values if _is_tied(table, value)), None)) is None:
            continue
        edit, num_dims = Editor(model, node), rank(tokens) or 0
        columns = edit.op("Gather", tied, tokens, axis=1)
        columns.type = table.type
        rows = edit.op("Transpose", columns, perm=[*range(1, num_dims + 1), 0])
        rows.type, rows.shape = node.outputs[0].type, node.outputs[0].shape
        replace(node, rows)
        if not list(table.uses()) and table.name is not None:
            del model.graph.initializers[table.name]
        count += 1
    return count
