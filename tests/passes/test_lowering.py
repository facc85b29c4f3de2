# SPDX-License-Identifier: Apache-2.0
"""Rewrites keep the function: lowered attention against the numpy twin, merged graphs against the graphs before."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.core.specs import LENGTHS, TREE_MASK
from speccompile.errors import PassError
from speccompile.ops.cached_attention import cached_attention
from speccompile.ops.registry import attach_functions
from speccompile.passes.base import Pass, histogram_from_model
from speccompile.passes.edit import OPS_DOMAIN, Editor, add_input
from speccompile.passes.lower_attention import ATTENTION_LOWERED, lower_attention
from speccompile.passes.merge_heads import merge_heads
from speccompile.passes.merge_linears import merge_linears
from tests.lab.graphs import open_session
from tests.lab.graphs import run_session as run
from tests.passes.graphs import run as evaluate

CACHES = ("k_cache", "v_cache")
TOLERANCE = 2e-6  # of numbers of order 1, float32; seen at most 6e-7


def empty_model() -> ir.Model:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 24, OPS_DOMAIN: 1}, name="graph")
    return ir.Model(graph, ir_version=11)


def add_output(model: ir.Model, value: ir.Value, name: str, dims: list[str | int]) -> None:
    value.name, value.shape, value.type = name, ir.Shape(dims), ir.TensorType(ir.DataType.FLOAT)
    model.graph.outputs.append(value)


def attention_model(
    heads: int, kv_heads: int, head_dim: int, sinks: np.ndarray | None = None, **attributes: Any
) -> ir.Model:
    model = empty_model()
    new: list[str | int] = ["batch", kv_heads, "nodes", head_dim]
    cache: list[str | int] = ["batch", kv_heads, "max_seq", head_dim]
    inputs = [
        add_input(model, "q", ["batch", heads, "nodes", head_dim], "float32"),
        add_input(model, "k", new, "float32"),
        add_input(model, "v", new, "float32"),
        add_input(model, "k_cache", cache, "float32"),
        add_input(model, "v_cache", cache, "float32"),
        add_input(model, LENGTHS, ["batch"], "int64"),
        add_input(model, TREE_MASK, ["batch", "nodes", "nodes"], "bool"),
    ]
    if sinks is not None:
        inputs.append(Editor(model).const(sinks, "sinks"))
    op = "CachedAttention" if sinks is None else "SinkAttention"
    outputs = Editor(model).op(op, *inputs, domain=OPS_DOMAIN, num_outputs=3, **attributes)
    add_output(model, outputs[0], "out", ["batch", "nodes", heads, head_dim])
    add_output(model, outputs[1], "k_out", cache)
    add_output(model, outputs[2], "v_out", cache)
    return model


def random_tree(rng: np.random.Generator, batch: int, nodes: int) -> np.ndarray:
    mask = np.zeros((batch, nodes, nodes), bool)
    for slot in range(batch):
        for node in range(nodes):
            if node:
                mask[slot, node] = mask[slot, rng.integers(0, node)]
            mask[slot, node, node] = True
    return mask


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("softcap", [0.0, 2.5])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (3, 3, 5), (6, 1, 16)])
def test_lowered_attention_equals_its_twin(heads, kv_heads, head_dim, softcap, window):
    model = attention_model(heads, kv_heads, head_dim, scale=0.3, softcap=softcap, window=window)
    assert lower_attention(model) == 1
    assert not any(n.domain == OPS_DOMAIN for n in model.graph)
    rng = np.random.default_rng(heads)
    for batch, nodes, rows in [(1, 1, 9), (3, 5, 17), (2, 12, 40)]:
        shapes = [(batch, heads, nodes, head_dim), *[(batch, kv_heads, nodes, head_dim)] * 2]
        shapes += [(batch, kv_heads, rows, head_dim)] * 2
        tensors = [rng.standard_normal(s).astype(np.float32) for s in shapes]
        lengths = rng.integers(0, rows - nodes + 1, batch)
        mask = random_tree(rng, batch, nodes)
        names = ["q", "k", "v", "k_cache", "v_cache", LENGTHS, TREE_MASK]
        got = run(model, dict(zip(names, [*tensors, lengths, mask], strict=True)))
        wanted = cached_attention(*tensors, lengths, mask, scale=0.3, softcap=softcap, window=window)
        np.testing.assert_array_equal(got[1], wanted[1])
        np.testing.assert_array_equal(got[2], wanted[2])
        assert np.abs(got[0] - wanted[0]).max() < TOLERANCE


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (3, 3, 5)])
def test_lowered_attention_with_sinks_equals_its_twin_and_copies_no_cache(heads, kv_heads, head_dim, window):
    rng = np.random.default_rng(window)
    sinks = rng.standard_normal(heads).astype(np.float32) * 3
    model = attention_model(heads, kv_heads, head_dim, sinks, scale=0.3, window=window)
    assert lower_attention(model) == 1
    shapes = [(2, heads, 6, head_dim), *[(2, kv_heads, 6, head_dim)] * 2, *[(2, kv_heads, 20, head_dim)] * 2]
    tensors = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    lengths, mask = np.array([0, 14]), random_tree(rng, 2, 6)
    names = ["q", "k", "v", "k_cache", "v_cache", LENGTHS, TREE_MASK]
    got = run(model, dict(zip(names, [*tensors, lengths, mask], strict=True)))
    wanted = cached_attention(*tensors, lengths, mask, sinks, scale=0.3, window=window)
    for mine, twin in zip(got, wanted, strict=True):
        assert np.abs(mine - twin).max() < TOLERANCE
    attention = next(n for n in ir.to_proto(model).graph.node if n.op_type == "Attention")
    assert list(attention.output)[1:3] == ["", ""]


@pytest.mark.parametrize("is_lowered", [True, False], ids=["lowered", "body"])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2)])
def test_a_chain_has_the_bits_of_single_steps(heads, kv_heads, has_sinks, is_lowered):
    rng, length, nodes, head_dim = np.random.default_rng(heads), 9, 9, 16
    sinks = rng.standard_normal(heads).astype(np.float32) if has_sinks else None
    model = attention_model(heads, kv_heads, head_dim, sinks, scale=0.3, window=12)
    assert (lower_attention if is_lowered else attach_functions)(model) == 1
    session = open_session(model)
    shapes = [(1, heads, nodes, head_dim), *[(1, kv_heads, nodes, head_dim)] * 2, *[(1, kv_heads, 40, head_dim)] * 2]
    tensors = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    chain = np.tri(nodes, dtype=bool)[None]
    feeds = dict(zip(["q", "k", "v", *CACHES], tensors, strict=True))
    whole, *_ = session.run(None, {**feeds, LENGTHS: np.array([length]), TREE_MASK: chain})
    for node in range(nodes):
        feeds |= {name: tensor[:, :, node : node + 1] for name, tensor in zip("qkv", tensors, strict=False)}
        feeds |= {LENGTHS: np.array([length + node]), TREE_MASK: np.ones((1, 1, 1), bool)}
        single, *updated = session.run(None, feeds)
        feeds |= dict(zip(CACHES, updated, strict=True))
        np.testing.assert_array_equal(single[:, 0], whole[:, node])


def test_one_mask_serves_all_layers_of_a_window():
    model = attention_model(4, 2, 8, scale=1.0, window=3)
    node = next(iter(model.graph))
    again = Editor(model).op(
        "CachedAttention", *node.inputs, domain=OPS_DOMAIN, num_outputs=3, scale=1.0, window=3, softcap=0.0
    )
    add_output(model, again[0], "again", ["batch", "nodes", 4, 8])
    assert lower_attention(model) == 2
    assert histogram_from_model(model)["GatherElements"] == 1


def test_a_table_without_lowering_is_refused():
    late = Pass("late", lambda m: 0, requires=(ATTENTION_LOWERED,))
    with pytest.raises(PassError, match="1 CachedAttention nodes are left"):
        late(attention_model(4, 2, 8, scale=1.0))


def projection_model(bias: bool, rotary: bool = True, key_axis_differs: bool = False) -> ir.Model:
    """x -> q, k, v (4, 2 and 2 heads of 6) in head layout, q and k rotated."""
    rng = np.random.default_rng(0)
    model = empty_model()
    x = add_input(model, "x", ["batch", "nodes", 10], "float32")
    positions = add_input(model, "positions", ["batch", "nodes"], "int64")
    edit = Editor(model)
    cos, sin = (edit.const(rng.standard_normal((32, 3)).astype(np.float32), n) for n in ("cos", "sin"))
    for name, heads in (("q", 4), ("k", 2), ("v", 2)):
        weight = edit.const(rng.standard_normal((10, heads * 6)).astype(np.float32), f"{name}.weight")
        value = edit.op("MatMul", x, weight)
        if bias:
            value = edit.op("Add", value, edit.const(rng.standard_normal(heads * 6).astype(np.float32), f"{name}.bias"))
        value = edit.op("Transpose", edit.op("Reshape", value, edit.ints([0, 0, heads, 6])), perm=[0, 2, 1, 3])
        if rotary and name != "v":
            tables = (sin, cos) if key_axis_differs and name == "k" else (cos, sin)
            value = edit.op("RotaryEmbedding", value, *tables, positions)
        add_output(model, edit.op("Identity", value), f"{name}.out", ["batch", heads, "nodes", 6])
    return model


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("key_axis_differs", [False, True])
def test_merging_projections_and_heads_keeps_the_function(bias, rotary, key_axis_differs):
    rng = np.random.default_rng(1)
    feeds = {"x": rng.standard_normal((2, 5, 10)).astype(np.float32), "positions": rng.integers(0, 32, (2, 5))}
    model = projection_model(bias, rotary, key_axis_differs)
    before = run(model, feeds)
    assert merge_linears(model) == 1
    assert merge_heads(model) == 1
    counts = histogram_from_model(model)
    assert counts["MatMul"] == counts["Reshape"] == counts["Transpose"] == 1
    assert counts.get("Add", 0) == int(bias)
    # Only Q and K that are rotated alike may share a rotary node.
    assert counts.get("RotaryEmbedding", 0) == (0 if not rotary else 2 if key_axis_differs else 1)
    for got, wanted in zip(run(model, feeds), before, strict=True):
        assert np.abs(got - wanted).max() < 1e-5


def test_linears_of_different_inputs_or_shared_weights_are_left_alone():
    model = empty_model()
    x, y = (add_input(model, n, ["batch", "nodes", 4], "float32") for n in "xy")
    edit = Editor(model)
    first, second = (edit.const(np.eye(4, dtype=np.float32) * i, f"w{i}") for i in (1, 2))
    outputs = [edit.op("MatMul", x, first), edit.op("MatMul", y, second), edit.op("MatMul", x, second)]
    for index, value in enumerate(outputs):
        add_output(model, edit.op("Identity", value), f"out{index}", ["batch", "nodes", 4])
    assert merge_linears(model) == 0
    assert histogram_from_model(model) == {"MatMul": 3, "Identity": 3}


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_that_gives_an_output_is_left_alone(has_bias):
    rng, model = np.random.default_rng(0), empty_model()
    x, edit = add_input(model, "x", ["batch", "nodes", 4], "float32"), Editor(model)
    weights = [edit.const(rng.standard_normal((4, 3)).astype(np.float32), f"w{i}") for i in range(3)]
    for index, weight in enumerate(weights):
        value = edit.op("MatMul", x, weight)
        if has_bias:
            value = edit.op("Add", value, edit.const(rng.standard_normal(3).astype(np.float32), f"b{index}"))
        add_output(model, edit.op("Identity", value) if index else value, f"out{index}", ["batch", "nodes", 3])
    feeds = {"x": rng.standard_normal((2, 3, 4)).astype(np.float32)}
    before = run(model, feeds)
    assert merge_linears(model) == 1
    counts = histogram_from_model(model)
    assert counts["MatMul"] == 2 and counts["Split"] == 1
    for got, wanted in zip(run(model, feeds), before, strict=True):
        assert np.abs(got - wanted).max() < 1e-5


def test_layers_that_run_several_times_share_one_merged_weight():
    """Steps of a chain: the first needs no queries, and its product has them nevertheless; one weight is used alone."""
    rng = np.random.default_rng(0)
    model = empty_model()
    edit = Editor(model)
    sizes = {"k": 2, "v": 2, "q": 6, "o": 3}
    weights = {n: edit.const(rng.standard_normal((4, size)).astype(np.float32), n) for n, size in sizes.items()}
    biases = {n: edit.const(rng.standard_normal(size).astype(np.float32), f"b{n}") for n, size in sizes.items()}
    for step, names in enumerate(("kvo", "qkv", "vkq", "o")):
        x = add_input(model, f"x{step}", ["batch", "nodes", 4], "float32")
        for name in names:
            product = edit.op("MatMul", x, weights[name])
            product.shape = ir.Shape(["batch", "nodes", sizes[name]])
            total = edit.op("Add", product, biases[name])
            add_output(model, edit.op("Identity", total), f"{name}{step}", ["batch", "nodes", sizes[name]])
    feeds = {f"x{i}": rng.standard_normal((2, 3, 4)).astype(np.float32) for i in range(4)}
    before = run(model, feeds)
    assert merge_linears(model) == 3
    counts = histogram_from_model(model)
    assert counts["MatMul"] == 5 and counts["Split"] == 3
    merged = [v for v in model.graph.initializers.values() if v.shape is not None and tuple(v.shape) == (4, 10)]
    assert len(merged) == 1 and len(merged[0].uses()) == 3
    assert not {"q", "k", "v"} & model.graph.initializers.keys()
    for got, wanted in zip(run(model, feeds), before, strict=True):
        assert np.abs(got - wanted).max() < 1e-5


def test_of_equal_products_the_first_is_merged():
    """What reads another one of its group may come before the second."""
    rng = np.random.default_rng(0)
    model = empty_model()
    edit = Editor(model)
    x = add_input(model, "x", ["batch", "nodes", 4], "float32")
    weights = {name: edit.const(rng.standard_normal((4, 3)).astype(np.float32), name) for name in "qk"}
    for step, name in enumerate("qkq"):
        product = edit.op("MatMul", x, weights[name])
        product.shape = ir.Shape(["batch", "nodes", 3])
        add_output(model, edit.op("Neg", product), f"{name}{step}", ["batch", "nodes", 3])
    feeds = {"x": rng.standard_normal((2, 3, 4)).astype(np.float32)}
    before = evaluate(model, feeds)
    assert merge_linears(model) == 1
    for got, wanted in zip(evaluate(model, feeds), before, strict=True):
        assert np.abs(got - wanted).max() < 1e-5


def test_heads_that_are_used_elsewhere_are_left_alone():
    model = projection_model(bias=False)
    merge_linears(model)
    reshape = next(n for n in model.graph if n.op_type == "Reshape")
    add_output(model, Editor(model).op("Identity", reshape.outputs[0]), "peek", ["batch", "nodes", 4, 6])
    before = histogram_from_model(model)
    assert merge_heads(model) == 0
    assert histogram_from_model(model) == before
