# SPDX-License-Identifier: Apache-2.0
"""Flatten, Gemm, restore -> MatMul and Add on the batched tensor: two reshapes fewer for every linear layer."""

from __future__ import annotations

import onnx_ir as ir

from speccompile.passes.base import Pass
from speccompile.passes.edit import Editor
from speccompile.passes.match import int_attribute, only_use, producer, replace_tree, static_dim


def _is_plain(node: ir.Node) -> bool:
    factors = [node.attributes[n].as_float() for n in ("alpha", "beta") if n in node.attributes]
    return all(f == 1.0 for f in factors) and not int_attribute(node, "transA", 0)


def _restored(node: ir.Node, flat: ir.Node) -> ir.Node | None:
    """The Reshape behind the Gemm, when it restores the leading dims that `flat` merged."""
    last, source = only_use(node.outputs[0]), flat.inputs[0]
    if last is None or last.op_type != "Reshape" or last.domain != "" or source is None or source.shape is None:
        return None
    shape = last.outputs[0].shape
    if shape is None or len(shape) != 3 or shape[2] != static_dim(node.outputs[0], 1):
        return None
    return last if list(shape[:2]) == list(source.shape[:2]) and str(shape[0]) != "None" else None


def unflatten_linears(model: ir.Model) -> int:
    """Rewrite every such Gemm; returns their number."""
    count = 0
    for node in [n for n in model.graph if n.op_type == "Gemm" and n.domain == "" and _is_plain(n)]:
        flat = producer(node.inputs[0], "Reshape")
        last = _restored(node, flat) if flat is not None else None
        width = static_dim(node.inputs[0], 1)
        if flat is None or last is None or width is None:
            continue
        edit, source, weight = Editor(model, last), flat.inputs[0], node.inputs[1]
        assert source is not None and source.shape is not None
        if len(source.shape) != 3 or source.shape[2] != width:
            shape = ir.Shape([*source.shape[:2], width])
            source = edit.op("Reshape", source, edit.ints([0, 0, width]))
            source.type, source.shape = node.outputs[0].type, shape
        if int_attribute(node, "transB", 0):
            weight = edit.op("Transpose", weight, perm=[1, 0])
        out = edit.op("MatMul", source, weight)
        out.type, out.shape = last.outputs[0].type, last.outputs[0].shape
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            out = edit.op("Add", out, node.inputs[2])
            out.type, out.shape = last.outputs[0].type, last.outputs[0].shape
        replace_tree(last, out)
        count += 1
    return count


UNFLATTEN_LINEARS = Pass("unflatten_linears", unflatten_linears)
