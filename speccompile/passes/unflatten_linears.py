# SPDX-License-Identifier: Apache-2.0
"""Flatten, Gemm, restore -> MatMul and Add on the batched tensor: two reshapes fewer for every linear layer."""

from __future__ import annotations

import onnx_ir as ir

from speccompile.passes.base import as_pass
from speccompile.passes.edit import Editor
from speccompile.passes.match import int_attribute, only_use, producer, replace_tree, static_dim


def _is_plain(node: ir.Node) -> bool:
    factors = [node.attributes[n].as_float() for n in ("alpha", "beta") if n in node.attributes]
    return all(f == 1.0 for f in factors) and not int_attribute(node, "transA", 0)


def _restored(node: ir.Node, flat: ir.Node) -> ir.Node | None:
    last, source = only_use(node.outputs[0]), flat.inputs[0]
    if last is None or last.op_type != "Reshape" or last.domain != "" or source is None or source.shape is None:
        return None
    shape = last.outputs[0].shape
    if shape is None or len(shape) != 3 or shape[2] != static_dim(node.outputs[0], 1):
        return None
    return last if list(shape[:2]) == list(source.shape[:2]) and str(shape[0]) != "None" else None


@as_pass()
def unflatten_linears(model: ir.Model) -> int:
    """Rewrites every such Gemm; returns their number. One without bias that stays flat is a small router, and stays."""
    count = 0
    for node in [n for n in model.graph if n.op_type == "Gemm" and n.domain == "" and _is_plain(n)]:
        flat = producer(node.inputs[0], "Reshape")
        last = _restored(node, flat) if flat is not None else None
        width = static_dim(node.inputs[0], 1)
        has_bias = len(node.inputs) > 2 and node.inputs[2] is not None
        if width is None or (last is None and not has_bias):
            continue
        source = node.inputs[0] if last is None or flat is None else _batched(model, flat, last, width)
        _make_linear(model, node, last or node, source)
        count += 1
    return count


def _batched(model: ir.Model, flat: ir.Node, last: ir.Node, width: int) -> ir.Value:
    source = flat.inputs[0]
    assert source is not None and source.shape is not None
    if len(source.shape) == 3 and source.shape[2] == width:
        return source
    edit = Editor(model, last)
    batched: ir.Value = edit.op("Reshape", source, edit.ints([0, 0, width]))
    batched.type, batched.shape = flat.outputs[0].type, ir.Shape([*source.shape[:2], width])
    return batched


def _make_linear(model: ir.Model, gemm: ir.Node, last: ir.Node, source: ir.Value | None) -> None:
    edit, weight, result = Editor(model, last), gemm.inputs[1], last.outputs[0]
    if int_attribute(gemm, "transB", 0):
        weight = edit.op("Transpose", weight, perm=[1, 0])
    out = edit.op("MatMul", source, weight)
    out.type, out.shape = result.type, result.shape
    if len(gemm.inputs) > 2 and gemm.inputs[2] is not None:
        out = edit.op("Add", out, gemm.inputs[2])
        out.type, out.shape = result.type, result.shape
    replace_tree(last, out)
