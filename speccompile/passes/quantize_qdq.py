# SPDX-License-Identifier: Apache-2.0
"""Quantise weights to int8 per output channel, int4 in blocks of the input, or fp8 E4M3 per output channel, as Q/DQ.

TensorRT fuses the DequantizeLinear of a constant into the product (TensorRT-RTX 1.7.1: all three, blocks of 16 to 128,
float16 and bfloat16). Embeddings stay in the graph's dtype. Under int4 the LM head becomes int8: it decides every token
and is read once per step, so four bits would save little and cost most accuracy.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from speccompile.core.specs import LOGITS
from speccompile.errors import RecipeError
from speccompile.ops.grid import Grid
from speccompile.passes.attach_grids import grid_of
from speccompile.passes.base import Pass
from speccompile.passes.edit import Editor, nodes_of, replace, sizes_of, weight_of
from speccompile.passes.stored_rows import StoredRows

BLOCKS = (128, 64, 32, 16)  # of int4, the first that divides the inputs: larger blocks have fewer scales to read
# A channel of zeros: any positive scale keeps it 0. Float16's subnormals suffice while they have four bits.
MIN_SCALE = {"float32": np.float32(1e-12), "bfloat16": np.float32(1e-12), "float16": np.float32(2**-20)}
LARGEST = {"int8": np.float32(127), "int4": np.float32(7), "fp8": np.float32(448)}  # levels; symmetric

QUANTIZED_TYPES = {"int8": ir.DataType.INT8, "int4": ir.DataType.INT4, "fp8": ir.DataType.FLOAT8E4M3FN}


def rounded_scale(peak: np.ndarray, largest: np.float32, dtype: str) -> np.ndarray:
    """Returns peak / largest rounded to `dtype`, upwards where the peak would otherwise be out of range."""
    kind = np.dtype({"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype))
    smallest = MIN_SCALE[dtype]
    exact = np.maximum(peak / largest, smallest).astype(np.float32)
    scale = exact.astype(kind)
    above = np.nextafter(scale, np.array(np.inf, kind))
    rounded: np.ndarray = np.where(scale.astype(np.float32) < exact, above, scale).astype(np.float32)
    return rounded


def scale_of(weight: np.ndarray, form: str, dtype: str) -> np.ndarray:
    """Returns the scales of `weight` [in, out] float32: [out], or [in / block, out] for int4; exact in `dtype`."""
    if form == "int4":
        block = block_of(len(weight))
        assert block is not None
        weight = weight.reshape(-1, block, weight.shape[1])
        return rounded_scale(np.abs(weight).max(axis=1), LARGEST[form], dtype)
    return rounded_scale(np.abs(weight).max(axis=0), LARGEST[form], dtype)


def levels_of(weight: np.ndarray, scale: np.ndarray, form: str) -> np.ndarray:
    """Returns the nearest levels [in, out]: int8 in -127..127, int4 in -7..7, or float8_e4m3fn up to 448."""
    if form == "int4":
        rows = weight.reshape(len(scale), -1, weight.shape[1]) / scale[:, None]
        ratios = rows.reshape(weight.shape)
    else:
        ratios = weight / scale
    kind = QUANTIZED_TYPES[form].numpy()
    nearest = ratios if form == "fp8" else np.rint(ratios)
    levels: np.ndarray = np.clip(nearest, -LARGEST[form], LARGEST[form]).astype(kind)
    return levels


def block_of(num_in: int) -> int | None:
    """Returns the int4 block for that many inputs; None when none divides them."""
    return next((b for b in BLOCKS if num_in % b == 0), None)


def _form_of(quantization: str, num_in: int, is_head: bool) -> str:
    if quantization == "int4" and (is_head or block_of(num_in) is None):
        return "int8"
    return quantization


def find_head(model: ir.Model) -> ir.Node | None:
    """Returns the MatMul that computes the logits: the first one upstream of them."""
    outputs = {v.name: v for v in model.graph.outputs}
    value = outputs.get(LOGITS)
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "MatMul":
            return node
        value = next((v for v in node.inputs if v is not None and v.producer() is not None), None)
    return None


def linears_of(model: ir.Model) -> list[ir.Node]:
    """Returns the MatMuls with constant weights [in, out]."""
    nodes = nodes_of(model, "MatMul")
    return [n for n in nodes if (w := weight_of(n.inputs[1])) is not None and len(w.shape) == 2]


def quantize_qdq(model: ir.Model, quantization: str, dtype: str) -> int:
    """Quantises every linear with constant weights [in, out] of a float32 model without a tail; returns their number.

    Args:
        quantization: int8, int4 or fp8.
        dtype: the graph's final dtype, to which the scales are rounded before the levels are chosen.
    """
    head, nodes = find_head(model), linears_of(model)
    for node in nodes:
        value = node.inputs[1]
        assert value is not None and value.name is not None
        tensor = weight_of(value)
        assert tensor is not None
        num_in, num_out = sizes_of(tensor)
        form = _form_of(quantization, num_in, node is head)
        edit = Editor(model, node)
        levels, scale = _lazy(tensor, form, num_in, num_out, value.name, dtype)
        attributes = {"axis": 0, "block_size": block_of(num_in)} if form == "int4" else {"axis": 1}
        weight = edit.op(
            "DequantizeLinear", edit.const(levels, str(levels.name)), edit.const(scale, str(scale.name)), **attributes
        )
        weight.dtype, weight.shape = ir.DataType.FLOAT, ir.Shape([num_in, num_out])
        out = edit.op("MatMul", node.inputs[0], weight)
        out.shape, out.type = node.outputs[0].shape, node.outputs[0].type
        replace(node, out)
        if not list(value.uses()):
            del model.graph.initializers[value.name]
    return len(nodes)


def _lazy(
    tensor: ir.TensorProtocol, form: str, num_in: int, num_out: int, name: str, dtype: str
) -> tuple[ir.LazyTensor, ir.LazyTensor]:
    scale_shape = (num_in // (block_of(num_in) or 1), num_out) if form == "int4" else (num_out,)

    def levels() -> ir.TensorProtocol:
        weight = tensor.numpy()
        found = levels_of(weight, scale_of(weight, form, dtype), form)
        return ir.tensor(found, dtype=QUANTIZED_TYPES[form], name=f"{name}.{form}")

    def scale() -> ir.TensorProtocol:
        return ir.tensor(scale_of(tensor.numpy(), form, dtype), name=f"{name}.scale")

    return (
        ir.LazyTensor(levels, QUANTIZED_TYPES[form], ir.Shape((num_in, num_out)), name=f"{name}.{form}"),
        ir.LazyTensor(scale, ir.DataType.FLOAT, ir.Shape(scale_shape), name=f"{name}.scale"),
    )


def stored_qdq(grid: Grid, dtype: str) -> tuple[np.ndarray, np.ndarray, dict[str, Any]] | None:
    """Returns levels [in, out], scales and attributes of the DequantizeLinear that has a grid's very numbers.

    None: it has a minimum, a group that no block has, or a scale that is negative or not of the graph's dtype.
    """
    kind, scales = grid.kind, grid.scales.astype(np.float32)
    num_in = grid.levels.shape[1]
    form = "int4" if kind.bits <= 4 else "int8"
    block = kind.group or (num_in if form == "int4" else 0)
    is_blocked = block in BLOCKS and num_in % block == 0
    narrow = scales.astype({"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)).astype(np.float32)
    if kind.has_minimums or (narrow != scales).any() or (scales < 0).any() or dtype == "float32":
        return None
    if block and not is_blocked:
        return None
    levels = grid.levels.astype(np.int16) - grid.zero
    levels[np.repeat(scales == 0, grid.group, axis=1)[:, :num_in]] = 0
    scales[scales == 0] = MIN_SCALE[dtype]
    found = levels.T.astype(QUANTIZED_TYPES[form].numpy())
    if is_blocked:
        return found, scales.T.copy(), {"axis": 0, "block_size": block}
    return found, scales[:, 0].copy(), {"axis": 1}


def quantize_stored(model: ir.Model, dtype: str, rows: StoredRows) -> int:
    """Quantises the linears whose grid TensorRT's types hold; returns their number.

    Args:
        dtype: the graph's final dtype.
        rows: `widened` is filled with the others that have a grid: their numbers are rounded to `dtype`.
    """
    count = 0
    for node in linears_of(model):
        value = node.inputs[1]
        tensor = weight_of(value)
        if value is None or tensor is None or (grid := grid_of(tensor)) is None:
            continue
        name, form = str(value.name), "int4" if grid.bits <= 4 else "int8"
        if (held := stored_qdq(grid, dtype)) is None:
            rows.widened[name] = tensor.size
            continue
        edit = Editor(model, node)
        levels = ir.tensor(held[0], dtype=QUANTIZED_TYPES[form], name=f"{name}.{form}")
        weight = edit.op(
            "DequantizeLinear", edit.const(levels, f"{name}.{form}"), edit.const(held[1], f"{name}.scale"), **held[2]
        )
        weight.dtype, weight.shape = ir.DataType.FLOAT, ir.Shape(sizes_of(tensor))
        out = edit.op("MatMul", node.inputs[0], weight)
        out.shape, out.type = node.outputs[0].shape, node.outputs[0].type
        replace(node, out)
        if not list(value.uses()):
            del model.graph.initializers[name]
        count += 1
    return count


def quantize_qdq_pass(quantization: str, dtype: str) -> Pass:
    """Returns the pass. Raises RecipeError: no such quantisation, or int4 in float32, which TensorRT does not fuse."""
    if quantization not in QUANTIZED_TYPES:
        raise RecipeError("quantization", quantization, f"none, {', '.join(QUANTIZED_TYPES)}", "Choose one of these.")
    if quantization != "int8" and dtype == "float32":
        todo = "Set target.dtype: float16 or bfloat16."
        raise RecipeError("quantization", f"{quantization} with dtype float32", "a half-precision dtype", todo)
    return Pass(f"quantize_qdq_{quantization}", lambda model: quantize_qdq(model, quantization, dtype))
