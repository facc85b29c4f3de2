# SPDX-License-Identifier: Apache-2.0
"""Attach quantised weights to the linears whose weights they are.

Inputs of a grid with an order are gathered before the product. Where outputs of a merged linear have no grid in common,
or some have none, it becomes several products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace as replaced
from functools import partial

import numpy as np
import onnx_ir as ir

from speccompile.core.specs import TOKENS
from speccompile.errors import PassError
from speccompile.ops.grid import Grid
from speccompile.passes.base import Pass
from speccompile.passes.edit import Editor, nodes_of, replace, sizes_of, weight_of
from speccompile.passes.expert_products import expert_products
from speccompile.passes.match import int_attribute, producer
from speccompile.passes.stored_rows import Part, StoredRows

MIN_ELEMENTS = 4096  # of a table; smaller ones do not justify a node
# By the name of the weights of every linear, or a function that makes them of the model.
Grids = Mapping[str, Grid] | Callable[[ir.Model], Mapping[str, Grid]]


class GridTensor(ir.LazyTensor):
    """A weight [in, out] float32 that is held as a grid; `numpy` gives what the grid stands for.

    Args:
        read: returns the grid [out, in]; called each time that it is needed, so that no copy stays in memory.
        shape: [in, out].
        is_table: the weight is an embedding, [out, in].
    """

    def __init__(self, read: Callable[[], Grid], shape: tuple[int, ...], name: str, *, is_table: bool = False) -> None:
        def weight() -> ir.TensorProtocol:
            return ir.tensor(read().weight() if is_table else read().weight().T.copy())

        super().__init__(weight, ir.DataType.FLOAT, ir.Shape(shape), name=name)
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


def table_of(gather: ir.Node) -> ir.Value | None:
    """Returns the table [rows, size] float32 of which a Gather takes rows; None: it takes something else, or a few."""
    value = gather.inputs[0]
    tensor = weight_of(value)
    if tensor is None or len(tensor.shape) != 2 or tensor.dtype != ir.DataType.FLOAT or tensor.size < MIN_ELEMENTS:
        return None
    return value if int_attribute(gather, "axis", 0) in (0, -2) else None


def embeddings_of(model: ir.Model) -> list[tuple[ir.Node, ir.Value]]:
    """Returns the gathers of rows that the graph's tokens choose, each with its table, in the order of the graph."""
    found = []
    for node in nodes_of(model, "Gather"):
        table, tokens = table_of(node), node.inputs[1]
        clamp = producer(tokens, "Min")  # to a smaller vocabulary
        tokens = clamp.inputs[0] if clamp is not None else tokens
        if table is not None and tokens is not None and tokens.is_graph_input() and tokens.name == TOKENS:
            found.append((node, table))
    return found


def attach_grids(model: ir.Model, grids: Mapping[str, Grid]) -> int:
    """Replaces the weights of every linear by their `GridTensor`; returns the number of weights.

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


def attach_grids_pass(grids: Grids) -> Pass:
    return Pass("attach_grids", lambda model: attach_grids(model, grids(model) if callable(grids) else grids))


def attach_stored(model: ir.Model, rows: StoredRows) -> int:
    """Replaces weights by the grids of a checkpoint that have the same numbers; returns how many linears'."""
    users: dict[ir.Value, list[ir.Node]] = {}
    for node, value in linears_of(model):
        users.setdefault(value, []).append(node)
    count = 0
    for value, nodes in users.items():
        weight, name = value.const_value, str(value.name)
        assert weight is not None
        numbers = weight.numpy().T
        parts = rows.parts(rows.find(numbers), numbers.shape[1])
        rows.attached[name] = [(part.kind, part.num_out * numbers.shape[1]) for part in parts]
        count += any(part.kind is not None for part in parts)
        if len(parts) == 1 and not (parts[0].kind and parts[0].kind.order):
            if parts[0].kind is not None:
                value.const_value = _tensor(weight, rows, parts[0], 0, name)
            continue
        edit, start, values = Editor(model), 0, list[tuple[ir.Value, bytes]]()
        for index, part in enumerate(parts):
            tensor = _tensor(weight, rows, part, start, f"{name}.{index}")
            values.append((edit.const(tensor, str(tensor.name)), part.kind.order if part.kind else b""))
            start += part.num_out
        for node in nodes:
            _replace(model, node, values)
        if not list(value.uses()):
            del model.graph.initializers[name]
    for table in dict.fromkeys(table for _, table in embeddings_of(model)):
        weight, name = table.const_value, str(table.name)
        assert weight is not None
        parts = rows.parts(rows.find(weight.numpy()), sizes_of(weight)[1])
        if len(parts) == 1 and parts[0].kind is not None and not parts[0].kind.order:
            read = partial(rows.grid, parts[0])
            table.const_value = GridTensor(read, sizes_of(weight), name, is_table=True)
            rows.attached[name] = [(parts[0].kind, weight.size)]
    return count


class ExpertGrids(ir.LazyTensor):
    """Weights [experts, N, K], or [experts, K, N], float32, that are held as a grid [N, K] of each expert."""

    def __init__(self, tensor: ir.TensorProtocol, read: Callable[[int], Grid]) -> None:
        super().__init__(lambda: tensor, tensor.dtype, ir.Shape(sizes_of(tensor)), name=tensor.name)
        self.read = read


def attach_expert_grids(model: ir.Model, rows: StoredRows) -> int:
    """Replaces weights of experts by their grids, where all have a kind in common; returns their number."""
    count = 0
    for value, is_transposed in {product.weight: product.is_transposed for product in expert_products(model)}.items():
        weight, name = value.const_value, str(value.name)
        assert weight is not None
        found = [rows.find(matrix.T if is_transposed else matrix) for matrix in weight.numpy()]
        num_in = sizes_of(weight)[1 if is_transposed else 2]
        kind = rows.whole(np.concatenate(found), num_in).kind
        # All experts read the same rows, in one order.
        if kind and kind.order:
            rows.widened[name] = weight.size
            continue
        rows.attached[name] = [(kind, weight.size)]
        if kind is not None:
            parts = [Part(own, kind) for own in found]
            value.const_value = ExpertGrids(weight, lambda expert, parts=parts: rows.grid(parts[expert]))  # type: ignore[misc]
            count += 1
    return count


def _tensor(weight: ir.TensorProtocol, rows: StoredRows, part: Part, start: int, name: str) -> ir.LazyTensor:
    shape = (sizes_of(weight)[0], part.num_out)
    if part.kind is not None:
        return GridTensor(lambda: replaced(rows.grid(part), order=None), shape, name)

    def columns() -> ir.TensorProtocol:
        return ir.tensor(weight.numpy()[:, start : start + part.num_out].copy())

    return ir.LazyTensor(columns, weight.dtype, ir.Shape(shape), name=name)


def _replace(model: ir.Model, node: ir.Node, values: list[tuple[ir.Value, bytes]]) -> None:
    """Replaces a product by those with parts of its weights, each with the order of its inputs; empty: as they are."""
    edit, source, products = Editor(model, node), node.inputs[0], []
    out = node.outputs[0]
    assert source is not None
    for value, order in values:
        inputs = source
        if order:
            inputs = edit.op(
                "Gather", source, edit.const(np.frombuffer(order, np.int32), f"{value.name}.order"), axis=-1
            )
            inputs.type, inputs.shape = source.type, source.shape
        product = edit.op("MatMul", inputs, value)
        product.type = out.type
        if out.shape is not None and value.shape is not None:
            product.shape = ir.Shape([*out.shape.dims[:-1], value.shape[1]])
        products.append(product)
    whole = products[0] if len(products) == 1 else edit.op("Concat", *products, axis=-1)
    whole.type, whole.shape = out.type, out.shape
    replace(node, whole)
