# SPDX-License-Identifier: Apache-2.0
"""Operators that TensorRT ignores, rejects or aborts on are refused by name before it parses them."""

import re

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.core.specs import GraphSpec, TensorSpec
from speccompile.errors import PassError
from speccompile.ops.registry import attach_functions
from speccompile.passes.edit import OPS_DOMAIN, Editor, add_input
from speccompile.passes.lint_tensorrt import MAX_TOP_K, REFUSED_OPS, check_io, lint_tensorrt
from tests.passes.graphs import graph


def empty() -> ir.Model:
    opsets = {"": 24, OPS_DOMAIN: 1, "com.microsoft": 1}
    return ir.Model(ir.Graph([], [], nodes=[], opset_imports=opsets, name="g"), ir_version=12)


def with_node(op_type: str, *, domain: str = "", inputs: int = 1, **attributes: object) -> ir.Model:
    model = empty()
    values = [add_input(model, f"x{i}", ["b", 8], "float32") for i in range(inputs)]
    out = Editor(model).op(op_type, *values, domain=domain, **attributes)
    out.name = "y"
    model.graph.outputs.append(out)
    return model


@pytest.mark.parametrize("op_type", REFUSED_OPS)
def test_operators_without_an_implementation(op_type):
    domain = "com.microsoft" if op_type in ("MatMulNBits", "QMoE", "SkipLayerNormalization") else ""
    todo = re.escape(REFUSED_OPS[op_type])
    wanted = rf"{op_type} node \S+: got an operator without an implementation; expected .*\. {todo}"
    with pytest.raises(PassError, match=wanted):
        lint_tensorrt(with_node(op_type, domain=domain))


def test_a_node_of_ours_needs_a_plugin_or_a_body():
    model = with_node("SpecVerify", domain=OPS_DOMAIN)
    message = (
        r"SpecVerify node \S+: got speccompile::SpecVerify, neither a plugin nor a function of the model; "
        r"expected one of the plugins \(KVRollback\) or a function body\. .*abort the process"
    )
    with pytest.raises(PassError, match=message):
        lint_tensorrt(model, ["KVRollback"])
    lint_tensorrt(model, ["SpecVerify"])
    lint_tensorrt(model, bodies=["SpecVerify"])


def test_a_body_in_the_model_counts_and_is_looked_into():
    model = with_node("FirstMax", domain=OPS_DOMAIN)
    attach_functions(model)
    lint_tensorrt(model)
    function = next(iter(model.functions.values()))
    node = ir.Node("", "CumProd", list(function.inputs))
    function.append(node)
    with pytest.raises(PassError, match=r"CumProd node .*Use CumSum of logarithms"):
        lint_tensorrt(model)


def test_a_rollback_of_several_caches_has_no_body():
    model = with_node("KVRollback", domain=OPS_DOMAIN, inputs=4, num_caches=2)
    with pytest.raises(PassError, match=r"KVRollback node .* neither a plugin nor a function"):
        lint_tensorrt(model, bodies=["KVRollback"])
    lint_tensorrt(model, ["KVRollback"])


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ("Attention<scale = 1.0>(q, k, k, m, , , n)", "got nonpad_kv_seqlen, which TensorRT ignores; expected an add"),
        ("Attention<softcap = 5.0>(q, k, k)", "got softcap 5; expected no softcap"),
        ("Attention<is_causal = 1>(q, k, k, m)", "got a mask and is_causal; expected one of them"),
    ],
)
def test_attention(node, message):
    inputs = "float[b, 2, t, 8] q, float[b, 2, s, 8] k, float[b, 1, t, s] m, int64[b] n"
    model = graph(f"g ({inputs}) => (float[b, 2, t, 8] y) {{ y = {node} }}")
    with pytest.raises(PassError, match=f"Attention node .*{message}"):
        lint_tensorrt(model)
    for good in ("Attention(q, k, k, m)", "Attention<is_causal = 1>(q, k, k)"):
        lint_tensorrt(graph(f"g ({inputs}) => (float[b, 2, t, 8] y) {{ y = {good} }}"))


def test_top_k_is_constant_and_small():
    def top_k(name: str, **weights: np.ndarray) -> ir.Model:
        text = f"g (float[b, 9000] x, int64[1] n) => (float[b, m] y) {{ y, i = TopK(x, {name}) }}"
        return graph(text, weights)

    lint_tensorrt(top_k("k", k=np.array([MAX_TOP_K])))
    with pytest.raises(PassError, match=r"TopK node .*got K = 3841; expected K of at most 3840\. Search"):
        lint_tensorrt(top_k("k", k=np.array([MAX_TOP_K + 1])))
    with pytest.raises(PassError, match="got a K that is computed"):
        lint_tensorrt(top_k("n"))


SCATTER = "g (float[b, 2, 16, 8] cache, float[b, 2, t, 8] x, int64[b] n) => (float[b, 2, 16, 8] y{more}) {{ {body} }}"
PUT = 'TensorScatter<axis = 2, mode = "linear">'


@pytest.mark.parametrize(
    ("body", "more", "message"),
    [
        (f"a = {PUT}(cache, x, n) y = {PUT}(a, x, n)", ", float[b, 2, 16, 8] a", "got a cache made by TensorScatter"),
        (f"a = Neg(cache) y = {PUT}(a, x, n)", "", "got a cache made by Neg; expected a cache that is a graph input"),
        (f"a = {PUT}(cache, x, n) y = Neg(a)", "", "got an update that stays inside"),
        (f"a = {PUT}(cache, x, n) y = {PUT}(cache, x, n)", ", float[b, 2, 16, 8] a", "got a second update of cache"),
    ],
)
def test_caches_are_updated_once_from_input_to_output(body, more, message):
    with pytest.raises(PassError, match=f"TensorScatter node .*{message}"):
        lint_tensorrt(graph(SCATTER.format(body=body, more=more)))
    lint_tensorrt(graph(SCATTER.format(body=f"y = {PUT}(cache, x, n)", more="")))


def test_float64_is_refused_wherever_it_is():
    model = graph("g (float[b] x) => (float[b] y) { a = Cast<to = 11>(x) y = Cast<to = 1>(a) }")
    with pytest.raises(PassError, match=r"Cast node .*got a in float64; expected float32 or less\. Cast it"):
        lint_tensorrt(model)


def test_inputs_and_outputs_are_those_of_the_spec_and_read():
    model = graph("g (float[b] x, int64[b] n) => (float[b] y) { y = Neg(x) }")
    x, n, y = TensorSpec("x", ("b",), "float32"), TensorSpec("n", ("b",), "int64"), TensorSpec("y", ("b",), "float32")
    with pytest.raises(PassError, match=r"g: n: got an input that nothing reads; .* Take it out of the graph's spec"):
        check_io(model, GraphSpec("g", (x, n), (y,)))
    with pytest.raises(PassError, match=r"g: x: got .*FLOAT.*; expected .*FLOAT16"):
        check_io(model, GraphSpec("g", (TensorSpec("x", ("b",), "float16"), n), (y,)))
    with pytest.raises(PassError, match="g: got 2 tensors"):
        check_io(model, GraphSpec("g", (x,), (y,)))
