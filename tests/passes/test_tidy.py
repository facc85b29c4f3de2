# SPDX-License-Identifier: Apache-2.0
"""The smaller passes on a fresh trace: reshapes, flattened linears, slices, GELU, folded weights, idle windows."""

import math

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.errors import PassError
from speccompile.passes.base import Pass
from speccompile.passes.drop_windows import drop_windows
from speccompile.passes.edit import Editor
from speccompile.passes.fold_weights import WEIGHTS_FOLDED, fold_weights
from speccompile.passes.fuse_gelu import fuse_gelu
from speccompile.passes.simplify_reshapes import simplify_reshapes
from speccompile.passes.split_slices import split_slices
from speccompile.passes.unflatten_linears import unflatten_linears
from tests.passes.graphs import graph, ops, run

ATOL = 2e-6  # float32, values of order 1


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_reshapes_with_computed_shapes():
    model = graph(
        """heads (float[batch, nodes, 12] x) => (float[batch, nodes, 3, 4] y) {
            leading = Shape<start = 0, end = 2>(x)
            shape = Concat<axis = 0>(leading, trailing)
            y = Reshape<allowzero = 1>(x, shape)
        }""",
        {"trailing": ints(-1, 4)},
    )
    feeds = {"x": normal(2, 5, 12)}
    before = run(model, feeds)[0]
    assert simplify_reshapes(model) == 1
    reshape = next(n for n in model.graph if n.op_type == "Reshape")
    assert reshape.inputs[1].const_value.numpy().tolist() == [0, 0, 3, 4]
    np.testing.assert_array_equal(run(model, feeds)[0], before)
    assert simplify_reshapes(model) == 0, "a second run finds nothing"


def test_reshapes_to_the_same_shape_go():
    model = graph(
        """same (float[a, 4] x) => (float[a, 4] y) {
            shape = Shape(x)
            z = Reshape(x, shape)
            y = Neg(z)
        }"""
    )
    model.graph[1].outputs[0].shape = model.graph.inputs[0].shape
    assert simplify_reshapes(model) == 1
    assert "Reshape" not in ops(model)


def test_reshapes_that_need_two_inferred_dims_stay():
    model = graph("""two (float[a, 4] x, int64[3] shape) => (float[b, c, 2] y) { y = Reshape(x, shape) }""")
    assert simplify_reshapes(model) == 0


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.booleans(), st.booleans())
def test_flattened_linears(batch, nodes, width, out, transposed, biased):
    model = graph(
        f"""linear (float[batch, nodes, {width}] x) => (float[batch, nodes, {out}] y) {{
            leading = Shape<start = 0, end = 2>(x)
            flat = Reshape(x, flat_shape)
            product = Gemm<transB = {int(transposed)}>(flat, weight{", bias" if biased else ""})
            shape = Concat<axis = 0>(leading, out)
            y = Reshape(product, shape)
        }}""",
        {
            "flat_shape": ints(-1, width),
            "out": ints(out),
            "weight": normal(*((out, width) if transposed else (width, out))),
            "bias": normal(out, seed=1),
        },
    )
    feeds = {"x": normal(batch, nodes, width, seed=2)}
    before = run(model, feeds)[0]
    assert unflatten_linears(model) == 1
    fold_weights(model)
    assert set(ops(model)) - {"Shape", "Concat"} == {"MatMul", "Add"} if biased else {"MatMul"}
    np.testing.assert_allclose(run(model, feeds)[0], before, atol=ATOL)


@pytest.mark.parametrize("attributes", ["alpha = 2.0", "transA = 1"])
def test_gemms_that_are_more_than_a_linear(attributes):
    model = graph(
        f"""gemm (float[2, 2, 4] x) => (float[2, 2, 4] y) {{
            flat = Reshape(x, flat_shape)
            product = Gemm<{attributes}>(flat, weight)
            y = Reshape(product, shape)
        }}""",
        {"flat_shape": ints(4, 4), "shape": ints(2, 2, 4), "weight": normal(4, 4)},
    )
    assert unflatten_linears(model) == 0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(0, 5))
def test_slices_that_adjoin(sizes, seed):
    edges = np.cumsum([0, *sizes]).tolist()
    order = np.random.default_rng(seed).permutation(len(sizes)).tolist()
    outputs = ", ".join(f"float[a, {size}] y{i}" for i, size in enumerate(sizes))
    lines = "\n".join(f"z{i} = Slice(x, edge{i}, edge{i + 1}, axis, step)\n y{i} = Neg(z{i})" for i in order)
    model = graph(
        f"cut (float[a, {edges[-1]}] x) => ({outputs}) {{ {lines} }}",
        {"axis": ints(-1), "step": ints(1), **{f"edge{i}": ints(e) for i, e in enumerate(edges)}},
    )
    feeds = {"x": normal(3, edges[-1])}
    before = run(model, feeds)
    assert split_slices(model) == 1
    assert ops(model) == {"Split": 1, "Neg": len(sizes)}
    for new, old in zip(run(model, feeds), before, strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("edges", [(0, 2, 3, 6), (0, 3, 2, 6), (0, 3, 3, 5)])
def test_slices_with_gaps_or_overlaps(edges):
    model = graph(
        """cut (float[a, 6] x) => (float[a, b] y, float[a, c] z) {
            y = Slice(x, s0, e0, axis, step)
            z = Slice(x, s1, e1, axis, step)
        }""",
        {
            "axis": ints(1),
            "step": ints(1),
            **{n: ints(e) for n, e in zip(("s0", "e0", "s1", "e1"), edges, strict=True)},
        },
    )
    assert split_slices(model) == 0


def gelu_model(factor: float, cubic: float) -> ir.Model:
    return graph(
        """gelu (float[a] x) => (float[a] y) {
            half_x = Mul(x, half)
            cube = Pow(x, three)
            bent = Mul(cube, cubic)
            sum = Add(x, bent)
            scaled = Mul(sum, factor)
            tanh = Tanh(scaled)
            gate = Add(tanh, one)
            y = Mul(half_x, gate)
        }""",
        {
            "half": np.float32(0.5),
            "three": np.float32(3),
            "one": np.float32(1),
            "cubic": np.float32(cubic),
            "factor": np.float32(factor),
        },
    )


def test_tanh_gelu():
    model, feeds = gelu_model(math.sqrt(2 / math.pi), 0.044715), {"x": np.linspace(-6, 6, 101, dtype=np.float32)}
    before = run(model, feeds)[0]
    assert fuse_gelu(model) == 1
    assert ops(model) == {"Gelu": 1}
    np.testing.assert_allclose(run(model, feeds)[0], before, atol=ATOL)


@pytest.mark.parametrize(("factor", "cubic"), [(0.8, 0.044715), (math.sqrt(2 / math.pi), 0.05)])
def test_other_constants_are_another_function(factor, cubic):
    assert fuse_gelu(gelu_model(factor, cubic)) == 0


def test_transposed_weights_are_views():
    model = graph(
        """tied (float[a, 3] x, int64[a] rows) => (float[a, 5] y, float[a, 3] z) {
            turned = Transpose<perm = [1, 0]>(weight)
            y = MatMul(x, turned)
            z = Gather(weight, rows)
        }""",
        {"weight": normal(5, 3)},
    )
    feeds = {"x": normal(2, 3), "rows": ints(4, 0)}
    before = run(model, feeds)
    assert fold_weights(model) == 1
    assert ops(model) == {"MatMul": 1, "Gather": 1}
    held = model.graph.initializers
    assert np.shares_memory(held["weight"].const_value.numpy(), held["weight.transposed"].const_value.numpy())
    for new, old in zip(run(model, feeds), before, strict=True):
        np.testing.assert_allclose(new, old, atol=ATOL)


def test_the_property_sees_transposed_weights():
    model = graph(
        "t (float[a, 3] x) => (float[a, 5] y) { w = Transpose(weight)\n y = MatMul(x, w) }", {"weight": normal(5, 3)}
    )
    idle = Pass("idle", lambda m: 0, ensures=(WEIGHTS_FOLDED,))
    with pytest.raises(PassError, match="w is transposed at run time"):
        idle(model)


def test_transposed_activations_stay():
    model = graph("t (float[a, 3] x) => (float[3, a] y) { y = Transpose(x) }")
    assert fold_weights(model) == 0


@pytest.mark.parametrize(("window", "left"), [(15, 15), (16, 0), (4096, 0), (0, 0)])
def test_windows_as_long_as_the_cache_are_dropped(window, left):
    model = graph("empty (float[a] x) => (float[a] y) { y = Neg(x) }")
    Editor(model).op("CachedAttention", model.graph.inputs[0], domain="speccompile", num_outputs=3, window=window)
    assert drop_windows(model, 16) == (window >= 16)
    assert model.graph[-1].attributes["window"].as_int() == left
