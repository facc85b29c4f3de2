# SPDX-License-Identifier: Apache-2.0
"""Experts are packed where they are exported as gathered weights, and nowhere else; their sums keep rows apart."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes import common

from speccompile.ops.registry import attach_functions
from speccompile.passes.flat_linears import flat_linears, routers_of
from speccompile.passes.mix_rows import mix_rows
from speccompile.passes.pack_experts import pack_experts
from tests.lab.graphs import open_session, run_session
from tests.passes.graphs import graph, ops

RNG = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) * 0.2).astype(np.float32)


@dataclass(frozen=True)
class Sizes:
    """Of a mixture."""

    experts: int = 5
    hidden: int = 40
    inner: int = 24
    per_row: int = 2


SILU = "s = Sigmoid(a) h = Mul(a, s) g = Mul(h, b)"
GATES = {
    "silu": SILU,
    "up first": "s = Sigmoid(b) h = Mul(b, s) g = Mul(h, a)",
    "gelu": "h = Gelu(a) g = Mul(b, h)",
    "gelu_tanh": 'h = Gelu<approximate = "tanh">(a) g = Mul(h, b)',
}
CLIPPED = "low = Clip(a) s = Sigmoid(low) h = Mul(low, s) g = Mul(h, b)"


def mixture(
    sizes: Sizes = Sizes(), gate: str = SILU, *, has_bias: bool = False, is_transposed: bool = False, gather: str = ""
) -> ir.Model:
    """What the exporter makes of a mixture: routing is an input."""
    e, hidden, inner, k = sizes.experts, sizes.hidden, sizes.inner, sizes.per_row
    gather = gather or "GatherND<batch_dims = 0>"
    index = "at" if gather.startswith("GatherND") else "ids"
    weights = {"w1": numbers(e, 2 * inner, hidden), "w2": numbers(e, hidden, inner)}
    if is_transposed:
        weights = {name: np.ascontiguousarray(w.transpose(0, 2, 1)) for name, w in weights.items()}

    def product(weight: str, source: str, out: str) -> str:
        axis = "one" if is_transposed else "last"
        pair = f"{out}x, {weight}" if is_transposed else f"{weight}, {out}x"
        return f"{out}x = Unsqueeze({source}, {axis}) {out}m = MatMul({pair}) {out} = Squeeze({out}m, {axis})"

    def biased(name: str, out: str) -> str:
        if not has_bias:
            return f"{out} = Identity({name})"
        weights[f"b{name}"] = numbers(e, 2 * inner if name == "p" else hidden)
        return f"{name}b = {gather}(b{name}, {index}) {out} = Add({name}, {name}b)"

    first, second = biased("p", "q"), biased("d", "y")
    names = ", ".join(f"float{list(w.shape)} {n}" for n, w in weights.items())
    text = f"""
    test (float[rows, {hidden}] x, int64[rows, {k}] chosen, float[rows, {k}] share) => (float[rows, {hidden}] out)
    <{names}, int64[1] one = {{1}}, int64[1] last = {{-1}}, int64[3] copies = {{1, {k}, 1}},
     int64[2] in_rows = {{-1, {hidden}}}, int64[3] by_row = {{-1, {k}, {hidden}}}> {{
        x3 = Unsqueeze(x, one) xk = Expand(x3, copies) repeated = Reshape(xk, in_rows)
        ids = Reshape(chosen, last) at = Unsqueeze(ids, last)
        u = {gather}(w1, {index}) {product("u", "repeated", "p")} {first}
        a, b = Split<axis = 1, num_outputs = 2>(q)
        {gate}
        v = {gather}(w2, {index}) {product("v", "g", "d")} {second}
        flat = Reshape(share, last) column = Unsqueeze(flat, last)
        weighed = Mul(y, column) rows3 = Reshape(weighed, by_row)
        out = ReduceSum<keepdims = 0>(rows3, one)
    }}"""
    model = graph(text, weights)
    common.IdentityEliminationPass()(model)
    return model


def run(model: ir.Model, sizes: Sizes = Sizes(), num_rows: int = 3) -> np.ndarray:
    """The output under ONNX Runtime without our kernels: function bodies are run."""
    attach_functions(model)
    rng = np.random.default_rng(1)
    feeds = {
        "x": rng.standard_normal((num_rows, sizes.hidden)).astype(np.float32),
        "chosen": rng.integers(0, sizes.experts, (num_rows, sizes.per_row)),
        "share": rng.random((num_rows, sizes.per_row)).astype(np.float32),
    }
    return run_session(model, feeds)[0]


def check_same(got: np.ndarray, wanted: np.ndarray, tolerance: float = 3e-6) -> None:
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_mixture_becomes_two_nodes(gate, has_bias, is_transposed):
    model = mixture(gate=gate, has_bias=has_bias, is_transposed=is_transposed)
    wanted = run(model)
    assert pack_experts(model, "float") == 2
    made = ops(model)
    assert made["GatedExpertLinearF32"] == made["ExpertLinearF32"] == 1
    assert not {"GatherND", "MatMul", "Split", "Expand", "Squeeze"} & made.keys()
    assert not {"w1", "w2"} & model.graph.initializers.keys()
    check_same(run(model), wanted)


def test_an_activation_outside_the_list_stays_between_two_experts():
    model = mixture(gate=CLIPPED, has_bias=True)
    wanted = run(model)
    assert pack_experts(model, "float") == 2
    assert ops(model)["ExpertLinearF32"] == 2
    assert ops(model)["Clip"] == 1
    check_same(run(model), wanted)


def test_a_gather_of_the_first_axis_is_a_choice_as_well():
    model = mixture(gather="Gather<axis = 0>", has_bias=True)
    wanted = run(model)
    assert pack_experts(model, "float") == 2
    check_same(run(model), wanted)


@pytest.mark.parametrize(("weights", "tolerance"), [("int8", 0.04), ("int4", 0.3)])
def test_quantised_experts_are_near_the_weights(weights, tolerance):
    model = mixture(has_bias=True)
    wanted = run(model)
    assert pack_experts(model, weights) == 2
    form = weights.title()
    assert ops(model)[f"GatedExpertLinear{form}"] == ops(model)[f"ExpertLinear{form}"] == 1
    check_same(run(model), wanted, tolerance)


def test_bfloat16_is_taken_where_it_is_exact():
    model = mixture()
    for name in ("w1", "w2"):
        value = model.graph.initializers[name]
        exact = value.const_value.numpy().astype(ml_dtypes.bfloat16).astype(np.float32)
        value.const_value = ir.tensor(exact, name=name)
    model.graph.initializers["w2"].const_value.numpy()[3, 1, 1] += 1e-6
    wanted = run(model)
    assert pack_experts(model, "float") == 2
    assert ops(model)["GatedExpertLinearBf16"] == ops(model)["ExpertLinearF32"] == 1
    check_same(run(model), wanted)


def test_random_sizes_keep_the_function():
    rng = np.random.default_rng(5)
    for number in range(8):
        sizes = Sizes(*(int(n) for n in rng.integers((1, 1, 1, 1), (9, 70, 40, 5))))
        has_bias, is_transposed = bool(number & 1), bool(number & 2)
        model = mixture(sizes, GATES["gelu" if number & 4 else "silu"], has_bias=has_bias, is_transposed=is_transposed)
        wanted = run(model, sizes, num_rows=int(rng.integers(1, 6)))
        num_rows = len(wanted)
        assert (mix_rows(model), pack_experts(model, "float")) == (1, 2), sizes
        check_same(run(model, sizes, num_rows), wanted, 1e-5)


WRONG = {
    "another axis": "u = Gather<axis = 1>(w, ids) m = MatMul(u, c) y = Squeeze(m, last)",
    "a product of activations": "u = GatherND(z, at) m = MatMul(u, c) y = Squeeze(m, last)",
    "a second reader": "u = GatherND(w, at) m = MatMul(u, c) y = Squeeze(m, last) t = Identity(u)",
    "no vector": "u = GatherND(w, at) m = MatMul(u, d) y = Squeeze(m, last)",
    "rows of a vector of another length": "u = GatherND(w, at) m = MatMul(u, c) y = Identity(m)",
}


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
def test_what_is_no_expert_stays(body):
    text = f"""
    test (float[n, 8] x, float[n, 8, 1] d, int64[n] ids, float[5, 6, 8] z) => (y, t)
    <float[5, 6, 8] w, int64[1] last = {{-1}}> {{
        at = Unsqueeze(ids, last) c = Unsqueeze(x, last) {body}{"" if "t =" in body else " t = Identity(x)"}
    }}"""
    model = graph(text, {"w": numbers(5, 6, 8)})
    assert pack_experts(model, "float") == 0
    assert pack_experts(model, "int4") == 0


def test_rows_that_are_not_repeated_stay_as_they_are():
    """Copies of all rows, one block after the other."""
    model = mixture()
    copies = model.graph.initializers["copies"]
    copies.const_value = ir.tensor(np.array([2, 1, 1]), name="copies")
    assert pack_experts(model, "float") == 2
    assert ops(model)["Expand"] == 1


def test_a_weight_that_two_mixtures_read_is_packed_once():
    text = """
    test (float[n, 8] x, int64[n] ids) => (float[n, 6] y, float[n, 6] z)
    <float[5, 6, 8] w, int64[1] last = {-1}> {
        at = Unsqueeze(ids, last) c = Unsqueeze(x, last)
        u = GatherND(w, at) m = MatMul(u, c) y = Squeeze(m, last)
        double = Add(x, x) e = Unsqueeze(double, last)
        v = GatherND(w, at) o = MatMul(v, e) z = Squeeze(o, last)
    }"""
    model = graph(text, {"w": numbers(5, 6, 8)})
    assert pack_experts(model, "int8") == 2
    assert [name for name in model.graph.initializers if "packed" in name] == ["w.packed", "w.packed.scales"]


def sums(body: str, k: int = 8, width: int = 33) -> ir.Model:
    return graph(f"test (float[n, {k}, {width}] x) => (y) <int64[1] axis = {{1}}, int64[1] back = {{-2}}> {{ {body} }}")


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axis", ["axis", "back"])
def test_a_sum_over_the_middle_axis_becomes_a_product(k, keepdims, axis):
    text = f"y = ReduceSum<keepdims = {keepdims}>(x, {axis})"
    before, model = sums(text, k), sums(text, k)
    assert mix_rows(model) == 1
    assert ops(model)["MatMul"] == 1
    x = np.random.default_rng(0).standard_normal((7, k, 33)).astype(np.float32)
    wanted, got = (run_session(m, {"x": x})[0] for m in (before, model))
    check_same(got, wanted)
    session = open_session(model)
    for row in range(7):
        assert np.array_equal(session.run(None, {"x": x[row : row + 1]})[0], got[row : row + 1])


@pytest.mark.parametrize(
    "text",
    [
        "last = Constant<value_ints = [-1]>() y = ReduceSum(x, last)",
        "both = Constant<value_ints = [1, 2]>() y = ReduceSum(x, both)",
        "y = ReduceSum(x)",
        "whole = Cast<to = 7>(x) y = ReduceSum(whole, axis)",
        "y = ReduceMean(x, axis)",
    ],
)
def test_other_sums_stay(text):
    assert mix_rows(sums(text)) == 0


def test_the_weights_of_a_mixture_become_the_row_of_the_product():
    model = mixture()
    wanted = run(model)
    assert mix_rows(model) == 1
    assert "ReduceSum" not in ops(model)
    assert ops(model)["Mul"] == 2  # those of the gate
    check_same(run(model), wanted)


def gemms(body: str) -> ir.Model:
    text = f"""
    test (float[n, 8] x) => (y, z) <float[6, 8] w, float[6] b, int64[1] k = {{2}}> {{ {body} }}"""
    return graph(text, {"w": np.arange(48, dtype=np.float32).reshape(6, 8) / 50, "b": np.ones(6, np.float32)})


def test_a_gemm_becomes_a_linear_and_a_router_stays():
    text = "y = Gemm<transB = 1>(x, w) r = Gemm<transB = 1>(x, w) s = Softmax(r) t, z = TopK(s, k)"
    before, model = gemms(text), gemms(text)
    assert len(routers_of(model)) == 1
    assert flat_linears(model) == 1
    assert (ops(model)["Gemm"], ops(model)["MatMul"]) == (1, 1)
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    wanted, got = (run_session(m, {"x": x}) for m in (before, model))
    check_same(got[0], wanted[0])
    assert np.array_equal(got[1], wanted[1])


def test_a_router_with_a_bias_is_kept_from_the_passes_on_linears():
    text = "y = Relu(x) m = MatMul(x, c) r = Add(m, b) t, z = TopK(r, k)"
    model = graph(
        f"test (float[n, 8] x) => (y, z) <float[8, 6] c, float[6] b, int64[1] k = {{2}}> {{ {text} }}",
        {"c": numbers(8, 6), "b": numbers(6)},
    )
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    before = run_session(model, {"x": x})[1]
    assert flat_linears(model) == 1
    assert (ops(model)["Gemm"], ops(model)["MatMul"]) == (1, 0)
    assert np.array_equal(run_session(model, {"x": x})[1], before)


@pytest.mark.parametrize(
    "text",
    [
        "y = Gemm<transB = 1>(x, w, b) z = Identity(x)",
        "y = Gemm<transB = 1, alpha = 2.0>(x, w) z = Identity(x)",
        "r = Gemm<transB = 1>(x, w) z = ArgMax<axis = 1>(r) y = Sigmoid(r)",
        "z = Transpose(x) y = Gemm<transA = 1>(z, x)",
    ],
)
def test_other_gemms_stay(text):
    assert flat_linears(gemms(text)) == 0


def heads(rows: str = "nodes", kind: str = "float", matrices: str = "3, 8, 5") -> ir.Model:
    shapes = f"({kind}[b, 3, {rows}, 8] x, {kind}[{matrices}] w) => (y)"
    return graph(f"test {shapes} {{ y = MatMul(x, w) }}")


def test_a_product_with_a_matrix_for_each_head_has_its_last_row_twice():
    rng, before, model = np.random.default_rng(0), heads(), heads()
    assert mix_rows(model) == 1
    assert mix_rows(model) == 0, "a second run finds nothing"
    feeds = {"x": rng.standard_normal((2, 3, 16, 8), np.float32), "w": rng.standard_normal((3, 8, 5), np.float32)}
    sessions = [open_session(m) for m in (before, model)]
    wanted, got = (session.run(None, feeds)[0] for session in sessions)
    check_same(got, wanted)
    for num in (1, 2, 3, 8):
        alone = sessions[1].run(None, {**feeds, "x": feeds["x"][:, :, :num]})[0]
        assert np.array_equal(alone, got[:, :, :num]), num


@pytest.mark.parametrize(
    "fields",
    [{"rows": "1"}, {"rows": "4"}, {"matrices": "8, 5"}, {"kind": "double"}],
    ids=["one", "four", "2d", "double"],
)
def test_other_products_stay(fields):
    assert mix_rows(heads(**fields)) == 0
