# SPDX-License-Identifier: Apache-2.0
"""Helpers for writing passes: insert nodes, make constants, look values up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import onnx_ir as ir

from speccompile.ops.cached_attention import ATTENTION_OPS, SHARED_ATTENTION

OPS_DOMAIN = "speccompile"


class Editor:
    """Inserts nodes right before an anchor node; None: at the end of the graph."""

    def __init__(self, model: ir.Model, anchor: ir.Node | None = None) -> None:
        self.model, self.graph, self.anchor = model, model.graph, anchor

    def op(
        self, op_type: str, *inputs: ir.Value | None, domain: str = "", num_outputs: int = 1, **attributes: Any
    ) -> Any:
        """Add a node; returns its output, or the list of its outputs when there are several."""
        attrs = ir.convenience.convert_attributes(attributes)
        node = ir.Node(domain, op_type, list(inputs), attrs, num_outputs=num_outputs)
        if self.anchor is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.anchor, node)
        return node.outputs[0] if num_outputs == 1 else list(node.outputs)

    def const(self, array: np.ndarray | np.generic | ir.TensorProtocol, name: str) -> ir.Value:
        """Register an initializer; a name in use gets a number, an equal small constant is shared."""
        if isinstance(array, np.generic):
            array = np.asarray(array)
        tensor = ir.tensor(array, name=name) if isinstance(array, np.ndarray) else array
        base, number = name, 0
        while name in self.graph.initializers:
            if isinstance(array, np.ndarray) and _is_same(self.graph.initializers[name], array):
                return self.graph.initializers[name]
            number += 1
            name = f"{base}.{number}"
        value = ir.Value(
            name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(sizes_of(tensor)), const_value=tensor
        )
        self.graph.register_initializer(value)
        return value

    def ints(self, values: Sequence[int] | int) -> ir.Value:
        """Returns an int64 constant, shared between its users."""
        array = np.asarray(values, np.int64)
        return self.const(array, "int64." + "_".join(map(str, array.reshape(-1).tolist())) + f".{array.ndim}d")


def _is_same(value: ir.Value, array: np.ndarray) -> bool:
    tensor = value.const_value
    if tensor is None or tuple(tensor.shape) != array.shape or array.size > 64:
        return False
    held = tensor.numpy()
    return bool(held.dtype == array.dtype and np.array_equal(held, array))


def nodes_of(model: ir.Model, op_type: str, domain: str = "") -> list[ir.Node]:
    return [n for n in model.graph if n.op_type == op_type and n.domain == domain]


def attentions_of(model: ir.Model) -> list[ir.Node]:
    """Returns the main graph's attentions over its own caches, with and without sinks, in order."""
    return [n for n in model.graph if n.op_type in ATTENTION_OPS and n.domain == OPS_DOMAIN]


def shared_attentions_of(model: ir.Model) -> list[ir.Node]:
    """Returns the main graph's attentions over caches that other layers write, in order."""
    return nodes_of(model, SHARED_ATTENTION.name, OPS_DOMAIN)


def sinks_of(node: ir.Node) -> ir.Value | None:
    """Returns the sinks [heads] of an attention of `attentions_of`; None where it has none."""
    return node.inputs[7] if len(node.inputs) > 7 else None


def input_of(model: ir.Model, name: str) -> ir.Value:
    return {v.name: v for v in model.graph.inputs}[name]


def add_input(model: ir.Model, name: str, dims: Sequence[str | int], dtype: str, before: int | None = None) -> ir.Value:
    element = ir.DataType[dtype.upper() if dtype != "float32" else "FLOAT"]
    value = ir.Value(name=name, type=ir.TensorType(element), shape=ir.Shape(list(dims)))
    model.graph.inputs.insert(len(model.graph.inputs) if before is None else before, value)
    return value


def replace(node: ir.Node, *values: ir.Value) -> None:
    """Redirect the uses of the node's outputs to `values`, graph outputs included, and remove the node."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    for old, new in zip(node.outputs, values, strict=True):
        for position, output in enumerate(graph.outputs):
            if output is old:
                new.name, new.shape, new.type = old.name, old.shape, old.type
                graph.outputs[position] = new
        old.replace_all_uses_with(new)
    graph.remove(node, safe=True)


def weight_of(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Returns the tensor of an initializer that is not also a graph input; None for anything else."""
    if value is None or not value.is_initializer() or value.is_graph_input():
        return None
    return value.const_value


def sizes_of(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    return tuple(cast(int, dim) for dim in tensor.shape)
