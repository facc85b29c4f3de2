# SPDX-License-Identifier: Apache-2.0
"""Weights as Q/DQ: errors bounded by the step of the grid, scales exact in the graph's dtype, and excluded weights."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from speccompile.core.specs import LOGITS
from speccompile.errors import RecipeError
from speccompile.ops.grid import Grid
from speccompile.passes.edit import Editor, add_input
from speccompile.passes.quantize_qdq import block_of, levels_of, quantize_qdq, quantize_qdq_pass, scale_of, stored_qdq
from tests.lab.graphs import run_session

DTYPES = ["float32", "float16", "bfloat16"]


def random_weight(num_in: int, num_out: int) -> np.ndarray:
    rng = np.random.default_rng(num_in + num_out)
    return (rng.standard_normal((num_in, num_out)) * rng.uniform(0.01, 3, num_out)).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_errs_by_half_a_step_at_most(dtype):
    weight = random_weight(96, 33)
    scale = scale_of(weight, "int8", dtype)
    levels = levels_of(weight, scale, "int8")
    assert levels.dtype == np.int8 and scale.shape == (33,)
    error = np.abs(levels.astype(np.float64) * scale - weight)
    assert (error <= scale / 2 * (1 + 1e-6)).all()
    # Rounding a scale up costs one unit in the last place of the dtype.
    ulp = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    assert (scale <= np.abs(weight).max(axis=0) / 127 * (1 + 2 * ulp)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("num_in", "block"), [(48, 16), (96, 32), (192, 64), (256, 128)])
def test_int4_errs_by_half_a_step_of_its_block(num_in, block, dtype):
    weight = random_weight(num_in, 17)
    scale = scale_of(weight, "int4", dtype)
    levels = levels_of(weight, scale, "int4")
    assert levels.dtype == ml_dtypes.int4 and scale.shape == (num_in // block, 17)
    steps = np.repeat(scale, block, axis=0)
    error = np.abs(levels.astype(np.float64) * steps - weight)
    assert (error <= steps / 2 * (1 + 1e-6)).all()
    assert np.abs(levels.astype(np.int8)).max() == 7


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fp8_errs_by_a_sixteenth_of_the_weight_or_half_a_subnormal_step(dtype):
    weight = random_weight(128, 9)
    scale = scale_of(weight, "fp8", dtype)
    levels = levels_of(weight, scale, "fp8")
    assert levels.dtype == ml_dtypes.float8_e4m3fn and np.isfinite(levels.astype(np.float32)).all()
    error = np.abs(levels.astype(np.float64) * scale - weight)
    # Three mantissa bits: half a unit is 2^-4 of the number; below 2^-6 the step is 2^-9.
    assert (error <= np.maximum(np.abs(weight) * 2.0**-4, scale * 2.0**-10) * (1 + 1e-6)).all()


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_are_numbers_of_the_dtype_and_zeros_stay_zero(form, dtype):
    weight = random_weight(32, 5)
    weight[:, 2] = 0
    weight[:, 3] = 1e-9  # below float16's normal numbers once divided by the levels
    scale = scale_of(weight, form, dtype)
    kind = {"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)
    np.testing.assert_array_equal(scale.astype(kind).astype(np.float32), scale)
    assert (scale > 0).all()
    assert (levels_of(weight, scale, form).astype(np.float32)[:, 2] == 0).all()


def test_blocks_are_the_largest_that_divide():
    assert [block_of(n) for n in (5120, 13824, 192, 96, 48, 40)] == [128, 128, 64, 32, 16, None]


def make_model(num_in: int, hidden: int, vocab: int) -> ir.Model:
    """x -> two linears -> a factor -> LM head, as in some families."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 24}, name="graph")
    model = ir.Model(graph, ir_version=12)
    x = add_input(model, "x", ["batch", "nodes", num_in], "float32")
    edit = Editor(model)
    up = edit.op("MatMul", x, edit.const(random_weight(num_in, hidden), "up"))
    down = edit.op("MatMul", up, edit.const(random_weight(hidden, num_in), "down"))
    head = edit.op("MatMul", down, edit.const(random_weight(num_in, vocab), "head"))
    logits = edit.op("Mul", head, edit.const(np.float32(0.5), "factor"))
    logits.name, logits.type = LOGITS, ir.TensorType(ir.DataType.FLOAT)
    logits.shape = ir.Shape(["batch", "nodes", vocab])
    graph.outputs.append(logits)
    return model


def types_of(model: ir.Model) -> dict[str, ir.DataType]:
    return {
        str(v.name): v.dtype
        for v in model.graph.initializers.values()
        if v.dtype in (ir.DataType.INT4, ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN)
    }


def test_int4_leaves_the_head_and_odd_sizes_to_int8():
    model = make_model(64, 40, 97)
    assert quantize_qdq(model, "int4", "float16") == 3
    assert types_of(model) == {
        "up.int4": ir.DataType.INT4,
        "down.int8": ir.DataType.INT8,  # nothing divides its 40 inputs
        "head.int8": ir.DataType.INT8,
    }
    assert {"up", "down", "head"}.isdisjoint(model.graph.initializers)
    node = next(n for n in model.graph if n.op_type == "DequantizeLinear")
    assert node.attributes["block_size"].as_int() == 64 and node.attributes["axis"].as_int() == 0


def relative_error(model: ir.Model) -> float:
    """The expected relative error of the product of all linears, each independent: root of the sum of squares."""
    total = 0.0
    for name in ("up", "down", "head"):
        node = next(n for n in model.graph if n.op_type == "DequantizeLinear" and n.inputs[0].name.startswith(name))
        levels, scale = (v.const_value.numpy().astype(np.float64) for v in node.inputs)
        exact = random_weight(*levels.shape)
        if scale.ndim == 2:
            scale = np.repeat(scale, len(levels) // len(scale), axis=0)
        total += (np.linalg.norm(levels * scale - exact) / np.linalg.norm(exact)) ** 2
    return float(np.sqrt(total))


@pytest.mark.parametrize(("quantization", "largest"), [("int8", 0.02), ("int4", 0.2), ("fp8", 0.05)])
def test_products_err_as_much_as_their_weights(quantization, largest):
    model, exact = make_model(64, 48, 97), make_model(64, 48, 97)
    quantize_qdq(model, quantization, "float32")
    x = np.random.default_rng(0).standard_normal((2, 16, 64)).astype(np.float32)
    got, wanted = (run_session(m, {"x": x})[0] for m in (model, exact))
    error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
    expected = relative_error(model)
    assert expected < largest
    assert expected / 2 < error < 2 * expected


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(RecipeError, match=r"quantization: got nf4; expected none, int8, int4, fp8"):
        quantize_qdq_pass("nf4", "float16")
    with pytest.raises(RecipeError, match=r"got int4 with dtype float32; .*Set target.dtype: float16"):
        quantize_qdq_pass("int4", "float32")


def held_grid(bits: int, group: int, scale: float = 0.5, **fields: Any) -> Grid:
    rng = np.random.default_rng(bits)
    levels = rng.integers(0, 1 << bits, (5, 128)).astype(np.uint8)
    scales = (scale * rng.integers(1, 100, (5, -(-128 // group)))).astype(np.float16)
    scales[0, 0] = 0
    return Grid(levels, scales, group, bits, fields.get("zero", 1 << (bits - 1)), fields.get("minimums"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, 32), (4, 128), (2, 64), (8, 1000), (8, 32), (6, 16)])
def test_stored_levels_have_the_numbers_of_their_grid(bits, group, dtype):
    grid = held_grid(bits, group)
    held = stored_qdq(grid, dtype)
    assert held is not None
    levels, scales, attributes = held
    assert levels.dtype == (ml_dtypes.int4 if bits <= 4 else np.int8) and (scales > 0).all()
    assert attributes == ({"axis": 1} if group > 128 else {"axis": 0, "block_size": group})
    steps = scales if scales.ndim == 1 else np.repeat(scales, group, axis=0)
    np.testing.assert_array_equal(levels.astype(np.float32) * steps, grid.weight().T)


@pytest.mark.parametrize(
    ("grid", "dtype"),
    [
        (held_grid(4, 32), "float32"),
        (held_grid(8, 48), "float16"),
        (held_grid(4, 32, -0.5), "float16"),
        (held_grid(4, 32, 0.001), "bfloat16"),  # scales of eleven bits
        (held_grid(4, 32, zero=0, minimums=np.ones((5, 4), np.float16)), "float16"),
    ],
)
def test_grids_that_no_type_of_tensorrt_holds(grid, dtype):
    assert stored_qdq(grid, dtype) is None
