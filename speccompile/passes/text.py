# SPDX-License-Identifier: Apache-2.0
"""A graph as text: one line a node, values numbered in order of appearance, so that generated names do not matter."""

from __future__ import annotations

import onnx_ir as ir

_MOST_NUMBERS = 4  # of a constant that is written out


def text_from_model(model: ir.Model) -> str:
    """Returns the nodes and the outputs of a graph; of larger weights only dtype and shape."""
    names: dict[ir.Value, str] = {value: str(value.name) for value in model.graph.inputs}

    def name_of(value: ir.Value | None) -> str:
        if value is None:
            return "-"
        if value.is_initializer() and value.const_value is not None:
            tensor = value.const_value
            is_small = tensor.size <= _MOST_NUMBERS
            return str(tensor.numpy().tolist()) if is_small else f"{tensor.dtype.name}{list(tensor.shape)}"
        return names.setdefault(value, f"%{len(names)}")

    lines = []
    for node in model.graph:
        domain = f"{node.domain}::" if node.domain else ""
        attributes = ", ".join(_attribute(attribute) for _, attribute in sorted(node.attributes.items()))
        outputs = ", ".join(map(name_of, node.outputs))
        inputs = ", ".join(map(name_of, node.inputs))
        lines.append(f"{outputs} = {domain}{node.op_type}({inputs})" + (f" {{{attributes}}}" if attributes else ""))
    lines += [f"{value.name} <- {name_of(value)}" for value in model.graph.outputs]
    return "\n".join(lines) + "\n"


def _attribute(attribute: ir.Attr) -> str:
    value = attribute.value
    return f"{attribute.name}={value:g}" if isinstance(value, float) else f"{attribute.name}={value}"
