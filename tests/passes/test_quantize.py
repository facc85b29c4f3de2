# SPDX-License-Identifier: Apache-2.0
"""Quantised linears: error bound by the step of the grid, and rows that do not depend on their neighbours."""

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from speccompile.backends.onnxruntime.engine import session_options
from speccompile.errors import PassError
from speccompile.ops.grid import Grid
from speccompile.passes.attach_grids import attach_grids
from speccompile.passes.edit import Editor
from speccompile.passes.quantize_blocks import in_blocks, levels_from_weight, quantize_blocks, zeros_and_rest
from speccompile.passes.quantize_int8 import int8_from_weight, quantize_int8
from tests.cpu import least_rows
from tests.lab.graphs import open_session
from tests.passes.graphs import ops


def make_linear(weight: np.ndarray) -> ir.Model:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 24}, name="linear")
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["b", "t", weight.shape[0]]))
    graph.inputs.append(x)
    model = ir.Model(graph, ir_version=11)
    edit = Editor(model)
    y = edit.op("MatMul", x, edit.const(weight, "w"))
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape(["b", "t", weight.shape[1]])
    graph.outputs.append(y)
    return model


def session_of(model: ir.Model) -> ort.InferenceSession:
    """As the backend opens it."""
    return open_session(model, options=session_options({}))


FORMS = {
    "int8/rowq8": quantize_int8,
    "int8/blocks32": lambda m: quantize_blocks(m, 8),
    "int4/blocks32": lambda m: quantize_blocks(m, 4),
}
# Relative error of a row of the product against float64, seen at most 0.0152, 0.0106 and 0.108, times about 1.5.
BOUNDS = {"int8/rowq8": 0.023, "int8/blocks32": 0.016, "int4/blocks32": 0.17}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_in", "num_out"), [(64, 96), (192, 512), (416, 33)])
def test_product_is_near_and_rows_are_independent(form, num_in, num_out):
    rng = np.random.default_rng(num_in)
    weight = rng.standard_normal((num_in, num_out)).astype(np.float32)
    model = make_linear(weight)
    assert FORMS[form](model) == 1
    assert not [n for n in model.graph if n.op_type == "MatMul"]
    session = session_of(model)
    x = (rng.standard_normal((2, 16, num_in)) * rng.uniform(0.01, 10, (2, 16, 1))).astype(np.float32)
    got = session.run(None, {"x": x})[0]
    exact = x.astype(np.float64) @ weight.astype(np.float64)
    error = np.linalg.norm(got - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert error.max() < BOUNDS[form], error.max()
    for batch, row in np.ndindex(2, 16):
        rows = [(row + n) % 16 for n in range(least_rows(*form.split("/")))]
        alone = session.run(None, {"x": x[batch : batch + 1, rows]})[0]
        np.testing.assert_array_equal(alone[0, 0], got[batch, row])


@pytest.mark.parametrize("form", FORMS)
def test_zero_rows_and_zero_weights_give_zero(form):
    weight = np.zeros((64, 8), np.float32)
    weight[:, 0] = 1
    model = make_linear(weight)
    FORMS[form](model)
    got = session_of(model).run(None, {"x": np.stack([np.zeros((1, 64)), np.ones((1, 64))]).astype(np.float32)})[0]
    assert np.isfinite(got).all()
    assert (got[0] == 0).all() and (got[1, :, 1:] == 0).all()
    np.testing.assert_allclose(got[1, 0, 0], 64, rtol=0.01)


def test_int8_weights_round_to_the_nearest_level():
    weight = np.array([[127.0, -2.0], [0.5, 1.0], [-127.0, 2.0]], np.float32)
    levels, scale = int8_from_weight(weight)
    np.testing.assert_array_equal(levels[:, 0], [127, 0, -127])
    np.testing.assert_allclose(np.abs(levels * scale - weight).max(axis=0) <= scale / 2 + 1e-6, True)


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_pad_the_last_block_with_the_zero_point(bits):
    weight = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
    model = make_linear(weight)
    assert quantize_blocks(model, bits) == 1
    levels, scale = (model.graph.initializers[f"w.{part}"].const_value.numpy() for part in (f"int{bits}", "scale"))
    assert levels.shape == (3, 2, 32 * bits // 8) and scale.shape == (3, 2)
    zero = 0x88 if bits == 4 else 0x80
    assert (levels[:, 1, 8 * bits // 8 :] == zero).all()


@pytest.mark.parametrize(("bits", "num_in"), [(4, 64), (4, 45), (8, 96)])
def test_levels_are_the_nearest_to_scales_of_float16(bits, num_in):
    weight = np.random.default_rng(bits).standard_normal((num_in, 9)).astype(np.float32)
    levels, scales = levels_from_weight(weight, bits)
    wide = np.repeat(scales.astype(np.float32), 32, axis=0)[:num_in]
    assert levels.dtype == np.int8 and scales.dtype == np.float16
    middle = 1 << (bits - 1)
    np.testing.assert_array_equal(levels, np.clip(np.rint(weight / wide), -middle, middle - 1))
    assert (np.abs(levels * wide - weight) <= np.abs(wide) * 1.01).all()  # one level more on one side


KINDS = {
    "symmetric": {"bits": 4, "zero": 8},
    "symmetric, 8 bits": {"bits": 8, "zero": 128, "group": 128},
    "zero points": {"bits": 4, "points": True, "group": 64},
    "zero points, 8 bits": {"bits": 8, "points": True},
    "minimums": {"bits": 4, "minimums": True},
    "minimums, 5 bits, groups of 16": {"bits": 5, "minimums": True, "group": 16},
    "symmetric, 6 bits, groups of 16": {"bits": 6, "zero": 32, "group": 16},
    "whole rows": {"bits": 8, "zero": 128, "group": 1000},
    "2 bits": {"bits": 2, "zero": 2},
}


def make_grid(num_in: int, num_out: int = 12, seed: int = 0, group: int = 32, **kind: Any) -> Grid:
    """A grid of random levels, scales of float16 and minimums of float32."""
    rng, bits = np.random.default_rng(seed), kind["bits"]
    group = min(group, num_in)
    levels = rng.integers(0, 1 << bits, (num_out, num_in)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.1, (num_out, -(-num_in // group))).astype(np.float16)
    if kind.get("points"):
        minimums = -scales.astype(np.float32) * rng.integers(0, 1 << bits, scales.shape).astype(np.float32)
    else:
        minimums = -rng.uniform(0, 1, scales.shape).astype(np.float32)
    if "zero" in kind:
        return Grid(levels, scales, group, bits, kind["zero"])
    return Grid(levels, scales.astype(np.float32), group, bits, minimums=minimums)


@pytest.mark.parametrize("num_in", [192, 45])
@pytest.mark.parametrize("kind", KINDS)
def test_the_product_takes_weights_that_are_attached(kind, num_in):
    grid = make_grid(num_in, **KINDS[kind])
    model = make_linear(np.zeros((num_in, 12), np.float32))
    assert attach_grids(model, {"w": grid}) == 1
    np.testing.assert_array_equal(model.graph.initializers["w"].const_value.numpy(), grid.weight().T)
    assert quantize_blocks(model, None) == 1
    assert ("Add" in ops(model)) == ("minimums" in kind)
    eye = np.eye(num_in, dtype=np.float32)[None]  # every row gives a row of the weights
    session = session_of(model)
    got = session.run(None, {"x": eye})[0][0]
    np.testing.assert_allclose(got, grid.weight().T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_hold_the_weights_of_a_grid_exactly(kind):
    """In float64, in which no product and no sum of them is rounded."""
    grid = make_grid(200, **KINDS[kind])
    blocks = in_blocks(grid)
    assert blocks.group in (16, 32)
    np.testing.assert_array_equal(blocks.weight(), grid.weight())
    zeros, rest = zeros_and_rest(blocks)
    assert (rest is not None) == ("minimums" in kind)

    def spread(values: np.ndarray) -> np.ndarray:
        return np.repeat(values.astype(np.float64), blocks.group, axis=1)[:, :200]

    exact = (blocks.levels - spread(zeros)) * spread(blocks.scales)
    exact += 0 if rest is None else spread(rest)
    wanted = (grid.levels - float(grid.zero)) * np.repeat(grid.scales.astype(np.float64), grid.group, axis=1)[:, :200]
    wanted += 0 if grid.minimums is None else np.repeat(grid.minimums.astype(np.float64), grid.group, axis=1)[:, :200]
    np.testing.assert_array_equal(exact, wanted)


def test_weights_of_another_graph_are_not_attached():
    weight = np.ones((64, 12), np.float32)
    grid = Grid(np.ones((11, 64), np.uint8), np.ones((11, 2), np.float16), 32, 4, 8)
    with pytest.raises(PassError, match="no weights w"):
        attach_grids(make_linear(weight), {"v": grid})
    with pytest.raises(PassError, match=r"w of shape \[64, 11\]"):
        attach_grids(make_linear(weight), {"w": grid})
