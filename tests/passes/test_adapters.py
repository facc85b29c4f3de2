# SPDX-License-Identifier: Apache-2.0
"""LowRank nodes of linears that were merged become one; gates and norms beside them become part of our kernels' ops."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from speccompile.checkpoints.lora import Factors
from speccompile.core.specs import ADAPTER
from speccompile.errors import CheckpointError
from speccompile.ops.registry import reference_ops
from speccompile.passes.attach_adapters import attach_adapters, merge_adapters
from speccompile.passes.fuse_low_rank import fuse_low_rank
from speccompile.passes.merge_linears import merge_linears
from tests.passes.graphs import graph, ops

INPUTS = (
    "int64[batch, nodes] tokens, int64[batch, scored] scored_nodes, float[batch, nodes, 8] h, float[batch, nodes, 8] r"
)
BODY = """
    s = Add(h, r)
    x = RMSNormalization <axis = -1, epsilon = 1e-6> (s, gamma)
    gate_rows = MatMul(x, gate.weight)
    up_rows = MatMul(x, up.weight)
    active = Sigmoid(gate_rows)
    silu = Mul(gate_rows, active)
    gated = Mul({product})
    down_rows = MatMul(gated, down.weight)
    y = Add(s, down_rows)
"""


def model_of(product: str = "silu, up_rows") -> ir.Model:
    """A feed-forward block; `product` decides whether the gate's half comes first."""
    body = BODY.format(product=product)
    if product == "up first":
        body = BODY.format(product="silu, up_rows").replace("gate_rows = MatMul(x, gate.weight)\n", "")
        body = body.replace(
            "up_rows = MatMul(x, up.weight)\n",
            "up_rows = MatMul(x, up.weight)\n    gate_rows = MatMul(x, gate.weight)\n",
        )
    source = np.random.default_rng(0)
    sizes = {"gate.weight": (8, 6), "up.weight": (8, 6), "down.weight": (6, 8), "gamma": (8,)}
    names = {name: name.replace(".", "_") for name in sizes}
    for name, plain in names.items():
        body = body.replace(name, plain)
    weights = {plain: source.standard_normal(sizes[name], np.float32) for name, plain in names.items()}
    model = graph(f"block ({INPUTS}) => (float[batch, nodes, 8] y) {{ {body} }}", weights)
    for name, plain in names.items():
        model.graph.initializers[plain].name = name
    return model


def factors_of(*modules: str) -> dict[str, Factors]:
    source, sizes = np.random.default_rng(1), {"gate": (8, 6), "up": (8, 6), "down": (6, 8)}
    made = {}
    for rank, name in enumerate(modules, 1):
        a, b = (source.standard_normal((3, rank, size), np.float32) for size in sizes[name])
        a[0] = b[0] = 0
        made[name] = Factors(a, b, "adapter_model.safetensors")
    return made


def run(model: ir.Model) -> np.ndarray:
    source = np.random.default_rng(2)
    feeds: dict[str, Any] = {name: source.standard_normal((3, 4, 8), np.float32) for name in "hr"}
    feeds |= {ADAPTER: np.array([2, 0, 1])} if any(v.name == ADAPTER for v in model.graph.inputs) else {}
    feeds |= {"tokens": np.zeros((3, 4), np.int64), "scored_nodes": np.zeros((3, 1), np.int64)}
    [y] = ReferenceEvaluator(ir.to_proto(model), new_ops=reference_ops()).run(None, feeds)
    return y


@pytest.mark.parametrize("modules", [("gate", "up", "down"), ("up",), ("gate", "down")])
def test_the_function_stays_the_same(modules):
    plain, model = run(model_of()), model_of()
    assert attach_adapters(model, factors_of(*modules)) == len(modules)
    wanted = run(model)
    assert np.array_equal(wanted[1], plain[1]) and not np.allclose(wanted[0], plain[0])
    assert merge_linears(model) == 1
    assert np.allclose(run(model), wanted, atol=1e-5)  # sums of 14 products of size 1 in another order
    assert merge_adapters(model) == 1 and ops(model)["LowRank"] == 1 + ("down" in modules)
    assert np.allclose(run(model), wanted, atol=1e-5)
    assert fuse_low_rank(model) == 2
    assert {"GatedLowRank", "AddNorm"} <= set(ops(model)) and not {"Split", "Sigmoid", "RMSNormalization"} & set(
        ops(model)
    )
    assert np.allclose(run(model), wanted, atol=1e-5)


def test_a_gate_whose_half_comes_second_stays():
    model = model_of("up first")
    attach_adapters(model, factors_of("gate", "up"))
    merge_linears(model)
    assert merge_adapters(model) == 1
    wanted = run(model)
    assert fuse_low_rank(model) == 1 and "Sigmoid" in ops(model)
    assert np.allclose(run(model), wanted, atol=1e-5)


def test_without_adapters_nothing_fires():
    model = model_of()
    assert (merge_linears(model), merge_adapters(model), fuse_low_rank(model)) == (1, 0, 0)


def test_a_part_that_is_no_linear_of_all_nodes_is_refused_by_name():
    with pytest.raises(CheckpointError, match=r"safetensors \(lm_head\): got a part that has no adapter here"):
        attach_adapters(model_of(), {"lm_head": factors_of("down")["down"]})
