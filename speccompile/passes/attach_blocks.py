# SPDX-License-Identifier: Apache-2.0
"""Attach weights that were quantised over calibration text to the linears whose weights they are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from speccompile.errors import PassError
from speccompile.passes.base import Pass
from speccompile.passes.compensation import Blocks
from speccompile.passes.edit import nodes_of, sizes_of, weight_of


class BlockTensor(ir.LazyTensor):
    """A weight [in, out] float32 that is held as levels and scales; `numpy` gives what these stand for.

    Args:
        blocks: the quantised weights.
        name: of the initializer.
    """

    def __init__(self, blocks: Blocks, name: str) -> None:
        shape = ir.Shape(blocks.levels.shape)
        super().__init__(lambda: ir.tensor(blocks.weight()), ir.DataType.FLOAT, shape, name=name)
        self.blocks = blocks


def linears_of(model: ir.Model) -> list[tuple[ir.Node, ir.Value]]:
    """Returns the products with constant weights [in, out], each with its weights, in the order of the graph."""
    found = []
    for node in nodes_of(model, "MatMul"):
        value = node.inputs[1]
        weight = weight_of(value)
        if value is not None and value.name is not None and weight is not None and len(weight.shape) == 2:
            found.append((node, value))
    return found


def attach_blocks(model: ir.Model, blocks: Mapping[str, Blocks]) -> int:
    """Replaces the weights of every linear by their `BlockTensor`; returns the number of weights.

    Args:
        model: with linears merged as in the graph that was calibrated.
        blocks: by the name of the weights.

    Raises:
        PassError: a linear was not calibrated, or with weights of another shape.
    """
    values = {str(value.name): value for _, value in linears_of(model)}
    for name, value in values.items():
        weight, found = value.const_value, blocks.get(name)
        assert weight is not None
        if found is None or found.levels.shape != sizes_of(weight):
            got = f"no weights {name}" if found is None else f"{name} of shape {list(found.levels.shape)}"
            expected = f"those of every linear, {name} of shape {list(sizes_of(weight))}"
            raise PassError("pass attach_blocks", got, expected, "Report it with the model's config.")
        value.const_value = BlockTensor(found, name)
    return len(values)


def attach_blocks_pass(blocks: Mapping[str, Blocks]) -> Pass:
    """Returns the pass for quantised weights by the name of the weights."""
    return Pass("attach_blocks", lambda model: attach_blocks(model, blocks))


def quantised_of(weight: ir.TensorProtocol, bits: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the levels [in, out] int8 and scales [blocks, out] float16 attached to a weight; None: there are none.

    Args:
        weight: of a linear.
        bits: 4 or 8; weights are attached for 4.
    """
    return (weight.blocks.levels, weight.blocks.scales) if isinstance(weight, BlockTensor) and bits == 4 else None
