# SPDX-License-Identifier: Apache-2.0
"""Gemm without bias on flat rows -> MatMul, so that the passes on linears find it.

So are shared experts exported, which stand beside chosen ones and read the same rows. A router is left as it is: its
numbers choose experts, so its weights keep float32.
"""

from __future__ import annotations

import onnx_ir as ir

from speccompile.passes.base import Pass
from speccompile.passes.edit import Editor, nodes_of, replace, sizes_of, weight_of
from speccompile.passes.match import int_attribute


def _is_linear(node: ir.Node) -> bool:
    weight = weight_of(node.inputs[1])
    return (
        weight is not None
        and len(weight.shape) == 2
        and weight.dtype == ir.DataType.FLOAT
        and (len(node.inputs) < 3 or node.inputs[2] is None)
        and int_attribute(node, "transA", 0) == 0
        and all(node.attributes[name].as_float() == 1.0 for name in ("alpha", "beta") if name in node.attributes)
    )


def routers_of(model: ir.Model) -> set[ir.Node]:
    """Returns the Gemm nodes whose results reach a TopK or an ArgMax without another product on the way."""
    found: set[ir.Node] = set()
    choices = [*nodes_of(model, "TopK"), *nodes_of(model, "ArgMax")]
    queue, seen = [node.inputs[0] for node in choices], set[ir.Value]()
    while queue:
        value = queue.pop()
        node = None if value is None or value in seen else value.producer()
        if value is None or node is None:
            continue
        seen.add(value)
        if node.op_type == "Gemm" and node.domain == "":
            found.add(node)
        elif node.op_type != "MatMul" and node.domain == "":
            queue += node.inputs
    return found


def flat_linears(model: ir.Model) -> int:
    """Rewrite every such Gemm that is no router; returns their number."""
    routers = routers_of(model)
    linears = [node for node in nodes_of(model, "Gemm") if node not in routers and _is_linear(node)]
    made: dict[ir.Value, ir.Value] = {}
    for node in linears:
        edit, weight = Editor(model, node), node.inputs[1]
        assert weight is not None
        if int_attribute(node, "transB", 0):
            if weight not in made:
                made[weight] = _transposed(edit, weight)
            weight = made[weight]
        out = edit.op("MatMul", node.inputs[0], weight)
        out.type, out.shape = node.outputs[0].type, node.outputs[0].shape
        replace(node, out)
    for weight in made:
        if weight.name in model.graph.initializers and not weight.uses():
            del model.graph.initializers[weight.name]
    return len(linears)


def _transposed(edit: Editor, value: ir.Value) -> ir.Value:
    tensor, name = value.const_value, f"{value.name}.transposed"
    assert tensor is not None
    shape = ir.Shape(sizes_of(tensor)[::-1])
    return edit.const(ir.LazyTensor(lambda: ir.tensor(tensor.numpy().T.copy()), tensor.dtype, shape, name=name), name)


FLAT_LINEARS = Pass("flat_linears", flat_linears)
