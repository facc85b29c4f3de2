# SPDX-License-Identifier: Apache-2.0
"""Experts -> ExpertLinear or GatedExpertLinear with packed weights.

The op reads each expert's weights where they are, once, instead of Squeeze(MatMul(GatherND(weights, experts), x)). A
gathered bias and the gate of merged gate-and-up columns are folded in. Routers, whose numbers choose, keep float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from speccompile.ops import packing
from speccompile.ops.expert_linear import expert_op_name
from speccompile.passes.attach_grids import ExpertGrids
from speccompile.passes.base import Pass
from speccompile.passes.edit import OPS_DOMAIN, Editor, sizes_of, weight_of
from speccompile.passes.expert_products import ExpertProduct, expert_products, ids_of
from speccompile.passes.gates import Gate, arranged, gate_of, packed_bias
from speccompile.passes.match import only_use, operands, replace_tree
from speccompile.passes.pack_linears import INTEGER_FORMS, PACKED_DTYPES, PackedValues, Weights, is_bfloat16
from speccompile.passes.save import PartsTensor


@dataclass(frozen=True)
class _Experts:
    """Products of rows with the weights of their experts, and what is folded into them."""

    product: ExpertProduct
    last: ir.Node
    bias: ir.Value | None  # [experts, N]
    gate: Gate | None


def _bias_of(product: ir.Node, ids: ir.Value, dims: tuple[int, ...]) -> tuple[ir.Node, ir.Value] | tuple[None, None]:
    add = only_use(product.outputs[0])
    if add is None or add.op_type != "Add" or add.domain != "":
        return None, None
    for first, second in operands(add):
        gather = second.producer()
        if first is not product.outputs[0] or gather is None or ids_of(gather) is not ids:
            continue
        bias = gather.inputs[0]
        tensor = weight_of(bias)
        if bias is not None and tensor is not None and sizes_of(tensor) == dims and tensor.dtype == ir.DataType.FLOAT:
            return add, bias
    return None, None


def _experts(model: ir.Model) -> Iterator[_Experts]:
    for product in expert_products(model):
        num_experts, _, num_out = product.dims
        add, bias = _bias_of(product.last, product.ids, (num_experts, num_out))
        gate = gate_of((add or product.last).outputs[0], num_out, num_dims=2)
        last = gate.last if gate is not None else add or product.last
        yield _Experts(product, last, bias, gate)


class _Packer:
    """Packs each weight once."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.made: dict[tuple[str, bool, bool, bool], PackedValues] = {}

    def pack(self, experts: _Experts, edit: Editor) -> PackedValues:
        """Returns the form and the constants: weights, and what else the form has."""
        gate = experts.gate
        key = (
            str(experts.product.weight.name),
            experts.product.is_transposed,
            gate is not None,
            gate is not None and gate.is_second,
        )
        if key not in self.made:
            self.made[key] = self._pack(experts, edit)
        return self.made[key]

    def _pack(self, experts: _Experts, edit: Editor) -> PackedValues:
        tensor, gate = experts.product.weight.const_value, experts.gate
        assert tensor is not None
        num_experts, _, num_out = experts.product.dims

        def packed(expert: int) -> packing.Packed:
            if isinstance(tensor, ExpertGrids):
                columns = arranged(np.arange(1, num_out + 1)[None], gate)[0] - 1
                return packing.pack_grid(tensor.read(expert).take(columns))[1]
            matrix = tensor.numpy()[expert]
            return packing.pack(arranged(matrix if experts.product.is_transposed else matrix.T, gate), form)

        if isinstance(tensor, ExpertGrids):
            form = packing.grid_form(tensor.read(0))
        else:
            is_half = self.weights == "bf16" or all(map(is_bfloat16, tensor.numpy()))
            form = INTEGER_FORMS.get(self.weights) or ("Bf16" if is_half else "F32")
        first = packed(0)
        values = []
        for key, array in first.constants.items():
            name = f"{experts.product.weight.name}.packed{'' if key == 'weights' else f'.{key}'}"
            dtype = PACKED_DTYPES[form] if key == "weights" else ir.DataType.from_numpy(array.dtype)
            # A packed copy of one expert exists at a time, while it is written out.
            parts = PartsTensor(
                lambda key=key: (packed(expert).constants[key] for expert in range(num_experts)),  # type: ignore[misc]
                dtype,
                (num_experts, *array.shape),
                name,
            )
            values.append(edit.const(parts, name))
        return PackedValues(form, values, first.attributes)


def pack_experts(model: ir.Model, weights: Weights) -> int:
    """Pack the weights of every mixture of experts. Returns the number of products."""
    found, packer = list[_Experts](), _Packer(weights)
    for experts in _experts(model):
        found.append(experts)
        edit = Editor(model, experts.last)
        packed = packer.pack(experts, edit)
        num_experts, num_in, num_out = experts.product.dims
        attributes = {"num_in": num_in, "num_out": num_out, "num_experts": num_experts, **packed.attributes}
        if experts.gate is not None:
            attributes["activation"] = experts.gate.activation
        name = expert_op_name(packed.form, has_gate=experts.gate is not None)
        bias = packed_bias(experts.bias, experts.gate, (num_experts, num_out), edit)
        out = edit.op(
            name, experts.product.source, experts.product.ids, *packed.constants, bias, domain=OPS_DOMAIN, **attributes
        )
        out.shape, out.type = experts.last.outputs[0].shape, experts.last.outputs[0].type
        replace_tree(experts.last, out)
    for experts in found:
        for value in (experts.product.weight, experts.bias):
            if value is not None and str(value.name) in model.graph.initializers and not value.uses():
                del model.graph.initializers[str(value.name)]
    return len(found)


def pack_experts_pass(weights: Weights) -> Pass:
    return Pass(f"pack_experts_{weights}", lambda model: pack_experts(model, weights))
