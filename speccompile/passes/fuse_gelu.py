# SPDX-License-Identifier: Apache-2.0
"""x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) -> Gelu(approximate="tanh")."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from speccompile.passes.base import as_pass
from speccompile.passes.edit import Editor
from speccompile.passes.match import replace_tree
from speccompile.passes.rules import Rule


def _tanh_gelu(op: Any, x: Any) -> Any:
    inner = op.Mul(op.Add(x, op.Mul(op.Pow(x, 3.0), 0.044715)), math.sqrt(2 / math.pi))
    return op.Mul(op.Mul(x, 0.5), op.Add(op.Tanh(inner), 1.0))


@as_pass()
def fuse_gelu(model: ir.Model) -> int:
    """Fuse every tanh GELU; returns their number."""
    rule = Rule(_tanh_gelu, lambda x: True, root="Mul")
    found = [(node, match["x"]) for node in model.graph if (match := rule.match(model, node)) is not None]
    for node, x in found:
        fused = Editor(model, node).op("Gelu", x, approximate="tanh")
        fused.type, fused.shape = node.outputs[0].type, node.outputs[0].shape
        replace_tree(node, fused)
    return len(found)
