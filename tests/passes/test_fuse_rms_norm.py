# SPDX-License-Identifier: Apache-2.0
"""RMS normalisations are fused in all their spellings, and nothing else is."""

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.errors import PassError
from speccompile.passes.base import Pass
from speccompile.passes.fuse_rms_norm import RMS_NORM_FUSED, fuse_rms_norm
from tests.passes.graphs import graph, ops, run

# The fused kernel divides where the separate nodes multiply by a reciprocal: two roundings of float32 apart.
RTOL = 1e-6

_PIECES = {
    "square": ["power = Pow(x, two)", "power = Mul(x, x)"],
    "root": ["root = Sqrt(sum)\n inverse = Reciprocal(root)", "inverse = Pow(sum, minus_half)"],
    "sum": ["sum = Add(mean, epsilon)", "sum = Add(epsilon, mean)"],
    "normed": ["normed = Mul(x, inverse)", "normed = Mul(inverse, x)"],
    "scaled": ["y = Mul(weight, normed)", "y = Mul(normed, weight)", "y = Identity(normed)"],
}


def rms_model(size: int, epsilon: float, *choices: int, axis: int = -1, power: float = 2.0):
    square, root, total, normed, scaled = (
        options[choice] for options, choice in zip(_PIECES.values(), choices, strict=True)
    )
    rng = np.random.default_rng(size)
    return graph(
        f"""rms (float[batch, nodes, {size}] x) => (float[batch, nodes, {size}] y) {{
            {square}
            mean = ReduceMean<keepdims = 1>(power, axes)
            {total}
            {root}
            {normed}
            {scaled}
        }}""",
        {
            "two": np.float32(power),
            "minus_half": np.float32(-0.5),
            "epsilon": np.float32(epsilon),
            "axes": np.array([axis], np.int64),
            "weight": rng.standard_normal(size).astype(np.float32),
        },
    )


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9),
    st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 1), st.integers(0, 1), st.integers(0, 2)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from([1e-6, 1e-5, 0.1]),
    st.sampled_from([-1, 2]),
)
def test_fused_in_all_spellings(size, choices, leading, epsilon, axis):
    model = rms_model(size, epsilon, *choices, axis=axis)
    x = np.random.default_rng(size).standard_normal((*leading, size)).astype(np.float32)
    before = run(model, {"x": x})[0]
    assert fuse_rms_norm(model) == 1
    assert set(ops(model)) == ({"RMSNormalization", "Identity"} if choices[4] == 2 else {"RMSNormalization"})
    np.testing.assert_allclose(run(model, {"x": x})[0], before, rtol=RTOL, atol=1e-7)


@pytest.mark.parametrize("changes", [{"axis": 1}, {"power": 3.0}])
def test_not_fused(changes):
    model = rms_model(4, 1e-6, 0, 0, 0, 0, 0, **changes)
    before = ops(model)
    assert fuse_rms_norm(model) == 0
    assert ops(model) == before


def test_another_tensor_is_not_its_own_norm():
    model = rms_model(4, 1e-6, 0, 0, 0, 0, 0)
    normed = next(n for n in model.graph if n.outputs[0].name == "normed")
    other = ir.Value(name="other", shape=normed.inputs[0].shape, type=normed.inputs[0].type)
    model.graph.inputs.append(other)
    normed.replace_input_with(0, other)
    assert fuse_rms_norm(model) == 0


def test_without_a_weight_it_is_ones():
    model, feeds = rms_model(4, 1e-6, 0, 0, 0, 0, 2), {"x": np.ones((1, 2, 4), np.float32)}
    before = run(model, feeds)[0]
    assert fuse_rms_norm(model) == 1
    fused = next(n for n in model.graph if n.op_type == "RMSNormalization")
    np.testing.assert_array_equal(fused.inputs[1].const_value.numpy(), np.ones(4, np.float32))
    np.testing.assert_allclose(run(model, feeds)[0], before, rtol=RTOL)


def test_a_matrix_is_no_weight():
    """Its rows differ by node, so only the nodes before the product are fused."""
    model = rms_model(4, 1e-6, 0, 0, 0, 0, 0)
    weight = model.graph.initializers["weight"]
    weight.const_value = ir.tensor(np.arange(8, dtype=np.float32).reshape(2, 4), name="weight")
    weight.shape = ir.Shape([2, 4])
    feeds = {"x": np.ones((1, 2, 4), np.float32)}
    before = run(model, feeds)[0]
    assert fuse_rms_norm(model) == 1
    assert ops(model) == {"RMSNormalization": 1, "Mul": 1}
    np.testing.assert_allclose(run(model, feeds)[0], before, rtol=RTOL)


def test_shared_intermediate_values_stay():
    """The mean square is also an output: it must survive."""
    model = rms_model(4, 1e-6, 0, 0, 0, 0, 0)
    model.graph.outputs.append(next(n.outputs[0] for n in model.graph if n.op_type == "ReduceMean"))
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    before = run(model, {"x": x})
    assert fuse_rms_norm(model) == 1
    assert ops(model) == {"RMSNormalization": 1, "Pow": 1, "ReduceMean": 1}
    for new, old in zip(run(model, {"x": x}), before, strict=True):
        np.testing.assert_allclose(new, old, rtol=RTOL)


def test_the_property_sees_what_is_left():
    model = rms_model(4, 1e-6, 0, 0, 0, 0, 0)
    idle = Pass("idle", lambda m: 0, ensures=(RMS_NORM_FUSED,))
    with pytest.raises(PassError, match=r"pass idle: got after it ran: .* is an unfused RMS normalisation"):
        idle(model)


def test_a_norm_of_a_norm_without_weight():
    """As in nanochat: what the second norm reads is replaced when the first is fused."""
    norm = """p{o} = Mul({i}, {i}) m{o} = ReduceMean<keepdims = 1>(p{o}, axes) s{o} = Add(m{o}, epsilon)
        r{o} = Sqrt(s{o}) v{o} = Reciprocal(r{o}) {o} = Mul({i}, v{o})"""
    model = graph(
        f"""twice (float[nodes, 4] x) => (float[nodes, 4] y) {{
            {norm.format(i="x", o="a")}
            {norm.format(i="a", o="b")}
            y = Identity(b)
        }}""",
        {"epsilon": np.float32(1e-6), "axes": np.array([-1], np.int64)},
    )
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    before = run(model, {"x": x})[0]
    assert fuse_rms_norm(model) == 2
    np.testing.assert_allclose(run(model.clone(), {"x": x})[0], before, rtol=RTOL, atol=1e-7)
