# SPDX-License-Identifier: Apache-2.0
"""Gathered experts -> one product of all rows with all experts, whose weights may be of few bits, for TensorRT.

An exported mixture gathers the weights of each row's experts. TensorRT would copy them, for a chunk of a prompt whole
gigabytes, and it dequantises constants alone: constants of few bits that are gathered it stores in four bytes each.
As one product [1, rows, K] x [experts, K, N] the weights are read where they are, blocks of int4 or int8 included (seen
in the sizes of TensorRT-RTX 1.7.1's plans); of the results each row takes its experts'. The work is that of all experts
for all rows, and a step reads all weights, as a step of many rows does anyway.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from speccompile.passes.base import Pass
from speccompile.passes.edit import Editor
from speccompile.passes.expert_products import ExpertProduct, expert_products
from speccompile.passes.match import replace_tree
from speccompile.passes.quantize_qdq import LARGEST, QUANTIZED_TYPES, block_of, rounded_scale

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


def _matrices(product: ExpertProduct) -> list[np.ndarray]:
    """Returns the weights of each expert as [K, N], views of the tensor."""
    tensor = product.weight.const_value
    assert tensor is not None
    return [weight if product.is_transposed else weight.T for weight in tensor.numpy()]


def _constant(product: ExpertProduct, edit: Editor, form: str | None, dtype: str) -> ir.Value:
    """Returns the weights [experts, K, N] of a product, made while they are written."""
    num_experts, num_in, num_out = product.dims
    name, block = str(product.weight.name), block_of(num_in)
    shape = ir.Shape((num_experts, num_in, num_out))
    if form is None or block is None:

        def plain() -> ir.TensorProtocol:
            return ir.tensor(np.stack(_matrices(product)), name=f"{name}.dense")

        held = ir.LazyTensor(plain, ir.DataType.FLOAT, shape, name=f"{name}.dense")
        return edit.const(held, f"{name}.dense")

    def levels() -> ir.TensorProtocol:
        made = [expert_levels(m, expert_scales(m, form, dtype), form) for m in _matrices(product)]
        return ir.tensor(np.stack(made), dtype=QUANTIZED_TYPES[form], name=f"{name}.{form}")

    def scales() -> ir.TensorProtocol:
        return ir.tensor(np.stack([expert_scales(m, form, dtype) for m in _matrices(product)]), name=f"{name}.scale")

    scale_shape = ir.Shape((num_experts, num_in // block, num_out))
    parts = (
        ir.LazyTensor(levels, QUANTIZED_TYPES[form], shape, name=f"{name}.{form}"),
        ir.LazyTensor(scales, ir.DataType.FLOAT, scale_shape, name=f"{name}.scale"),
    )
    values = [edit.const(part, str(part.name)) for part in parts]
    weight: ir.Value = edit.op("DequantizeLinear", *values, axis=1, block_size=block)
    weight.dtype, weight.shape = ir.DataType.FLOAT, shape
    return weight


def dense_experts(model: ir.Model, quantization: str, dtype: str) -> int:
    """Replace every product with gathered weights; returns their number.

    Args:
        model: in float32.
        quantization: none, int8, int4 or fp8; experts of fp8 models are int8.
        dtype: the graph's final dtype, to which the scales are rounded before the levels are chosen.
    """
    found, made = list(expert_products(model)), dict[tuple[ir.Value, bool], ir.Value]()
    for product in found:
        edit, key = Editor(model, product.last), (product.weight, product.is_transposed)
        if key not in made:
            made[key] = _constant(product, edit, EXPERT_FORMS[quantization], dtype)
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
    return len(found)


def dense_experts_pass(quantization: str, dtype: str) -> Pass:
    """Returns the pass for none, int8, int4 or fp8."""
    return Pass(f"dense_experts_{quantization}", lambda model: dense_experts(model, quantization, dtype))
