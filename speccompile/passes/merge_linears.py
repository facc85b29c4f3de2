# SPDX-License-Identifier: Apache-2.0
"""Merge linears that read the same input into one MatMul and a Split: QKV, gate and up.

One matrix product has one quantisation of its input and one synchronisation of threads.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import onnx_ir as ir

from speccompile.passes.base import Pass
from speccompile.passes.edit import Editor, sizes_of, weight_of


def merge_linears(model: ir.Model) -> int:
    """Merge MatMuls with weights [in, out] that share their input, and their biases; returns the number of groups."""
    groups: dict[ir.Value, list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        if node.op_type == "MatMul" and node.domain == "" and _is_own_weight(node.inputs[1]):
            source = node.inputs[0]
            assert source is not None
            groups[source].append(node)
    shared = [(source, nodes) for source, nodes in groups.items() if len(nodes) > 1]
    for source, nodes in shared:
        _merge(model, source, nodes)
    return len(shared)


def _is_own_weight(value: ir.Value | None) -> bool:
    weight = weight_of(value)
    return weight is not None and value is not None and len(weight.shape) == 2 and len(list(value.uses())) == 1


def _bias_of(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """Returns the Add after a MatMul and its constant bias [out]; None when there is no such single user."""
    uses = list(node.outputs[0].uses())
    if len(uses) != 1 or uses[0][0].op_type != "Add" or node.outputs[0].is_graph_output():
        return None
    add = uses[0][0]
    bias = add.inputs[1 - uses[0][1]]
    tensor = weight_of(bias)
    return (add, bias) if bias is not None and tensor is not None and len(tensor.shape) == 1 else None


def _merge(model: ir.Model, source: ir.Value, nodes: list[ir.Node]) -> None:
    edit = Editor(model, nodes[0])
    weights = [n.inputs[1] for n in nodes if n.inputs[1] is not None]
    product = edit.op("MatMul", source, _concatenated(edit, weights, axis=1))
    product.type = nodes[0].outputs[0].type
    biases = [_bias_of(n) for n in nodes]
    ends, dead = [n.outputs[0] for n in nodes], list(nodes)
    adds = [b for b in biases if b is not None]
    if len(adds) == len(nodes):
        product = edit.op("Add", product, _concatenated(edit, [bias for _, bias in adds], axis=0))
        ends, dead = [add.outputs[0] for add, _ in adds], [add for add, _ in adds] + dead
    sizes = [sizes_of(w.const_value)[1] for w in weights if w.const_value is not None]
    product.type = ends[0].type
    parts = edit.op("Split", product, edit.ints(sizes), axis=-1, num_outputs=len(sizes))
    for end, part in zip(ends, parts, strict=True):
        part.type, part.shape = end.type, end.shape
        end.replace_all_uses_with(part)
    for node in dead:
        model.graph.remove(node, safe=True)
    for value in dict.fromkeys([*weights, *(bias for _, bias in adds)]):  # biases of zeros may be one value
        if value.name is not None and not list(value.uses()):
            del model.graph.initializers[value.name]


def _concatenated(edit: Editor, values: list[ir.Value], axis: int) -> ir.Value:
    """Returns an initializer of the concatenated values; lazy, so the copy exists only while it is written out."""
    tensors = [v.const_value for v in values if v.const_value is not None]
    shape = list(sizes_of(tensors[0]))
    shape[axis] = sum(sizes_of(t)[axis] for t in tensors)
    name = "+".join(str(v.name) for v in values)

    def concat() -> ir.TensorProtocol:
        return ir.tensor(np.concatenate([t.numpy() for t in tensors], axis=axis))

    return edit.const(ir.LazyTensor(concat, tensors[0].dtype, ir.Shape(shape), name=name), name)


MERGE_LINEARS = Pass("merge_linears", merge_linears)
