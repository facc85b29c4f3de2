# SPDX-License-Identifier: Apache-2.0
"""QkvAttention where Q, K and V are cut from one product; other graphs are left as they are."""

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.core.specs import LENGTHS, TREE_MASK
from speccompile.ops.registry import attach_functions
from speccompile.passes.base import histogram_from_model, run_pipeline
from speccompile.passes.cleanup import remove_dead
from speccompile.passes.edit import OPS_DOMAIN, Editor, add_input
from speccompile.passes.fuse_qkv_attention import fuse_qkv_attention
from tests.passes.test_lowering import add_output, empty_model, random_tree, run

TOLERANCE = 2e-6  # of numbers of order 1, float32
HEADS, KV_HEADS, DIM, MAX_SEQ = 4, 2, 6, 24


@dataclass(frozen=True)
class Layer:
    """What surrounds the attention of a layer."""

    norm: bool = False
    norm_after_transpose: bool = False
    norm_axis: int = -1
    rotary: bool = True
    rotary_dim: int = 0
    interleaved: int = 0
    own_positions: bool = False  # an input, not lengths + depth
    other_columns: int = 0  # a further part of the same product
    order: tuple[int, int, int] = (0, 1, 2)  # which part of the product Q, K and V are
    epsilons: tuple[float, float] = (1e-3, 1e-3)
    is_peeked: bool = False  # the heads of the output are an output as well
    softcap: float = 0.0
    window: int = 0


def _positions(model: ir.Model, lengths: ir.Value, mask: ir.Value) -> ir.Value:
    edit = Editor(model)
    count = edit.op("ReduceSum", edit.op("Cast", mask, to=ir.DataType.INT64), edit.ints([2]), keepdims=0)
    made: ir.Value = edit.op("Add", edit.op("Unsqueeze", lengths, edit.ints([1])), edit.op("Sub", count, edit.ints(1)))
    return made


def _heads(edit: Editor, rows: ir.Value, num: int, name: str, layer: Layer, gamma: ir.Value | None) -> ir.Value:
    value = edit.op("Reshape", rows, edit.ints([0, 0, num, DIM]))
    kinds = {"axis": layer.norm_axis, "epsilon": layer.epsilons["qkv".index(name) % 2]}
    if gamma is not None and not layer.norm_after_transpose:
        value = edit.op("RMSNormalization", value, gamma, **kinds)
    value = edit.op("Transpose", value, perm=[0, 2, 1, 3])
    value.shape = ir.Shape(["batch", num, "nodes", DIM])
    if gamma is not None and layer.norm_after_transpose:
        value = edit.op("RMSNormalization", value, gamma, **kinds)
    value.shape = ir.Shape(["batch", num, "nodes", DIM])
    return value


def layer_model(layer: Layer) -> ir.Model:
    """Rows of a merged product -> rows for the output product, in the nodes of an export."""
    rng = np.random.default_rng(0)
    model = empty_model()
    width = (HEADS + 2 * KV_HEADS) * DIM + layer.other_columns
    product = add_input(model, "product", ["batch", "nodes", width], "float32")
    caches = [add_input(model, n, ["batch", KV_HEADS, "max_seq", DIM], "float32") for n in ("k_cache", "v_cache")]
    lengths = add_input(model, LENGTHS, ["batch"], "int64")
    mask = add_input(model, TREE_MASK, ["batch", "nodes", "nodes"], "bool")
    edit = Editor(model)
    nums = [(HEADS, KV_HEADS, KV_HEADS)[layer.order.index(i)] for i in range(3)]
    sizes = [num * DIM for num in nums] + [layer.other_columns] * bool(layer.other_columns)
    parts = edit.op("Split", product, edit.ints(sizes), axis=-1, num_outputs=len(sizes))
    for part, size in zip(parts, sizes, strict=True):
        part.shape, part.type = ir.Shape(["batch", "nodes", size]), product.type
    positions = _positions(model, lengths, mask)
    if layer.own_positions:
        positions = add_input(model, "positions", ["batch", "nodes"], "int64")
    half = (layer.rotary_dim or DIM) // 2
    tables = [edit.const(rng.normal(size=(MAX_SEQ, half)).astype(np.float32), n) for n in ("cos", "sin")]
    heads = []
    for name, index, num in zip("qkv", layer.order, (HEADS, KV_HEADS, KV_HEADS), strict=True):
        is_turned = name != "v"
        gamma = None
        if layer.norm and is_turned:
            gamma = edit.const(1 + rng.normal(size=DIM).astype(np.float32) / 4, f"{name}.gamma")
        value = _heads(edit, parts[index], num, name, layer, gamma)
        if layer.rotary and is_turned:
            kinds = {"interleaved": layer.interleaved, "rotary_embedding_dim": layer.rotary_dim}
            value = edit.op("RotaryEmbedding", value, *tables, positions, **kinds)
            value.shape = ir.Shape(["batch", num, "nodes", DIM])
        heads.append(value)
    kinds = {"scale": 0.4, "softcap": layer.softcap, "window": layer.window}
    inputs = (*heads, *caches, lengths, mask)
    attended, *updated = edit.op("CachedAttention", *inputs, domain=OPS_DOMAIN, num_outputs=3, **kinds)
    attended.shape = ir.Shape(["batch", "nodes", HEADS, DIM])
    rows = edit.op("Reshape", attended, edit.ints([0, 0, HEADS * DIM]))
    add_output(model, edit.op("Identity", rows), "out", ["batch", "nodes", HEADS * DIM])
    for value, name in zip(updated, ("k_out", "v_out"), strict=True):
        add_output(model, value, name, ["batch", KV_HEADS, "max_seq", DIM])
    if layer.is_peeked:
        add_output(model, edit.op("Identity", attended), "heads", ["batch", "nodes", HEADS, DIM])
    if layer.other_columns:
        add_output(model, edit.op("Identity", parts[3]), "others", ["batch", "nodes", layer.other_columns])
    return model


def fused(layer: Layer) -> ir.Model:
    model = layer_model(layer)
    run_pipeline(model, (fuse_qkv_attention, remove_dead))
    return model


FUSED = {
    "rotary": (Layer(), "RotaryQkvAttention"),
    "partial": (Layer(rotary_dim=4), "RotaryQkvAttention"),
    "interleaved": (Layer(interleaved=1), "RotaryQkvAttention"),
    "plain": (Layer(rotary=False), "QkvAttention"),
    "norm": (Layer(norm=True, rotary=False), "NormQkvAttention"),
    "norm and rotary": (Layer(norm=True), "NormRotaryQkvAttention"),
    "norm after transpose": (Layer(norm=True, norm_after_transpose=True), "NormRotaryQkvAttention"),
    "window and softcap": (Layer(window=2, softcap=1.5), "RotaryQkvAttention"),
    "other columns": (Layer(other_columns=5), "RotaryQkvAttention"),
    "heads used": (Layer(is_peeked=True), "RotaryQkvAttention"),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_attention_keeps_the_function(name):
    layer, op = FUSED[name]
    before, after = layer_model(layer), fused(layer)
    counts = histogram_from_model(after)
    assert counts[f"{OPS_DOMAIN}::{op}"] == 1
    left = {"Shape": 1, "Identity": 0, "Split": int(layer.other_columns > 0), "Reshape": int(layer.is_peeked)}
    assert {n: c for n, c in counts.items() if not n.startswith(OPS_DOMAIN)} == {n: c for n, c in left.items() if c}
    for model in (before, after):
        attach_functions(model)
    rng = np.random.default_rng(1)
    for batch, nodes in ((1, 1), (3, 5), (2, 9)):
        width = (HEADS + 2 * KV_HEADS) * DIM + layer.other_columns
        feeds = {
            "product": rng.standard_normal((batch, nodes, width)).astype(np.float32),
            "k_cache": rng.standard_normal((batch, KV_HEADS, MAX_SEQ, DIM)).astype(np.float32),
            "v_cache": rng.standard_normal((batch, KV_HEADS, MAX_SEQ, DIM)).astype(np.float32),
            LENGTHS: rng.integers(0, MAX_SEQ - nodes + 1, batch),
            TREE_MASK: random_tree(rng, batch, nodes),
        }
        for got, wanted in zip(run(after, feeds), run(before, feeds), strict=True):
            assert got.shape == wanted.shape
            assert np.abs(got - wanted).max() < TOLERANCE


@pytest.mark.parametrize(
    "layer",
    [
        Layer(own_positions=True),
        Layer(order=(1, 0, 2)),
        Layer(norm=True, epsilons=(1e-3, 1e-4)),
        Layer(norm=True, norm_axis=1),
    ],
    ids=["positions of its own", "other order", "norms that differ", "norm over heads"],
)
def test_other_attention_is_left_alone(layer):
    before = histogram_from_model(layer_model(layer))
    model = layer_model(layer)
    assert fuse_qkv_attention(model) == 0
    assert histogram_from_model(model) == before


def test_rotations_that_differ_between_q_and_k_are_left_alone():
    model = layer_model(replace(Layer(), interleaved=0))
    query = next(n for n in model.graph if n.op_type == "RotaryEmbedding")
    query.replace_input_with(1, query.inputs[2])
    assert fuse_qkv_attention(model) == 0
