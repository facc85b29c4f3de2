# SPDX-License-Identifier: Apache-2.0
"""Move numbers from shapes to a GPU without a copy, so that ONNX Runtime can capture a step as a CUDA graph.

ONNX Runtime computes shapes on the CPU, and copies such a number to the GPU, which no capture allows. Range takes its
bounds from the CPU and writes to the GPU (1.31): the range of one number is that number.
"""

from __future__ import annotations

import onnx_ir as ir

from speccompile.errors import PassError
from speccompile.passes.base import Property, as_pass
from speccompile.passes.edit import Editor
from speccompile.passes.match import producer as producer_of

# Operators that ONNX Runtime keeps on the CPU when all their inputs are there.
_ARITHMETIC = {"Add", "Sub", "Mul", "Div", "Mod", "Min", "Max", "Neg", "Abs", "Sqrt", "Ceil", "Floor", "Cast"}
_LOGIC = {"Greater", "Less", "Equal", "GreaterOrEqual", "LessOrEqual", "And", "Or", "Not", "Where"}
_MOVES = {"Squeeze", "Unsqueeze", "Concat", "Gather", "Slice", "Pad", "Identity", "Reshape"}
_ON_HOST = _ARITHMETIC | _LOGIC | _MOVES
# Inputs that CUDA kernels take from the CPU: the positions from the first to the last.
_HOST_INPUTS = {
    "Range": (0, 2),
    "Reshape": (1, 1),
    "Expand": (1, 1),
    "ConstantOfShape": (0, 0),
    "Slice": (1, 4),
    "Pad": (1, 3),
    "Squeeze": (1, 1),
    "Unsqueeze": (1, 1),
    "Tile": (1, 1),
    "TopK": (1, 1),
    "CumSum": (1, 1),
    "Split": (1, 1),
    "ReduceSum": (1, 1),
    "ReduceMax": (1, 1),
    "ReduceMin": (1, 1),
    "ReduceMean": (1, 1),
    "Shape": (0, 0),
}


def host_values(model: ir.Model) -> set[ir.Value]:
    """Returns the values of the main graph that ONNX Runtime's CUDA provider keeps on the CPU."""
    found: set[ir.Value] = set()
    for node in model.graph:
        computed = [v for v in node.inputs if v is not None and not _is_constant(v)]
        is_shape = node.op_type == "Shape" and node.domain == ""
        if is_shape or (node.op_type in _ON_HOST and node.domain == "" and computed and found.issuperset(computed)):
            found.update(node.outputs)
    return found


def _is_constant(value: ir.Value) -> bool:
    return value.const_value is not None or producer_of(value, "Constant") is not None


def _crossings(model: ir.Model) -> list[tuple[ir.Value, ir.Node, int]]:
    held, found = host_values(model), []
    for node in model.graph:
        if held.issuperset(node.outputs) and node.outputs:
            continue
        first, last = _HOST_INPUTS.get(node.op_type, (1, 0))
        for position, value in enumerate(node.inputs):
            if value in held and not first <= position <= last:
                found.append((value, node, position))
    return found


def _find_crossing(model: ir.Model) -> str | None:
    crossings = _crossings(model)
    return None if not crossings else f"{crossings[0][0]} is read by {crossings[0][1].op_type} as data"


NO_CROSSINGS = Property("no number of a shape is copied to the device", _find_crossing)


@as_pass(ensures=(NO_CROSSINGS,))
def shapes_on_device(model: ir.Model) -> int:
    """Inserts a Range for each number that goes from the CPU to the GPU of an inlined model; returns their number.

    Raises:
        PassError: a value of more than one number would have to be copied.
    """
    made: dict[ir.Value, ir.Value] = {}
    for value, node, position in _crossings(model):
        if value not in made:
            producer = value.producer()
            assert producer is not None
            if value.shape is None or value.shape.rank() > 1 or (value.shape.rank() == 1 and value.shape[0] != 1):
                got, todo = f"{value.name} {value.shape}, read by {node.op_type}", "Compute it from a tensor instead."
                raise PassError("pass shapes_on_device", got, "one number", todo)
            made[value] = _on_device(model, value, producer)
        node.replace_input_with(position, made[value])
    return len(made)


def _on_device(model: ir.Model, value: ir.Value, producer: ir.Node) -> ir.Value:
    nodes = list(model.graph)
    at = nodes.index(producer) + 1
    edit = Editor(model, nodes[at] if at < len(nodes) else None)
    is_bool = value.dtype == ir.DataType.BOOL
    number = edit.op("Cast", value, to=ir.DataType.INT64) if is_bool else value
    number = edit.op("Reshape", number, edit.ints([]))
    moved: ir.Value = edit.op("Range", number, edit.op("Add", number, edit.ints(1)), edit.ints(1))
    if value.shape is not None and len(value.shape) == 0:
        moved = edit.op("Squeeze", moved)
    return edit.op("Cast", moved, to=ir.DataType.BOOL) if is_bool else moved
