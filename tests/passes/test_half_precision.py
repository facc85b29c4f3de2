# SPDX-License-Identifier: Apache-2.0
"""The conversion to half precision: what becomes half, what stays float32, what is refused."""

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from speccompile.core.specs import HIDDEN, LOGITS, GraphSpec, TensorSpec
from speccompile.errors import PassError
from speccompile.ops.registry import attach_functions
from speccompile.passes.edit import OPS_DOMAIN, Editor, add_input
from speccompile.passes.fold_scale import fold_scale
from speccompile.passes.half_precision import convert_precision
from speccompile.passes.tie_weights import tie_weights
from tests.lab.graphs import open_session
from tests.passes.graphs import graph, ops

SPEC = GraphSpec(
    "graph",
    (TensorSpec(HIDDEN, ("b", 64), "bfloat16"), TensorSpec("temperature", ("b",), "float32")),
    (TensorSpec(LOGITS, ("b", 64), "float32"),),
)


def make(body: str, **weights: np.ndarray) -> ir.Model:
    text = f"g (float[b, 64] {HIDDEN}, float[b] temperature) => (float[b, 64] {LOGITS}) {{ {body} }}"
    return graph(text, weights)


def rng(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_a_norm_keeps_its_gain_in_float32_between_casts():
    body = f"n = RMSNormalization<epsilon = 1e-6>({HIDDEN}, gain) {LOGITS} = MatMul(n, w)"
    model = make(body, gain=rng(64), w=rng(64, 64))
    held = model.clone()
    assert convert_precision(model, SPEC, "bfloat16") == 1
    assert ops(model) == {"Cast": 3, "RMSNormalization": 1, "MatMul": 1}
    cast, norm, narrowed, product, last = model.graph
    assert [n.op_type for n in (cast, norm, narrowed, product, last)] == [
        "Cast", "RMSNormalization", "Cast", "MatMul", "Cast",
    ]  # fmt: skip
    assert norm.inputs[1].name == "gain" and norm.inputs[1].dtype == ir.DataType.FLOAT
    assert product.inputs[1].dtype == product.outputs[0].dtype == ir.DataType.BFLOAT16
    assert model.graph.inputs[0].dtype == ir.DataType.BFLOAT16
    assert model.graph.inputs[1].dtype == ir.DataType.FLOAT, "what sampling reads stays"
    assert (last.outputs[0].name, last.outputs[0].dtype) == (LOGITS, ir.DataType.FLOAT)
    assert {v.dtype for n in held.graph for v in n.outputs} == {ir.DataType.FLOAT}, "a clone was changed with it"


def test_norms_of_one_value_share_a_cast():
    body = f"a = RMSNormalization({HIDDEN}, gain) b = LayerNormalization({HIDDEN}, gain, gain) {LOGITS} = Add(a, b)"
    model = make(body, gain=rng(64))
    convert_precision(model, SPEC, "bfloat16")
    assert ops(model)["Cast"] == 4  # one down to both, one up from each, and the logits


def test_weights_are_rounded_to_nearest_and_shared():
    weight = rng(64, 64)
    model = make(f"a = MatMul({HIDDEN}, w) {LOGITS} = MatMul(a, w)", w=weight)
    convert_precision(model, SPEC, "bfloat16")
    first, second = (n for n in model.graph if n.op_type == "MatMul")
    assert first.inputs[1] is second.inputs[1]
    held = first.inputs[1].const_value.numpy()
    assert held.dtype == ml_dtypes.bfloat16
    assert (np.abs(held.astype(np.float32) - weight) <= np.abs(weight) * 2.0**-8).all()  # half of the last place


def test_a_weight_beyond_float16_is_refused_by_name():
    weight = rng(64, 64)
    weight[3, 4] = 1e6
    body = f"a = Mul({HIDDEN}, factor) {LOGITS} = MatMul(a, w)"
    model = make(body, w=weight, factor=np.float32([2]))
    spec = GraphSpec("graph", (TensorSpec(HIDDEN, ("b", 64), "float16"),), SPEC.outputs)
    convert_precision(model, spec, "float16")
    with pytest.raises(PassError, match=r"half_precision: w: got a weight of magnitude 1e\+06; .*Use dtype: bfloat16"):
        model.graph.initializers["w.float16"].const_value.numpy()


def test_what_is_sampled_with_and_from_stays_float32():
    body = f"a = MatMul({HIDDEN}, w) t = Unsqueeze(temperature, axis) c = Exp(t) {LOGITS} = Mul(a, c)"
    model = make(body, w=rng(64, 64), axis=np.array([1]))
    convert_precision(model, SPEC, "bfloat16")
    kinds = {n.op_type: n.outputs[0].dtype for n in model.graph}
    assert kinds["MatMul"] == ir.DataType.BFLOAT16
    assert kinds["Unsqueeze"] == kinds["Exp"] == kinds["Mul"] == ir.DataType.FLOAT
    assert ops(model)["Cast"] == 1  # the product is widened, the logits are float32 then


def test_angles_that_are_computed_are_refused():
    model = make(f"{LOGITS} = Cos({HIDDEN})")
    with pytest.raises(PassError, match=r"got Cos node .* that computes angles at run time; expected rotary tables"):
        convert_precision(model, SPEC, "bfloat16")


def recurrent() -> tuple[ir.Model, GraphSpec]:
    """x -> convolution -> recurrence of one head -> product; half are x and y."""
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 24, OPS_DOMAIN: 1}, name="g"), ir_version=12)
    dims = {"x": ("b", "n", 8), "rows": ("b", 5, 8), "state": ("b", 1, 8, 8), "pending": ("b", 2, 18)}
    values = {name: add_input(model, name, list(size), "float32") for name, size in dims.items()}
    counts = [add_input(model, name, ["b"], "int64") for name in ("lengths", "state_lengths", "sure_nodes")]
    counts.append(add_input(model, "tree_mask", ["b", "n", "n"], "bool"))
    edit, x = Editor(model), values["x"]
    taps = (edit.const(rng(8, 4), "taps"), edit.const(rng(8), "bias"))
    mixed, rows = edit.op("ConvRows", x, *taps, values["rows"], *counts, domain=OPS_DOMAIN, num_outputs=2)
    g = edit.op("Neg", edit.op("Sigmoid", edit.op("MatMul", x, edit.const(rng(8, 1), "gate"))))
    beta = edit.op("Sigmoid", edit.op("MatMul", x, edit.const(rng(8, 1), "write")))
    inputs = (mixed, mixed, mixed, g, beta, values["state"], values["pending"], *counts)
    out, state, pending = edit.op("GatedDelta", *inputs, domain=OPS_DOMAIN, num_outputs=3, scale=0.1)
    y = edit.op("MatMul", out, edit.const(rng(8, 8), "w"))
    outputs = {"y": y, "rows.updated": rows, "state.updated": state, "pending.updated": pending}
    for (name, value), size in zip(outputs.items(), dims.values(), strict=True):
        value.name, value.shape, value.type = name, ir.Shape(list(size)), ir.TensorType(ir.DataType.FLOAT)
        model.graph.outputs.append(value)
    for node in model.graph:
        for value in node.outputs:
            value.type = ir.TensorType(ir.DataType.FLOAT)
    halves = [TensorSpec("x", dims["x"], "float16")], [TensorSpec("y", dims["x"], "float16")]
    return model, GraphSpec("g", *map(tuple, halves))


def test_recurrent_states_stay_in_float32():
    model, spec = recurrent()
    held, generator = model.clone(), np.random.default_rng(0)
    assert convert_precision(model, spec, "float16") > 0
    kinds = {v.name: v.dtype for v in model.graph.outputs}
    assert kinds.pop("y") == ir.DataType.FLOAT16 and set(kinds.values()) == {ir.DataType.FLOAT}
    assert ops(model)["Cast"] == 2, "of what the gates are computed from"
    (delta,) = (node for node in model.graph if node.op_type == "GatedDelta")
    single = ir.DataType.FLOAT
    assert [v.dtype for v in delta.inputs[:5]] == [ir.DataType.FLOAT16] * 3 + [single] * 2
    assert all(n.inputs[0].dtype == single for n in model.graph if n.op_type in ("Sigmoid", "Neg"))
    feeds = {"x": generator.standard_normal((2, 3, 8)), "rows": generator.standard_normal((2, 5, 8))}
    feeds |= {"state": generator.standard_normal((2, 1, 8, 8)), "pending": -generator.random((2, 2, 18))}
    given = {name: array.astype(np.float32) for name, array in feeds.items()}
    given |= {"lengths": np.array([0, 7]), "state_lengths": np.array([0, 5]), "sure_nodes": np.array([3, 0])}
    given["tree_mask"] = np.tile(np.tri(3, dtype=np.bool_), (2, 1, 1))
    for graph_model in (held, model):
        attach_functions(graph_model)
    wanted = open_session(ir.to_proto(held)).run(None, given)
    got = open_session(ir.to_proto(model)).run(None, {**given, "x": given["x"].astype(np.float16)})
    for mine, single in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, single, rtol=0, atol=4e-3 * np.abs(single).max())


def attention(scale: float, *, twice: bool = False, split: bool = False, norm: bool = False) -> ir.Model:
    """x -> Q with bias (or norm) and rotary; K, V and caches are inputs."""
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 24, OPS_DOMAIN: 1}, name="g"), ir_version=12)
    x = add_input(model, "x", ["batch", "nodes", 8], "float32")
    rest = [add_input(model, n, ["batch", 2, n, 4], "float32") for n in ("k", "v", "k_cache", "v_cache")]
    rest += [add_input(model, "lengths", ["batch"], "int64"), add_input(model, "tree", ["batch", "n", "n"], "bool")]
    positions = add_input(model, "positions", ["batch", "nodes"], "int64")
    edit = Editor(model)
    query = edit.op("MatMul", x, edit.const(rng(8, 16 if split else 8), "w"))
    if split:
        query = edit.op("Split", query, edit.ints([8, 8]), axis=-1, num_outputs=2)[0]
    query = edit.op("Reshape", query, edit.ints([0, 0, 2, 4]))
    if norm:
        query = edit.op("RMSNormalization", query, edit.const(rng(4), "gain"), axis=-1)
    else:
        query = edit.op("Add", query, edit.const(rng(4), "bias"))
    query = edit.op("Transpose", query, perm=[0, 2, 1, 3])
    table = edit.const(rng(9, 2), "cos")
    query = edit.op("RotaryEmbedding", query, table, table, positions)
    for index in range(1 + twice):
        out = edit.op("CachedAttention", query, *rest, domain=OPS_DOMAIN, num_outputs=3, scale=scale)[0]
        out.name = f"out{index}"
        model.graph.outputs.append(out)
    return model


def scale_of(model: ir.Model) -> float:
    return next(n for n in model.graph if n.op_type == "CachedAttention").attributes["scale"].as_float()


def test_the_scale_goes_into_weight_and_bias_of_q():
    model = attention(0.3)
    assert fold_scale(model) == 1 and scale_of(model) == 1
    product, bias = (next(n for n in model.graph if n.op_type == op).inputs[1] for op in ("MatMul", "Add"))
    np.testing.assert_array_equal(product.const_value.numpy(), rng(8, 8) * np.float32(0.3))
    np.testing.assert_array_equal(bias.const_value.numpy(), rng(4) * np.float32(0.3))


def test_a_norm_takes_the_scale_into_its_gain():
    model = attention(0.3, norm=True)
    assert fold_scale(model) == 1
    gain = next(n for n in model.graph if n.op_type == "RMSNormalization").inputs[1]
    np.testing.assert_array_equal(gain.const_value.numpy(), rng(4) * np.float32(0.3))
    assert next(n for n in model.graph if n.op_type == "MatMul").inputs[1].name == "w", "in front of a norm"


@pytest.mark.parametrize("kind", [{"twice": True}, {"split": True}])
def test_a_scale_stays_where_q_has_no_weights_of_its_own(kind):
    model = attention(0.3, **kind)
    assert fold_scale(model) == 0 and scale_of(model) == np.float32(0.3)
    assert next(n for n in model.graph if n.op_type == "MatMul").inputs[1].name == "w"


def test_a_scale_of_one_costs_nothing():
    model = attention(1.0)
    assert fold_scale(model) == 0
    assert next(n for n in model.graph if n.op_type == "MatMul").inputs[1].name == "w"


def tied(view: np.ndarray, table: np.ndarray) -> ir.Model:
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 24}, name="g"), ir_version=12)
    tokens, edit = add_input(model, "tokens", ["batch", "nodes"], "int64"), Editor(model)
    hidden = edit.op("Gather", edit.const(table, "table"), tokens, axis=0)
    out = edit.op("MatMul", hidden, edit.const(view, "head"))
    out.name, out.type = "out", ir.TensorType(ir.DataType.FLOAT)
    model.graph.outputs.append(out)
    return model


def test_a_transposed_view_becomes_a_transpose_and_a_copy_does_not():
    table = rng(97, 64)
    model = tied(table.T, table)
    assert tie_weights(model) == 1 and "head" not in model.graph.initializers
    assert ops(model) == {"Gather": 1, "Transpose": 1, "MatMul": 1}
    assert tie_weights(tied(table.T.copy(order="K") + 1, table)) == 0
    square = rng(64, 64)
    assert tie_weights(tied(square, square)) == 0, "the same matrix both times, not its transpose"
