# SPDX-License-Identifier: Apache-2.0
"""Experts -> ExpertLinear or GatedExpertLinear with packed weights.

An exported mixture gathers whole weights by the experts of every row, and multiplies each with its row:
Squeeze(MatMul(GatherND(weights, experts), x)). The op reads each expert's weights where they are, once. A bias that is
gathered and added is folded in, and so is the gate of merged gate-and-up columns; any other activation stays as it is.
Routers, whose numbers choose, are no experts: they keep their float32 weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from speccompile.ops import packing
from speccompile.ops.expert_linear import expert_op_name
from speccompile.passes.base import Pass
from speccompile.passes.edit import OPS_DOMAIN, Editor, sizes_of, weight_of
from speccompile.passes.gates import Gate, gate_of, packed_bias, swapped_halves
from speccompile.passes.match import int_attribute, ints, only_use, operands, producer, rank, replace_tree, static_dim
from speccompile.passes.pack_linears import INTEGER_FORMS, PACKED_DTYPES, Weights, is_bfloat16


@dataclass(frozen=True)
class _Experts:
    """Products of rows with the weights of their experts, and what is folded into them.

    Args:
        last: of the matched nodes.
        weight: [experts, N, K], or [experts, K, N] where `is_transposed`.
        is_transposed: see `weight`.
        source: [rows, K]; each row may have several ids, one after the other.
        ids: [ids] int64.
        bias: [experts, N].
        gate: after the bias.
    """

    last: ir.Node
    weight: ir.Value
    is_transposed: bool
    source: ir.Value
    ids: ir.Value
    bias: ir.Value | None
    gate: Gate | None


def _ids_of(gather: ir.Node) -> ir.Value | None:
    """Returns the ids [ids] that a gather takes from the first axis; None where it is another gather."""
    if gather.domain != "" or len(gather.inputs) != 2:
        return None
    indices = gather.inputs[1]
    if gather.op_type == "Gather" and int_attribute(gather, "axis", 0) == 0 and rank(indices) == 1:
        return indices
    if gather.op_type != "GatherND" or int_attribute(gather, "batch_dims", 0) != 0:
        return None
    last = producer(indices, "Unsqueeze")
    is_last = last is not None and ints(last.inputs[1]) in ([-1], [1]) and rank(last.inputs[0]) == 1
    return last.inputs[0] if last is not None and is_last else None


def _product_of(gathered: ir.Value) -> tuple[ir.Value, ir.Node, bool] | None:
    """Returns x [ids, K], the product [ids, N], and whether the gathered weights are [ids, K, N]."""
    matmul = only_use(gathered)
    if matmul is None or matmul.op_type != "MatMul" or matmul.domain != "":
        return None
    is_transposed = matmul.inputs[1] is gathered
    vector = producer(matmul.inputs[0 if is_transposed else 1], "Unsqueeze")
    squeeze = only_use(matmul.outputs[0])
    axes = ([1], [-2]) if is_transposed else ([2], [-1])
    if vector is None or rank(vector.inputs[0]) != 2 or ints(vector.inputs[1]) not in axes:
        return None
    if (
        squeeze is None
        or squeeze.op_type != "Squeeze"
        or len(squeeze.inputs) < 2
        or ints(squeeze.inputs[1]) not in axes
    ):
        return None
    source = vector.inputs[0]
    return None if source is None else (source, squeeze, is_transposed)


def _bias_of(product: ir.Node, ids: ir.Value, dims: tuple[int, ...]) -> tuple[ir.Node, ir.Value] | tuple[None, None]:
    """Returns the Add of a bias [experts, N] gathered by the same ids, and the bias."""
    add = only_use(product.outputs[0])
    if add is None or add.op_type != "Add" or add.domain != "":
        return None, None
    for first, second in operands(add):
        gather = second.producer()
        if first is not product.outputs[0] or gather is None or _ids_of(gather) is not ids:
            continue
        bias = gather.inputs[0]
        tensor = weight_of(bias)
        if bias is not None and tensor is not None and sizes_of(tensor) == dims and tensor.dtype == ir.DataType.FLOAT:
            return add, bias
    return None, None


def _unrepeated(source: ir.Value) -> ir.Value:
    """Returns the rows of which each stands several times, one after the other, in `source`; `source` if none do."""
    reshape = producer(source, "Reshape")
    expand = producer(reshape.inputs[0], "Expand") if reshape is not None else None
    unsqueeze = producer(expand.inputs[0], "Unsqueeze") if expand is not None else None
    if reshape is None or expand is None or unsqueeze is None:
        return source
    rows, copies, width = unsqueeze.inputs[0], ints(expand.inputs[1]), static_dim(unsqueeze.inputs[0], 1)
    is_repeat = (
        rank(rows) == 2
        and width is not None
        and ints(unsqueeze.inputs[1]) in ([1], [-2])
        and copies is not None
        and (len(copies), copies[::2]) == (3, [1, 1])
        and ints(reshape.inputs[1]) == [-1, width]
    )
    return rows if is_repeat and rows is not None else source


def _experts(model: ir.Model) -> Iterator[_Experts]:
    """Yields the products in order; each may be replaced before the next one is looked for."""
    for node in [node for node in model.graph if node.op_type in ("Gather", "GatherND")]:
        value = node.inputs[0] if node.graph is not None else None
        weight, ids = weight_of(value), _ids_of(node) if value is not None else None
        if weight is None or value is None or ids is None or len(weight.shape) != 3:
            continue
        found = _product_of(node.outputs[0]) if weight.dtype == ir.DataType.FLOAT else None
        if found is None:
            continue
        source, product, is_transposed = found
        num_experts, first, second = sizes_of(weight)
        num_out = second if is_transposed else first
        add, bias = _bias_of(product, ids, (num_experts, num_out))
        gate = gate_of((add or product).outputs[0], num_out, num_dims=2)
        last = gate.last if gate is not None else add or product
        yield _Experts(last, value, is_transposed, _unrepeated(source), ids, bias, gate)


class _Packer:
    """Packs each weight once."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.made: dict[tuple[str, bool, bool, bool], tuple[str, list[ir.Value]]] = {}

    def pack(self, experts: _Experts, edit: Editor) -> tuple[str, list[ir.Value]]:
        """Returns the form and the constants: weights, and scales where the form has them."""
        gate = experts.gate
        key = (str(experts.weight.name), experts.is_transposed, gate is not None, gate is not None and gate.is_second)
        if key not in self.made:
            self.made[key] = self._pack(experts, edit)
        return self.made[key]

    def _pack(self, experts: _Experts, edit: Editor) -> tuple[str, list[ir.Value]]:
        tensor, gate = experts.weight.const_value, experts.gate
        assert tensor is not None
        form = INTEGER_FORMS.get(self.weights) or ("Bf16" if all(map(is_bfloat16, tensor.numpy())) else "F32")

        def matrices() -> Iterator[np.ndarray]:
            """Yields the weights [K, N] of each expert, gate first."""
            for weight in tensor.numpy():
                matrix = weight if experts.is_transposed else weight.T
                yield swapped_halves(matrix) if gate is not None and gate.is_second else matrix

        def weights() -> ir.TensorProtocol:
            return ir.tensor(packing.pack_experts(matrices(), form, has_gate=gate is not None).weights)

        def scales() -> ir.TensorProtocol:
            own = (packing.interleave_gate(m) if gate is not None else m for m in matrices())
            return ir.tensor(np.stack([packing.pack_scales(matrix, form) for matrix in own]))

        num_experts, num_in, num_out = _dims(experts)
        dims = packing.packed_dims(num_in, num_out, form, has_gate=gate is not None)
        name = f"{experts.weight.name}.packed"
        shape = ir.Shape((num_experts, *dims))
        # Lazy: a packed copy exists only while it is written out.
        values = [edit.const(ir.LazyTensor(weights, PACKED_DTYPES[form], shape, name=name), name)]
        if packing.is_integer(form):
            shape = ir.Shape((num_experts, dims[0], dims[1], packing.COLUMNS))
            lazy = ir.LazyTensor(scales, ir.DataType.FLOAT16, shape, name=f"{name}.scales")
            values.append(edit.const(lazy, f"{name}.scales"))
        return form, values


def _dims(experts: _Experts) -> tuple[int, int, int]:
    """Returns the number of experts, K and N."""
    assert experts.weight.const_value is not None
    num_experts, first, second = sizes_of(experts.weight.const_value)
    return (num_experts, first, second) if experts.is_transposed else (num_experts, second, first)


def pack_experts(model: ir.Model, weights: Weights) -> int:
    """Pack the weights of every mixture of experts.

    Args:
        model: to be changed in place.
        weights: as `pack_linears` has them.

    Returns:
        The number of products.
    """
    found, packer = list[_Experts](), _Packer(weights)
    for experts in _experts(model):
        found.append(experts)
        edit = Editor(model, experts.last)
        form, constants = packer.pack(experts, edit)
        num_experts, num_in, num_out = _dims(experts)
        attributes = {"num_in": num_in, "num_out": num_out, "num_experts": num_experts}
        if experts.gate is not None:
            attributes["activation"] = experts.gate.activation
        name = expert_op_name(form, has_gate=experts.gate is not None)
        bias = packed_bias(experts.bias, experts.gate, (num_experts, num_out), edit)
        out = edit.op(name, experts.source, experts.ids, *constants, bias, domain=OPS_DOMAIN, **attributes)
        out.shape, out.type = experts.last.outputs[0].shape, experts.last.outputs[0].type
        replace_tree(experts.last, out)
    for experts in found:
        for value in (experts.weight, experts.bias):
            if value is not None and str(value.name) in model.graph.initializers and not value.uses():
                del model.graph.initializers[str(value.name)]
    return len(found)


def pack_experts_pass(weights: Weights) -> Pass:
    """Returns the pass for these weights."""
    return Pass(f"pack_experts_{weights}", lambda model: pack_experts(model, weights))
