# SPDX-License-Identifier: Apache-2.0
"""Gathered experts -> one product of all rows with all experts, whose weights may be of few bits, for TensorRT.

TensorRT would copy the gathered weights of each row's experts, for a chunk of a prompt whole gigabytes, and it stores
gathered constants of few bits in four bytes each. As one product [1, rows, K] x [experts, K, N] the weights are read
where they are, blocks of int4 or int8 included (TensorRT-RTX 1.7.1). The work is that of all experts for all rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from speccompile.passes.base import Pass
from speccompile.passes.edit import Editor, nodes_of, sizes_of, weight_of
from speccompile.passes.expert_products import expert_products
from speccompile.passes.match import replace_tree
from speccompile.passes.quantize_qdq import LARGEST, QUANTIZED_TYPES, block_of, rounded_scale
from speccompile.passes.save import PartsTensor

# Forms of experts by that of the linears. Blocks of fp8 were not tried.
EXPERT_FORMS = {"none": None, "int8": "int8", "int4": "int4", "fp8": "int8"}


def expert_scales(matrix: np.ndarray, form: str, dtype: str) -> np.ndarray:
    """Returns the scales [K / block, N] of one expert's weights [K, N] float32; exact in `dtype`."""
    block = block_of(len(matrix))
    assert block is not None
    peaks = np.abs(matrix.reshape(-1, block, matrix.shape[1])).max(axis=1)
    return rounded_scale(peaks, LARGEST[form], dtype)


def expert_levels(matrix: np.ndarray, scales: np.ndarray, form: str) -> np.ndarray:
    """Returns the nearest levels [K, N] of one expert's weights [K, N] float32 under scales [K / block, N]."""
    ratios = matrix.reshape(len(scales), -1, matrix.shape[1]) / scales[:, None]
    nearest = np.clip(np.rint(ratios), -LARGEST[form], LARGEST[form])
    levels: np.ndarray = nearest.reshape(matrix.shape).astype(QUANTIZED_TYPES[form].numpy())
    return levels


def _constant(value: ir.Value, is_transposed: bool, edit: Editor, form: str | None, dtype: str) -> ir.Value:
    """Returns weights [experts, K, N], made while they are written.

    Args:
        value: [experts, N, K], or [experts, K, N] where `is_transposed`.
        form: int8 or int4; None: float32.
        dtype: the graph's final dtype.
    """
    tensor = value.const_value
    assert tensor is not None
    num_experts, *sides = sizes_of(tensor)
    num_in, num_out = sides if is_transposed else sides[::-1]
    name, block = str(value.name), block_of(num_in)

    def matrices() -> Iterator[np.ndarray]:
        return (weight if is_transposed else weight.T for weight in tensor.numpy())

    shape = (num_experts, num_in, num_out)
    if form is None or block is None:
        return edit.const(PartsTensor(matrices, ir.DataType.FLOAT, shape, f"{name}.dense"), f"{name}.dense")

    def levels() -> Iterator[np.ndarray]:
        return (expert_levels(m, expert_scales(m, form, dtype), form) for m in matrices())

    def scales() -> Iterator[np.ndarray]:
        return (expert_scales(m, form, dtype) for m in matrices())

    parts = (
        PartsTensor(levels, QUANTIZED_TYPES[form], shape, f"{name}.{form}"),
        PartsTensor(scales, ir.DataType.FLOAT, (num_experts, num_in // block, num_out), f"{name}.scale"),
    )
    values = [edit.const(part, str(part.name)) for part in parts]
    weight: ir.Value = edit.op("DequantizeLinear", *values, axis=1, block_size=block)
    weight.dtype, weight.shape = ir.DataType.FLOAT, ir.Shape(shape)
    return weight


def _whole_products(model: ir.Model) -> list[ir.Node]:
    nodes = [(node, weight_of(node.inputs[1])) for node in nodes_of(model, "MatMul")]
    return [n for n, weight in nodes if weight is not None and len(weight.shape) == 3 and block_of(sizes_of(weight)[1])]


def dense_experts(model: ir.Model, quantization: str, dtype: str) -> int:
    """Replaces every product with gathered weights, and quantises those with all experts; returns their number.

    Args:
        quantization: none, int8, int4 or fp8; experts of fp8 models are int8.
        dtype: the graph's final dtype, to which the scales are rounded before the levels are chosen.
    """
    found, made, form = (
        list(expert_products(model)),
        dict[tuple[ir.Value, bool], ir.Value](),
        EXPERT_FORMS[quantization],
    )
    whole = _whole_products(model) if form is not None else []
    for node in whole:
        weight = node.inputs[1]
        assert weight is not None
        node.replace_input_with(1, _constant(weight, True, Editor(model, node), form, dtype))
        if not weight.uses():
            del model.graph.initializers[str(weight.name)]
    for product in found:
        edit, key = Editor(model, product.last), (product.weight, product.is_transposed)
        if key not in made:
            made[key] = _constant(*key, edit, form, dtype)
        all_rows = edit.op("MatMul", edit.op("Unsqueeze", product.source, edit.ints([0])), made[key])
        flat = edit.op("Reshape", all_rows, edit.ints([-1, product.dims[2]]))
        num_rows = edit.op("Squeeze", edit.op("Shape", product.source, start=0, end=1))
        num_ids = edit.op("Squeeze", edit.op("Shape", product.ids, start=0, end=1))
        rows = edit.op("Range", edit.ints(0), num_ids, edit.ints(1))
        if product.copies > 1:
            rows = edit.op("Div", rows, edit.ints(product.copies))
        chosen = edit.op("Add", edit.op("Mul", product.ids, num_rows), rows)
        out = edit.op("Gather", flat, chosen, axis=0)
        old = product.last.outputs[0]
        out.shape, out.type = old.shape, old.type
        for value, size in ((all_rows, 3), (flat, 2)):
            value.type = ir.TensorType(ir.DataType.FLOAT)
            assert value.shape is None or len(value.shape) == size
        replace_tree(product.last, out)
    for value in {product.weight for product in found}:
        if not value.uses():
            del model.graph.initializers[str(value.name)]
    return len(found) + len(whole)


def dense_experts_pass(quantization: str, dtype: str) -> Pass:
    """Returns the pass for none, int8, int4 or fp8."""
    return Pass(f"dense_experts_{quantization}", lambda model: dense_experts(model, quantization, dtype))
