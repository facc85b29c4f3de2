# SPDX-License-Identifier: Apache-2.0
"""Gemm without bias on flat rows -> MatMul, so that the passes on linears find it; a router -> Gemm, so that none does.

Shared experts are exported as Gemm. A router's numbers choose experts: its weights keep float32.
"""

from __future__ import annotations

import onnx_ir as ir

from speccompile.passes.base import as_pass
from speccompile.passes.edit import Editor, nodes_of, replace, sizes_of, weight_of
from speccompile.passes.match import int_attribute, rank


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
    """Returns the products whose results reach a TopK or an ArgMax without another product on the way."""
    found: set[ir.Node] = set()
    choices = [*nodes_of(model, "TopK"), *nodes_of(model, "ArgMax")]
    queue, seen = [node.inputs[0] for node in choices], set[ir.Value]()
    while queue:
        value = queue.pop()
        node = None if value is None or value in seen else value.producer()
        if value is None or node is None:
            continue
        seen.add(value)
        if node.op_type in ("Gemm", "MatMul") and node.domain == "":
            found.add(node)
        elif node.domain == "":
            queue += node.inputs
    return found


@as_pass()
def flat_linears(model: ir.Model) -> int:
    """Rewrite every such Gemm that is no router and every router that is a MatMul; returns their number."""
    routers = routers_of(model)
    linears = [node for node in nodes_of(model, "Gemm") if node not in routers and _is_linear(node)]
    flat = [node for node in nodes_of(model, "MatMul") if node in routers and rank(node.inputs[0]) == 2]
    products = [node for node in flat if weight_of(node.inputs[1]) is not None]
    for node in products:
        out = Editor(model, node).op("Gemm", *node.inputs)
        out.type, out.shape = node.outputs[0].type, node.outputs[0].shape
        replace(node, out)
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
        if str(weight.name) in model.graph.initializers and not weight.uses():
            del model.graph.initializers[str(weight.name)]
    return len(linears) + len(products)


def _transposed(edit: Editor, value: ir.Value) -> ir.Value:
    tensor, name = value.const_value, f"{value.name}.transposed"
    assert tensor is not None
    shape = ir.Shape(sizes_of(tensor)[::-1])
    return edit.const(ir.LazyTensor(lambda: ir.tensor(tensor.numpy().T.copy()), tensor.dtype, shape, name=name), name)
