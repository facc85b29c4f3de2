# SPDX-License-Identifier: Apache-2.0
"""Finds products of rows with gathered weights of their experts: Squeeze(MatMul(GatherND(weights, experts), x))."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from speccompile.passes.edit import sizes_of, weight_of
from speccompile.passes.match import int_attribute, ints, only_use, producer, rank, static_dim


@dataclass(frozen=True)
class ExpertProduct:
    """Rows times the weights of their experts."""

    last: ir.Node  # of the matched nodes; its output is [ids, N]
    weight: ir.Value  # [experts, N, K], or [experts, K, N] where `is_transposed`, float32
    is_transposed: bool
    source: ir.Value  # [rows, K]
    copies: int
    ids: ir.Value  # [rows * copies] int64

    @property
    def dims(self) -> tuple[int, int, int]:
        assert self.weight.const_value is not None
        num_experts, first, second = sizes_of(self.weight.const_value)
        return (num_experts, first, second) if self.is_transposed else (num_experts, second, first)


def expert_products(model: ir.Model) -> Iterator[ExpertProduct]:
    """Yields the products in order; each may be replaced before the next one is looked for."""
    for node in [node for node in model.graph if node.op_type in ("Gather", "GatherND")]:
        value = node.inputs[0] if node.graph is not None else None
        weight, ids = weight_of(value), ids_of(node) if value is not None else None
        if weight is None or value is None or ids is None or len(weight.shape) != 3:
            continue
        found = _product_of(node.outputs[0]) if weight.dtype == ir.DataType.FLOAT else None
        if found is not None:
            source, product, is_transposed = found
            yield ExpertProduct(product, value, is_transposed, *_unrepeated(source), ids)


def ids_of(gather: ir.Node) -> ir.Value | None:
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


def _unrepeated(source: ir.Value) -> tuple[ir.Value, int]:
    """Returns the rows that `source` repeats one after the other, and how often; (`source`, 1): it repeats none."""
    reshape = producer(source, "Reshape")
    expand = producer(reshape.inputs[0], "Expand") if reshape is not None else None
    unsqueeze = producer(expand.inputs[0], "Unsqueeze") if expand is not None else None
    if reshape is None or expand is None or unsqueeze is None:
        return source, 1
    rows, copies, width = unsqueeze.inputs[0], ints(expand.inputs[1]), static_dim(unsqueeze.inputs[0], 1)
    is_repeat = (
        rank(rows) == 2
        and width is not None
        and ints(unsqueeze.inputs[1]) in ([1], [-2])
        and copies is not None
        and (len(copies), copies[::2]) == (3, [1, 1])
        and ints(reshape.inputs[1]) == [-1, width]
    )
    return (rows, copies[1]) if is_repeat and rows is not None and copies is not None else (source, 1)
