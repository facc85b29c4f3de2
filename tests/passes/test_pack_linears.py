# SPDX-License-Identifier: Apache-2.0
"""Packed linears: biases, gates and norms are folded in where they belong to the linear, and nowhere else."""

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from speccompile.ops.grid import Grid
from speccompile.ops.registry import attach_functions
from speccompile.passes.attach_grids import attach_grids
from speccompile.passes.fuse_norm_linears import fuse_norm_linears
from speccompile.passes.pack_linears import is_bfloat16, pack_linears
from speccompile.passes.quantize_blocks import quantize_blocks
from tests.lab.graphs import open_session
from tests.passes.graphs import graph, ops

RNG = np.random.default_rng(0)
K, N = 48, 40


def numbers(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) * 0.2).astype(np.float32)


def head(outputs: str, **weights: np.ndarray) -> str:
    names = ", ".join(f"float{list(w.shape)} {n}" for n, w in weights.items())
    return f"test (float[b, t, {K}] x, float[b, t, {K}] r) => ({outputs}) <{names}>"


def run(model: ir.Model) -> list[np.ndarray]:
    """The outputs under ONNX Runtime without our kernels: function bodies are run."""
    attach_functions(model)
    session = open_session(model)
    rng = np.random.default_rng(1)
    feeds = {v.name: rng.standard_normal((2, 3, K)).astype(np.float32) for v in session.get_inputs()}
    return session.run(None, feeds)


def make(body: str, outputs: str, **weights: np.ndarray) -> ir.Model:
    return graph(f"{head(outputs, **weights)} {{{body}}}", weights)


def check_same(before: ir.Model, after: ir.Model, tolerance: float = 3e-6) -> None:
    for wanted, got in zip(run(before), run(after), strict=True):
        assert got.shape == wanted.shape
        assert np.abs(got - wanted).max() <= tolerance * np.abs(wanted).max()


PLAIN = "y = MatMul(x, w)"
GATES = {
    "silu": ("s = Sigmoid(a) h = Mul(a, s) y = Mul(h, b)", 0),
    "silu, other orders": ("s = Sigmoid(a) h = Mul(s, a) y = Mul(b, h)", 0),
    "gelu_tanh": ('h = Gelu<approximate = "tanh">(a) y = Mul(h, b)', 1),
    "gelu_erf": ("h = Gelu(a) y = Mul(h, b)", 2),
    "up first": ("s = Sigmoid(b) h = Mul(b, s) y = Mul(h, a)", 0),
}


@pytest.mark.parametrize(("bits", "form"), [(0xFFFF0000, "Bf16"), (0xFFFFFFFF, "F32")])
def test_bfloat16_is_taken_where_it_is_exact(bits, form):
    weight = (numbers(K, N).view(np.uint32) & np.uint32(bits)).view(np.float32)
    assert is_bfloat16(weight) == (form == "Bf16")
    model = make(PLAIN, f"float[b, t, {N}] y", w=weight)
    after = model.clone()
    assert pack_linears(after, "float") == 1 and ops(after) == {f"PackedLinear{form}": 1}
    [value] = [v for v in after.graph.initializers.values() if v.name == "w.packed"]
    assert value.const_value is not None
    packed = value.const_value.numpy()
    assert tuple(value.const_value.shape) == packed.shape
    assert packed.dtype == (ml_dtypes.bfloat16 if form == "Bf16" else np.float32)
    assert "w" not in after.graph.initializers
    check_same(model, after)


@pytest.mark.parametrize("weights", ["float", "int8", "int4"])
@pytest.mark.parametrize("body", [PLAIN, "p = MatMul(x, w) y = Add(p, c)", "p = MatMul(x, w) y = Add(c, p)"])
def test_a_bias_is_folded_in(weights, body):
    used = {"w": numbers(K, N)} | ({"c": numbers(N)} if "Add" in body else {})
    model = make(body, f"float[b, t, {N}] y", **used)
    after = model.clone()
    assert pack_linears(after, weights) == 1
    [(name, count)] = ops(after).items()
    assert name.startswith("PackedLinear") and count == 1
    check_same(model, after, {"float": 3e-6, "int8": 0.02, "int4": 0.3}[weights])


@pytest.mark.parametrize(
    "body",
    [
        "p = MatMul(x, w) y = Add(p, c) z = Identity(p)",  # the product is read elsewhere
        "p = MatMul(x, w) y = Add(p, d) z = Identity(y)",  # not a number per column
    ],
)
def test_what_is_no_bias_stays(body):
    outputs = f"float[b, t, {N}] y, float[b, t, {N}] z"
    used = {"w": numbers(K, N)} | ({"c": numbers(N)} if "c)" in body else {"d": numbers(1)})
    model = make(body, outputs, **used)
    after = model.clone()
    assert pack_linears(after, "float") == 1 and ops(after)["Add"] == 1
    check_same(model, after)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_a_gate_is_folded_in(gate, has_bias):
    text, kind = GATES[gate]
    product = "q = MatMul(x, w) p = Add(q, c)" if has_bias else "p = MatMul(x, w)"
    used = {"w": numbers(K, N)} | ({"c": numbers(N)} if has_bias else {})
    model = make(f"{product} a, b = Split<axis = -1, num_outputs = 2>(p) {text}", f"float[b, t, {N // 2}] y", **used)
    after = model.clone()
    assert pack_linears(after, "float") == 1 and ops(after) == {"GatedPackedLinearF32": 1}
    [node] = after.graph
    assert node.attributes["activation"].as_int() == kind
    packed = node.inputs[1].const_value
    assert packed is not None and tuple(packed.shape) == packed.numpy().shape
    check_same(model, after)


@pytest.mark.parametrize(
    "text",
    [
        "s = Sigmoid(a) h = Mul(a, s) y = Mul(h, h)",  # not a product with the other half
        "s = Sigmoid(a) h = Mul(a, s) g = Mul(h, b) y = Add(g, a)",  # a half is read elsewhere
        "s = Sigmoid(a) h = Mul(b, s) y = Mul(h, a)",  # not SiLU of one half
        "h = Tanh(a) y = Mul(h, b)",  # an activation that the kernel does not have
    ],
)
def test_what_is_no_gate_stays(text):
    model = make(
        f"p = MatMul(x, w) a, b = Split<axis = -1, num_outputs = 2>(p) {text}",
        f"float[b, t, {N // 2}] y",
        w=numbers(K, N),
    )
    after = model.clone()
    assert pack_linears(after, "float") == 1 and ops(after)["PackedLinearF32"] == 1 and ops(after)["Split"] == 1
    check_same(model, after)


def test_uneven_halves_are_no_gate():
    sizes = np.array([24, 16], np.int64)
    text = "p = MatMul(x, w) a, b = Split<axis = -1>(p, sizes) h = Gelu(a) y = MatMul(h, v) z = MatMul(b, u)"
    outputs = "float[b, t, 8] y, float[b, t, 8] z"
    model = graph(
        f"test (float[b, t, {K}] x) => ({outputs}) <float[{K}, {N}] w, int64[2] sizes, float[24, 8] v, float[16, 8] u>"
        f" {{{text}}}",
        {"w": numbers(K, N), "sizes": sizes, "v": numbers(24, 8), "u": numbers(16, 8)},
    )
    after = model.clone()
    assert pack_linears(after, "float") == 3 and ops(after)["Split"] == 1
    check_same(model, after)


def test_a_weight_that_two_linears_read_is_packed_once():
    model = make("y = MatMul(x, w) z = MatMul(r, w)", f"float[b, t, {N}] y, float[b, t, {N}] z", w=numbers(K, N))
    after = model.clone()
    assert pack_linears(after, "int8") == 2
    assert sorted(after.graph.initializers) == ["w.packed", "w.packed.scales", f"zeros.{N}"]
    check_same(model, after, 0.02)


def test_computed_weights_and_products_of_activations_stay():
    model = make("t = Transpose<perm = [0, 2, 1]>(r) y = MatMul(x, t)", "float[b, t, t2] y")
    assert pack_linears(model, "float") == 0


NORM = "n = RMSNormalization<axis = -1, epsilon = 1e-3>(s, g) y = MatMul(n, w)"
TWO = f"float[b, t, {N}] y, float[b, t, {K}] s"


@pytest.mark.parametrize(
    ("body", "fused"),
    [
        (f"s = Add(x, r) {NORM}", 1),
        (f"s = Add(x, r) before = Identity(s) {NORM}", 1),  # read before the linear
        (f"s = Add(x, g) {NORM}", 0),  # broadcast
        (f"s = Mul(x, r) {NORM}", 0),
        (f"s = Add(x, r) {NORM} other = Identity(n)", 0),  # the norm is read elsewhere
    ],
)
def test_residual_and_norm_are_folded_in(body, fused):
    outputs = TWO
    for name in ("before", "other"):
        outputs += f", float[b, t, {K}] {name}" if f"{name} =" in body else ""
    model = make(body, outputs, w=numbers(K, N), g=numbers(K))
    after = model.clone()
    assert pack_linears(after, "float") == 1 and fuse_norm_linears(after) == fused
    assert ops(after)["RMSNormalization"] == 1 - fused
    if fused:
        [node] = [n for n in after.graph if n.op_type == "NormPackedLinearF32"]
        assert node.attributes["epsilon"].as_float() == pytest.approx(1e-3)
    check_same(model, after, 1e-5)


def test_a_layer_of_two_residuals_becomes_two_nodes():
    width = 2 * 24
    body = """
    s = Add(x, r) n = RMSNormalization<axis = -1>(s, g) p = MatMul(n, w) a, b = Split<axis = -1, num_outputs = 2>(p)
    q = Sigmoid(a) h = Mul(a, q) u = Mul(h, b) d = MatMul(u, v)
    s2 = Add(s, d) n2 = RMSNormalization<axis = -1>(s2, g) y = MatMul(n2, w2)
    """
    used = {"w": numbers(K, width), "g": numbers(K), "v": numbers(24, K), "w2": numbers(K, N)}
    model = make(body, f"float[b, t, {N}] y, float[b, t, {K}] s2", **used)
    after = model.clone()
    assert pack_linears(after, "float") == 3 and fuse_norm_linears(after) == 2
    assert ops(after) == {"NormGatedPackedLinearF32": 1, "PackedLinearF32": 1, "NormPackedLinearF32": 1}
    check_same(model, after, 1e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_attached_levels_are_packed_as_they_are(gated):
    """The same weights as MatMulNBits holds, columns of a gate in the order of the panels."""
    rng = np.random.default_rng(4)
    levels, scales = rng.integers(0, 16, (N, K)).astype(np.uint8), rng.uniform(-0.1, 0.1, (N, 2)).astype(np.float16)
    grid = Grid(levels, scales, 32, 4, 8)
    body = f"m = MatMul(x, w) a, b = Split<axis = -1, num_outputs = 2>(m) {GATES['silu'][0]}" if gated else PLAIN
    sizes = f"float[b, t, {N // 2 if gated else N}] y"
    before, after = (make(body, sizes, w=numbers(K, N)) for _ in range(2))
    for model in (before, after):
        assert attach_grids(model, {"w": grid}) == 1
    assert quantize_blocks(before, 4) == 1
    assert pack_linears(after, "int4") == 1
    assert ops(after) == {f"{'Gated' if gated else ''}PackedLinearInt4": 1}
    check_same(before, after)
