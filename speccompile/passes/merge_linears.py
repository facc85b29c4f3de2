# SPDX-License-Identifier: Apache-2.0
"""Linears that read the same input become one MatMul and a Split: QKV, gate and up.

One matrix product has one quantisation of its input and one hand-over between threads.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import onnx_ir as ir

from speccompile.passes.base import Pass
from speccompile.passes.edit import Editor, weight_of


def merge_linears(model: ir.Model) -> int:
    """Merge MatMuls with weights [in, out] that share their input; returns how many groups were merged."""
    groups: dict[ir.Value, list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        if node.op_type == "MatMul" and node.domain == "":
            weight = weight_of(node.inputs[1])
            if weight is not None and len(weight.shape) == 2 and len(list(node.inputs[1].uses())) == 1:  # type: ignore[union-attr]
                source = node.inputs[0]
                assert source is not None
                groups[source].append(node)
    merged = 0
    for source, nodes in groups.items():
        if len(nodes) > 1:
            _merge(model, source, nodes)
            merged += 1
    return merged


def _merge(model: ir.Model, source: ir.Value, nodes: list[ir.Node]) -> None:
    values = [n.inputs[1] for n in nodes]
    weights = [v.const_value for v in values if v is not None and v.const_value is not None]
    sizes = [int(w.shape[1]) for w in weights]
    shape = ir.Shape([int(weights[0].shape[0]), sum(sizes)])
    name = "+".join(str(v.name) for v in values if v is not None)

    def concat() -> ir.TensorProtocol:
        return ir.tensor(np.concatenate([w.numpy() for w in weights], axis=1))

    # Lazy: the merged copy lives only while it is written out.
    lazy = ir.LazyTensor(concat, weights[0].dtype, shape, name=name)
    edit = Editor(model, nodes[0])
    product = edit.op("MatMul", source, edit.const(lazy, name))
    product.dtype = weights[0].dtype
    parts = edit.op("Split", product, edit.ints(sizes), axis=-1, num_outputs=len(sizes))
    for node, part, value in zip(nodes, parts, values, strict=True):
        part.dtype, part.shape = node.outputs[0].dtype, node.outputs[0].shape
        node.outputs[0].replace_all_uses_with(part)
        model.graph.remove(node, safe=True)
        assert value is not None and value.name is not None
        del model.graph.initializers[value.name]


MERGE_LINEARS = Pass("merge_linears", merge_linears)
