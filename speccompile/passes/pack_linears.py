# SPDX-License-Identifier: Apache-2.0
"""Linears -> PackedLinear or GatedPackedLinear with weights in the layout of the CPU kernels.

An added bias and the gate of a merged gate-and-up projection are folded in. Shared weights are packed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from speccompile.ops import packing
from speccompile.ops.packed_linear import op_name
from speccompile.passes.attach_grids import grid_of
from speccompile.passes.base import Pass
from speccompile.passes.edit import OPS_DOMAIN, Editor, nodes_of, replace, sizes_of, weight_of
from speccompile.passes.gates import Gate, arranged, gate_of, packed_bias
from speccompile.passes.match import only_use, operands, rank, replace_tree

Weights = Literal["float", "bf16", "int8", "int4", "stored"]
INTEGER_FORMS = {"int8": "Int8", "int4": "Int4"}


@dataclass(frozen=True)
class _Linear:
    """A product with constant weights and what is folded into it."""

    node: ir.Node
    weight: ir.Value
    add: ir.Node | None
    bias: ir.Value | None
    gate: Gate | None

    @property
    def last(self) -> ir.Node:
        return self.gate.last if self.gate is not None else self.add or self.node


def _bias_of(node: ir.Node, num_out: int) -> tuple[ir.Node, ir.Value] | tuple[None, None]:
    use = only_use(node.outputs[0])
    if use is not None and use.op_type == "Add" and use.domain == "":
        for product, bias in operands(use):
            tensor = weight_of(bias)
            is_vector = tensor is not None and sizes_of(tensor) == (num_out,) and tensor.dtype == ir.DataType.FLOAT
            if product is node.outputs[0] and is_vector:
                return use, bias
    return None, None


def _linears(model: ir.Model) -> list[_Linear]:
    found = []
    for node in nodes_of(model, "MatMul"):
        source, value = node.inputs
        weight = weight_of(value)
        if weight is None or value is None or source is None or len(weight.shape) != 2:
            continue
        if weight.dtype != ir.DataType.FLOAT or source.dtype not in (None, ir.DataType.FLOAT):
            continue
        num_out = sizes_of(weight)[1]
        add, bias = _bias_of(node, num_out)
        product = (add or node).outputs[0]
        found.append(_Linear(node, value, add, bias, gate_of(product, num_out, num_dims=rank(source) or 3)))
    return found


def is_bfloat16(weight: np.ndarray) -> bool:
    """Returns whether every number of a float32 array is one of bfloat16."""
    return not (np.ascontiguousarray(weight).view(np.uint32) & 0xFFFF).any()


@dataclass(frozen=True)
class PackedValues:
    """The op's constants and what they say of it."""

    form: str
    constants: list[ir.Value]
    attributes: dict[str, int]


class _Packer:
    """Packs each weight once."""

    def __init__(self, model: ir.Model, weights: Weights) -> None:
        self.model, self.weights = model, weights
        self.made: dict[tuple[str, bool, bool], PackedValues] = {}

    def pack(self, linear: _Linear, edit: Editor) -> PackedValues:
        """Returns the form and the constants: weights, and what else the form has."""
        gate = linear.gate
        key = (str(linear.weight.name), gate is not None, gate is not None and gate.is_second)
        if key not in self.made:
            self.made[key] = self._pack(linear, edit)
        return self.made[key]

    def _pack(self, linear: _Linear, edit: Editor) -> PackedValues:
        tensor, gate = linear.weight.const_value, linear.gate
        assert tensor is not None
        num_in, num_out = sizes_of(tensor)

        def from_grid() -> tuple[str, packing.Packed] | None:
            # Outputs from 1, as a gate's halves are padded with 0.
            columns = arranged(np.arange(1, num_out + 1)[None], gate)[0] - 1
            return None if (grid := grid_of(tensor)) is None else packing.pack_grid(grid.take(columns))

        if (held := from_grid()) is None:
            form = INTEGER_FORMS.get(self.weights) or "Bf16"
            if form == "Bf16" and self.weights != "bf16" and not is_bfloat16(tensor.numpy()):
                form = "F32"
            dims = packing.packed_dims(num_in, num_out, form, has_gate=gate is not None)
            rest = dict[str, np.ndarray]()
            if packing.is_integer(form):
                rest["scales"] = packing.pack_scales(arranged(tensor.numpy(), gate), form)
            attributes = dict[str, int]()
        else:
            form, first = held
            dims, attributes = first.weights.shape, first.attributes
            rest = {key: array for key, array in first.constants.items() if key != "weights"}

        def weights() -> ir.TensorProtocol:
            made = from_grid() or (form, packing.pack(arranged(tensor.numpy(), gate), form))
            return ir.tensor(made[1].weights)

        name = f"{linear.weight.name}.packed"
        # Lazy: a packed copy exists only while it is written out.
        values = [edit.const(ir.LazyTensor(weights, PACKED_DTYPES[form], ir.Shape(dims), name=name), name)]
        values += [edit.const(array, f"{name}.{key}") for key, array in rest.items()]
        return PackedValues(form, values, attributes)


# Element types of packed weights, by form.
PACKED_DTYPES = {
    form: ir.DataType[{"float32": "FLOAT"}.get(name, name.upper())] for form, name in packing.DTYPES.items()
}


def pack_linears(model: ir.Model, weights: Weights) -> int:
    """Packs every linear with constant weights [in, out]; returns their number.

    Args:
        weights: float: bfloat16 where every weight is one of its numbers, else float32; bf16: rounded to bfloat16; int8
            or int4: quantised in groups of 32; stored: as float. Grids that are attached are packed as they are.
    """
    linears, packer = _linears(model), _Packer(model, weights)
    for linear in linears:
        edit = Editor(model, linear.last)
        packed = packer.pack(linear, edit)
        assert linear.weight.const_value is not None
        num_in, num_out = sizes_of(linear.weight.const_value)
        attributes = {"num_in": num_in, "num_out": num_out, **packed.attributes}
        if linear.gate is not None:
            attributes["activation"] = linear.gate.activation
        bias = packed_bias(linear.bias, linear.gate, (num_out,), edit)
        name = op_name(packed.form, has_gate=linear.gate is not None)
        out = edit.op(name, linear.node.inputs[0], *packed.constants, bias, domain=OPS_DOMAIN, **attributes)
        out.shape, out.type = linear.last.outputs[0].shape, linear.last.outputs[0].type
        replace_tree(linear.last, out) if linear.last is not linear.node else replace(linear.node, out)
    for linear in linears:
        for value in (linear.weight, linear.bias):
            if value is not None and value.name and value.is_initializer() and not list(value.uses()):
                del model.graph.initializers[value.name]
    if linears:
        model.opset_imports["com.microsoft"] = 1  # of the function bodies
    return len(linears)


def pack_linears_pass(weights: Weights) -> Pass:
    return Pass(f"pack_linears_{weights}", lambda model: pack_linears(model, weights))
