# SPDX-License-Identifier: Apache-2.0
"""Embeddings -> PackedRows: tied ones read the packed weights of the LM head, others have their own."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from speccompile.ops import packing
from speccompile.ops.packed_linear import PACKED_LINEARS
from speccompile.ops.packed_rows import rows_op_name
from speccompile.passes.attach_grids import embeddings_of, grid_of
from speccompile.passes.base import Pass
from speccompile.passes.edit import OPS_DOMAIN, Editor, nodes_of, replace, sizes_of, weight_of
from speccompile.passes.match import int_attribute, only_use
from speccompile.passes.pack_linears import PACKED_DTYPES, Weights, is_bfloat16

# Ops whose panels have the columns of the weights in order, and their forms.
_FORMS = {op.name: op.name.partition("PackedLinear")[2] for op in PACKED_LINEARS if "Gated" not in op.name}


_Packed = tuple[str, list[ir.Value | None], dict[str, int]]  # form, constants, attributes


def _packed_linears(model: ir.Model) -> dict[str, ir.Node]:
    linears = {}
    for node in model.graph:
        if node.domain == OPS_DOMAIN and node.op_type in _FORMS:
            weights = node.inputs[3 if node.op_type.startswith("Norm") else 1]
            assert weights is not None
            linears[str(weights.name)] = node
    return linears


def _tied(model: ir.Model) -> int:
    linears, count = _packed_linears(model), 0
    for node in nodes_of(model, "Gather"):
        value, tokens = node.inputs
        turn = only_use(node.outputs[0])
        linear = linears.get(f"{value.name}.packed") if value is not None and weight_of(value) is not None else None
        if linear is None or turn is None or turn.op_type != "Transpose" or int_attribute(node, "axis", 0) != 1:
            continue
        first = 3 if linear.op_type.startswith("Norm") else 1
        names = ("num_in", "num_out", "group")
        attributes = {name: linear.attributes[name].as_int() for name in names if name in linear.attributes}
        edit = Editor(model, node)
        _rows(edit, turn, tokens, (_FORMS[linear.op_type], list(linear.inputs[first:-1]), attributes))
        model.graph.remove(node, safe=True)
        _drop(model, value)
        count += 1
    return count


def _rows(edit: Editor, old: ir.Node, tokens: ir.Value | None, packed: _Packed) -> None:
    form, constants, attributes = packed
    rows = edit.op(rows_op_name(form), tokens, *constants, domain=OPS_DOMAIN, **attributes)
    rows.type, rows.shape = old.outputs[0].type, old.outputs[0].shape
    replace(old, rows)


def _drop(model: ir.Model, value: ir.Value | None) -> None:
    if value is not None and value.name is not None and not list(value.uses()):
        model.graph.initializers.pop(value.name, None)


def _own(model: ir.Model, weights: Weights) -> int:
    made: dict[str, _Packed] = {}
    count = 0
    for node, table in embeddings_of(model):
        edit, name = Editor(model, node), str(table.name)
        if name not in made:
            if (packed := _pack_table(edit, table, weights)) is None:
                continue
            made[name] = packed
        _rows(edit, node, node.inputs[1], made[name])
        _drop(model, table)
        count += 1
    return count


def _pack_table(edit: Editor, table: ir.Value, weights: Weights) -> _Packed | None:
    """Returns the packed table: on its own grid, in 8 bits or bfloat16 if asked for or exact; else None."""
    tensor = table.const_value
    assert tensor is not None
    num_out, num_in = sizes_of(tensor)

    def pack() -> tuple[str, packing.Packed] | None:
        if (grid := grid_of(tensor)) is not None:
            return packing.pack_grid(grid)
        array = tensor.numpy()
        is_half = weights == "bf16" or is_bfloat16(array)
        form = "Int8" if weights in ("int8", "int4") else "Bf16" if is_half else None
        return None if form is None else (form, packing.pack(array.T, form))

    found = pack()
    if found is None:
        return None
    form, first = found
    name = f"{table.name}.packed"
    dtype, shape = PACKED_DTYPES[form], ir.Shape(first.weights.shape)

    def again() -> ir.TensorProtocol:
        made = pack()
        assert made is not None
        return ir.tensor(made[1].weights)

    # Lazy: a packed copy exists only while it is written out.
    values: list[ir.Value | None] = [edit.const(ir.LazyTensor(again, dtype, shape, name=name), name)]
    rest = {key: array for key, array in first.constants.items() if key != "weights"}
    values += [edit.const(np.ascontiguousarray(array), f"{name}.{key}") for key, array in rest.items()]
    group = {key: value for key, value in first.attributes.items() if key == "group"}
    return form, values, {"num_in": num_in, "num_out": num_out, **group}


def pack_embedding(model: ir.Model, weights: Weights) -> int:
    """Makes PackedRows of embeddings, after `tie_embedding` and `pack_linears`; returns their number.

    Args:
        weights: as in `pack_linears`; an embedding that is not tied gets 8 bits with int8 and int4.
    """
    return _tied(model) + _own(model, weights)


def pack_embedding_pass(weights: Weights) -> Pass:
    return Pass(f"pack_embedding_{weights}", lambda model: pack_embedding(model, weights))
