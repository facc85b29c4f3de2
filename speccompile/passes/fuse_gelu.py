# SPDX-License-Identifier: Apache-2.0
"""x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) -> Gelu(approximate="tanh")."""

from __future__ import annotations

import math

import onnx_ir as ir

from speccompile.passes.base import Pass
from speccompile.passes.edit import Editor
from speccompile.passes.match import operands, producer, replace_tree, scalar

_FACTOR = math.sqrt(2 / math.pi)
_TOLERANCE = 1e-6  # of the constants: they stand in the graph in float32


def _scaled(value: ir.Value | None, factor: float) -> ir.Value | None:
    """The v of a `value` that is v * factor."""
    for operand, constant in operands(producer(value, "Mul")):
        held = scalar(constant)
        if held is not None and abs(held - factor) < _TOLERANCE:
            return operand
    return None


def _inner(value: ir.Value | None) -> ir.Value | None:
    """The x of a `value` that is sqrt(2 / pi) * (x + 0.044715 x^3)."""
    for x, cubic in operands(producer(_scaled(value, _FACTOR), "Add")):
        power = producer(_scaled(cubic, 0.044715), "Pow")
        if power is not None and power.inputs[0] is x and scalar(power.inputs[1]) == 3.0:
            return x
    return None


def _match(node: ir.Node) -> ir.Value | None:
    if node.op_type != "Mul" or node.domain != "":
        return None
    for half, gate in operands(node):
        for tanh, one in operands(producer(gate, "Add")):
            bent = producer(tanh, "Tanh")
            x = _inner(bent.inputs[0]) if bent is not None and scalar(one) == 1.0 else None
            if x is not None and _scaled(half, 0.5) is x:
                return x
    return None


def fuse_gelu(model: ir.Model) -> int:
    """Fuse every tanh GELU; returns their number."""
    found = [(n, x) for n in model.graph if (x := _match(n)) is not None]
    for node, x in found:
        fused = Editor(model, node).op("Gelu", x, approximate="tanh")
        fused.type, fused.shape = node.outputs[0].type, node.outputs[0].shape
        replace_tree(node, fused)
    return len(found)


FUSE_GELU = Pass("fuse_gelu", fuse_gelu)
