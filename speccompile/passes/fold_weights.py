# SPDX-License-Identifier: Apache-2.0
"""Fold transposes of weights into the weights: views of the same memory, materialised only while they are written."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from speccompile.passes.base import Property, as_pass
from speccompile.passes.edit import Editor, replace, weight_of


def _find_transposed(model: ir.Model) -> str | None:
    left = [n for n in model.graph if n.op_type == "Transpose" and weight_of(n.inputs[0]) is not None]
    return None if not left else f"{left[0].outputs[0].name} is transposed at run time"


WEIGHTS_FOLDED = Property("weights_folded", _find_transposed)


@as_pass(ensures=(WEIGHTS_FOLDED,))
def fold_weights(model: ir.Model) -> int:
    """Folds every Transpose of an initializer; returns their number. Tied embeddings keep both views."""
    count = 0
    for node in [n for n in model.graph if n.op_type == "Transpose" and n.domain == ""]:
        weight, value = weight_of(node.inputs[0]), node.inputs[0]
        if weight is None or value is None:
            continue
        perm = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else None
        view = np.transpose(weight.numpy(), perm)
        name = f"{value.name}.transposed"
        folded = Editor(model).const(ir.Tensor(view, dtype=weight.dtype, name=name), name)
        replace(node, folded)
        if not value.uses() and not value.is_graph_output() and value.name is not None:
            del model.graph.initializers[value.name]
        count += 1
    return count
