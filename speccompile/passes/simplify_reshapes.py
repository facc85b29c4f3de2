# SPDX-License-Identifier: Apache-2.0
"""Make computed shapes of Reshapes constant: 0 copies a dim, one -1 is inferred."""

from __future__ import annotations

import onnx_ir as ir

from speccompile.passes.base import as_pass
from speccompile.passes.edit import Editor, replace
from speccompile.passes.match import int_attribute, ints, static_dim


def _constant_shape(node: ir.Node) -> list[int] | None:
    source, result = node.inputs[0], node.outputs[0]
    if source is None or source.shape is None or result.shape is None:
        return None
    wanted: list[int] = []
    for axis, dim in enumerate(result.shape):
        same = axis < len(source.shape) and dim == source.shape[axis]
        if isinstance(dim, int):
            wanted.append(dim)
        elif same and str(dim) != "None":
            wanted.append(0)
        else:
            wanted.append(-1)
    return wanted if wanted.count(-1) <= 1 else None


def _is_same(source: ir.Value, result: ir.Value) -> bool:
    if source.shape is None or result.shape is None or result.is_graph_output():
        return False
    return list(source.shape) == list(result.shape) and all(str(d) != "None" for d in result.shape)


@as_pass()
def simplify_reshapes(model: ir.Model) -> int:
    """Makes shapes constant where they follow from the values' dims; returns how many nodes changed or were no-ops."""
    count = 0
    for node in [n for n in model.graph if n.op_type == "Reshape" and n.domain == ""]:
        source, old = node.inputs[0], node.outputs[0]
        if source is not None and _is_same(source, old):
            replace(node, source)
            count += 1
            continue
        wanted, held = _constant_shape(node), ints(node.inputs[1])
        if wanted is None or (held == wanted and int_attribute(node, "allowzero", 0) == 0):
            continue
        if any(d == 0 and static_dim(node.outputs[0], i) == 0 for i, d in enumerate(wanted)):
            continue  # a dim of size zero cannot be distinguished from "copy"
        edit = Editor(model, node)
        new = edit.op("Reshape", node.inputs[0], edit.ints(wanted))
        new.type, new.shape = old.type, old.shape
        replace(node, new)
        count += 1
    return count
