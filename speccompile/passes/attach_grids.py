# SPDX-License-Identifier: Apache-2.0
"""Attach quantised weights to the linears whose weights they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from speccompile.errors import PassError
from speccompile.ops.grid import Grid
from speccompile.passes.base import Pass
from speccompile.passes.edit import nodes_of, sizes_of, weight_of


class GridTensor(ir.LazyTensor):
    """A weight [in, out] float32 that is held as a grid; `numpy` gives what the grid stands for.

    Args:
        read: returns the grid [out, in]; called each time that it is needed, so that no copy stays in memory.
        shape: [in, out].
        name: of the initializer.
    """

    def __init__(self, read: Callable[[], Grid], shape: tuple[int, ...], name: str) -> None:
        super().__init__(lambda: ir.tensor(read().weight().T.copy()), ir.DataType.FLOAT, ir.Shape(shape), name=name)
        self.read = read


def grid_of(weight: ir.TensorProtocol | None) -> Grid | None:
    """Returns the grid [out, in] attached to a weight [in, out]; None: there is none."""
    return weight.read() if isinstance(weight, GridTensor) else None


def linears_of(model: ir.Model) -> list[tuple[ir.Node, ir.Value]]:
    """Returns the products with constant weights [in, out], each with its weights, in the order of the graph."""
    found = []
    for node in nodes_of(model, "MatMul"):
        value = node.inputs[1]
        weight = weight_of(value)
        if value is not None and value.name is not None and weight is not None and len(weight.shape) == 2:
            found.append((node, value))
    return found


def attach_grids(model: ir.Model, grids: Mapping[str, Grid]) -> int:
    """Replaces the weights of every linear by their `GridTensor`; returns the number of weights.

    Args:
        model: with linears merged as in the graph that was calibrated.
        grids: by the name of the weights.

    Raises:
        PassError: a linear was not calibrated, or with weights of another shape.
    """
    values = {str(value.name): value for _, value in linears_of(model)}
    for name, value in values.items():
        weight, found = value.const_value, grids.get(name)
        assert weight is not None
        num_in, num_out = sizes_of(weight)
        if found is None or found.levels.shape != (num_out, num_in):
            got = f"no weights {name}" if found is None else f"{name} of shape {list(found.levels.shape[::-1])}"
            expected = f"those of every linear, {name} of shape {[num_in, num_out]}"
            raise PassError("pass attach_grids", got, expected, "Report it with the model's config.")
        value.const_value = GridTensor(lambda found=found: found, (num_in, num_out), name)  # type: ignore[misc]
    return len(values)


def attach_grids_pass(grids: Mapping[str, Grid]) -> Pass:
    """Returns the pass for quantised weights by the name of the weights."""
    return Pass("attach_grids", lambda model: attach_grids(model, grids))
