# SPDX-License-Identifier: Apache-2.0
"""Fold the scale of the scores into Q's weights: TensorRT would multiply the whole K cache by it.

Between the projection and the attention there are only linear steps, or a norm whose gain takes the factor: a chain of
any length, which no pattern of `passes.rules` expresses. The product is formed in float32.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from speccompile.passes.base import as_pass
from speccompile.passes.edit import (
    OPS_DOMAIN,
    Editor,
    attentions_of,
    nodes_of,
    shared_attentions_of,
    sizes_of,
    weight_of,
)
from speccompile.passes.match import only_use

_LINEAR = ("RotaryEmbedding", "Transpose", "Reshape")  # and the norms, whose gain is scaled


def _factors(query: ir.Value) -> list[tuple[ir.Node, int]] | None:
    """Returns (node, input index) of the weights that scale `query`; None where the chain has other operators."""
    found: list[tuple[ir.Node, int]] = []
    value = query
    while (node := value.producer()) is not None and node.domain == "" and only_use(value) is not None:
        if node.op_type in _LINEAR:
            source = node.inputs[0]
        elif node.op_type == "Add":
            index = next((i for i in (0, 1) if weight_of(node.inputs[i]) is not None), None)
            if index is None:
                return None
            found.append((node, index))
            source = node.inputs[1 - index]
        elif node.op_type in ("RMSNormalization", "MatMul"):
            return [*found, (node, 1)] if weight_of(node.inputs[1]) is not None else None
        else:
            return None
        assert source is not None
        value = source
    return None


def _scaled(model: ir.Model, value: ir.Value, scale: float) -> ir.Value:
    tensor, name = weight_of(value), f"{value.name}.scaled"
    assert tensor is not None

    def product() -> ir.TensorProtocol:
        return ir.tensor(np.asarray(tensor.numpy() * np.float32(scale), np.float32), name=name)

    return Editor(model).const(ir.LazyTensor(product, tensor.dtype, ir.Shape(sizes_of(tensor)), name=name), name)


@as_pass()
def fold_scale(model: ir.Model) -> int:
    """Fold the scale of every attention of ours whose Q has a projection of its own; returns their number."""
    count = 0
    readers = [*shared_attentions_of(model), *nodes_of(model, "CrossAttention", OPS_DOMAIN)]
    for node in [*attentions_of(model), *readers]:
        scale = node.attributes["scale"].as_float()
        query = node.inputs[0]
        assert query is not None
        factors = _factors(query) if scale != 1 else None
        if factors is None:
            continue
        for user, index in factors:
            weight = user.inputs[index]
            assert weight is not None
            user.replace_input_with(index, _scaled(model, weight, scale))
        node.attributes["scale"] = ir.AttrFloat32("scale", 1.0)
        count += 1
    return count
