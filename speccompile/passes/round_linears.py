# SPDX-License-Identifier: Apache-2.0
"""Linears as int4 without a text: weights rounded to the levels of their block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from speccompile.core.specs import LOGITS
from speccompile.ops.grid import Grid
from speccompile.passes.attach_grids import linears_of
from speccompile.passes.compensation import rounded_grid
from speccompile.passes.quantize_blocks import grid_from_weight

_ELEMENTWISE = frozenset({"Add", "Cast", "Div", "Identity", "Mul", "Tanh"})  # between an LM head and its logits


def head_of(model: ir.Model) -> str | None:
    """Returns the name of the weights whose product becomes the logits by elementwise operators; None: none."""
    node = next((node for node in model.graph.all_nodes() if any(v.name == LOGITS for v in node.outputs)), None)
    while node is not None and node.op_type in _ELEMENTWISE:
        computed = [value for value in node.inputs if value is not None and value.producer() is not None]
        node = computed[0].producer() if len(computed) == 1 else None
    return next((str(value.name) for linear, value in linears_of(model) if linear is node), None)


def rounded_grids(model: ir.Model) -> dict[str, Grid]:
    """Returns the grids of a target's linears by the name of their weights; its LM head has 8 bits."""
    head = head_of(model)
    return {
        name: grid_from_weight(weight, 8) if name == head else rounded_grid(weight) for name, weight in _weights(model)
    }


def coarse_grids(model: ir.Model) -> dict[str, Grid]:
    """Returns the grids of all linears by the name of their weights, 4 bits each."""
    return {name: rounded_grid(weight) for name, weight in _weights(model)}


def _weights(model: ir.Model) -> Iterator[tuple[str, np.ndarray]]:
    for value in dict.fromkeys(value for _, value in linears_of(model)):
        if value.const_value is not None:
            yield str(value.name), value.const_value.numpy()
