# SPDX-License-Identifier: Apache-2.0
"""Helpers for matching: the producer of a value, the content of a constant, the order of an operator's operands."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from speccompile.passes.edit import replace

_MAX_SMALL = 4096  # elements; larger constants are weights and are not read


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Returns the producer of `value` where it is a standard-domain node of that operator, otherwise None."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type and node.domain == "" else None


def constant(value: ir.Value | None) -> np.ndarray | None:
    """Returns the array of a small constant; None when `value` is computed, an input, or large."""
    if value is None or value.is_graph_input():
        return None
    tensor = value.const_value
    if tensor is None and (node := producer(value, "Constant")) is not None:
        held = node.attributes.get("value")
        tensor = None if held is None else held.as_tensor()
    return None if tensor is None or tensor.size > _MAX_SMALL else tensor.numpy()


def scalar(value: ir.Value | None) -> float | None:
    array = constant(value)
    return None if array is None or array.size != 1 else float(array.reshape(-1)[0])


def ints(value: ir.Value | None) -> list[int] | None:
    array = constant(value)
    return None if array is None or array.dtype.kind != "i" else [int(i) for i in array.reshape(-1)]


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    """Returns an integer attribute or its default."""
    return node.attributes[name].as_int() if name in node.attributes else default


def operands(node: ir.Node | None) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yields both orders of a commutative operator's two operands; nothing when there is no node."""
    if node is not None and len(node.inputs) == 2:
        first, second = node.inputs
        if first is not None and second is not None:
            yield first, second
            yield second, first


def static_dim(value: ir.Value | None, axis: int) -> int | None:
    if value is None or value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    dim = value.shape[axis]
    return dim if isinstance(dim, int) else None


def rank(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)


def only_use(value: ir.Value) -> ir.Node | None:
    """Returns the one node that reads `value`; None when there are several or it is a graph output."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def slice_bounds(node: ir.Node | None) -> tuple[int, int, int] | None:
    """Returns (axis, start, end) of a Slice along one axis with constant bounds and step 1; axis is at least 0."""
    if node is None or rank(node.inputs[0]) is None:
        return None
    starts, ends = ints(node.inputs[1]), ints(node.inputs[2])
    axes = ints(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else [0]
    steps = ints(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else [1]
    if starts is None or ends is None or axes is None or steps != [1] or len(starts) != 1 or len(axes) != 1:
        return None
    axis = axes[0] % (rank(node.inputs[0]) or 1)
    size = static_dim(node.inputs[0], axis)
    if size is None:
        return None
    start, end = (min(b + size if b < 0 else b, size) for b in (starts[0], ends[0]))
    return axis, start, end


def replace_tree(last: ir.Node, value: ir.Value) -> None:
    """Redirect the uses of `last` to `value`, and remove `last` with all nodes that only it used."""
    queue = [v for v in last.inputs if v is not None]
    replace(last, value)
    while queue:
        node = queue.pop().producer()
        if node is None or node.graph is None or any(o.uses() or o.is_graph_output() for o in node.outputs):
            continue
        queue += [v for v in node.inputs if v is not None]
        assert isinstance(node.graph, ir.Graph)
        node.graph.remove(node, safe=True)
