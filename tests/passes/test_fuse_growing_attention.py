# SPDX-License-Identifier: Apache-2.0
"""A chain of tokens that attend to each other within one run becomes RotaryQkvAttention; other attention stays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.ops.registry import attach_functions
from speccompile.passes.base import histogram_from_model, run_pipeline
from speccompile.passes.cleanup import REMOVE_DEAD, SHARE_COMMON
from speccompile.passes.edit import OPS_DOMAIN, Editor, add_input
from speccompile.passes.fuse_growing_attention import FUSE_GROWING_ATTENTION
from tests.passes.test_lowering import add_output, empty_model, run

TOLERANCE = 2e-6  # of numbers of order 1, float32
DIM, TOKENS = 6, 4


@dataclass(frozen=True)
class Chain:
    """A layer that runs token by token."""

    heads: int = 4
    kv_heads: int = 2
    first_query: int = 0  # tokens before it have no query
    is_masked: bool = False
    query_position_differs: bool = False
    value_is_turned: bool = False
    nodes: int = 1  # of a step
    is_last_first: bool = False  # the last token's product stands before the others

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * DIM


def _shaped(value: ir.Value, *dims: int) -> ir.Value:
    value.shape, value.type = ir.Shape(["batch", *dims]), ir.TensorType(ir.DataType.FLOAT)
    return value


def _angles(edit: Editor, position: int) -> tuple[ir.Value, ir.Value]:
    angles = (position * 0.7 ** np.arange(DIM // 2, dtype=np.float32)).reshape(1, 1, 1, -1)
    return edit.const(np.cos(angles), f"cos{position}"), edit.const(np.sin(angles), f"sin{position}")


def _turned(edit: Editor, x: ir.Value, position: int, dims: tuple[int, int]) -> ir.Value:
    heads, nodes = dims
    cos, sin = _angles(edit, position)
    low = edit.op("Slice", x, edit.ints([0]), edit.ints([DIM // 2]), edit.ints([3]), edit.ints([1]))
    high = edit.op("Slice", x, edit.ints([DIM // 2]), edit.ints([2**62]), edit.ints([3]), edit.ints([1]))
    first = edit.op("Sub", edit.op("Mul", low, cos), edit.op("Mul", high, sin))
    second = edit.op("Add", edit.op("Mul", high, cos), edit.op("Mul", low, sin))
    return _shaped(edit.op("Concat", first, second, axis=-1), heads, nodes, DIM)


def _repeated(edit: Editor, x: ir.Value, chain: Chain, rows: int) -> ir.Value:
    group = chain.heads // chain.kv_heads
    if group == 1:
        return x
    apart = edit.op("Unsqueeze", x, edit.ints([2]))
    wide = _shaped(edit.op("Expand", apart, edit.ints([1, 1, group, 1, 1])), chain.kv_heads, group, rows, DIM)
    return _shaped(edit.op("Reshape", wide, edit.ints([0, chain.heads, rows, DIM])), chain.heads, rows, DIM)


def chain_model(chain: Chain) -> ir.Model:
    """Rows of a merged product of each token -> rows for the output product, in the nodes of an export."""
    model = empty_model()
    edit = Editor(model)
    nums, nodes = (chain.heads, chain.kv_heads, chain.kv_heads), chain.nodes
    products = [add_input(model, f"product{i}", ["batch", nodes, chain.width], "float32") for i in range(TOKENS)]
    order = [TOKENS - 1, *range(TOKENS - 1)] if chain.is_last_first else range(TOKENS)
    heads: dict[int, list[ir.Value]] = {}
    for token in order:
        parts = edit.op("Split", products[token], edit.ints([n * DIM for n in nums]), axis=-1, num_outputs=3)
        heads[token] = []
        for part, num, name in zip(parts, nums, "qkv", strict=True):
            rows = edit.op("Reshape", _shaped(part, nodes, num * DIM), edit.ints([0, nodes, num, DIM]))
            value = _shaped(edit.op("Transpose", rows, perm=[0, 2, 1, 3]), num, nodes, DIM)
            position = token + int(name == "q" and chain.query_position_differs)
            is_turned = name != "v" or chain.value_is_turned
            heads[token].append(_turned(edit, value, position, (num, nodes)) if is_turned else value)
    held: list[ir.Value] = []
    for token in range(TOKENS):
        q, *new = heads[token]
        if held:
            rows = (token + 1) * nodes
            new = [
                _shaped(edit.op("Concat", *pair, axis=2), chain.kv_heads, rows, DIM)
                for pair in zip(held, new, strict=True)
            ]
        held = new
        if token < chain.first_query:
            continue
        k, v = (_repeated(edit, x, chain, (token + 1) * nodes) for x in held)
        scores = edit.op("Mul", edit.op("MatMul", q, edit.op("Transpose", k, perm=[0, 1, 3, 2])), _scale(edit))
        if chain.is_masked:
            scores = edit.op("Add", scores, edit.const(np.zeros(1, np.float32), "mask"))
        mixed = edit.op("MatMul", edit.op("Softmax", scores, axis=-1), v)
        rows = edit.op("Reshape", edit.op("Transpose", mixed, perm=[0, 2, 1, 3]), edit.ints([0, nodes, -1]))
        _shaped(rows, nodes, chain.heads * DIM)
        add_output(model, edit.op("Identity", rows), f"out{token}", ["batch", nodes, chain.heads * DIM])
    return model


def _scale(edit: Editor) -> ir.Value:
    return edit.const(np.asarray(0.4, np.float32), "scale")


FUSED = {
    "grouped": Chain(),
    "one key head": Chain(heads=3, kv_heads=1),
    "no groups": Chain(heads=2, kv_heads=2),
    "keys without a query": Chain(first_query=1),
    "one query": Chain(first_query=TOKENS - 1),
    "products in another order": Chain(is_last_first=True),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_growing_chain_is_fused_and_keeps_the_function(name: str) -> None:
    chain = FUSED[name]
    before, after = chain_model(chain), chain_model(chain)
    assert FUSE_GROWING_ATTENTION.run(after) == TOKENS - chain.first_query
    run_pipeline(after, (SHARE_COMMON, REMOVE_DEAD))
    counts = histogram_from_model(after)
    assert counts[f"{OPS_DOMAIN}::RotaryQkvAttention"] == TOKENS
    assert not {"MatMul", "Softmax", "Split", "Slice", "Transpose"} & counts.keys()
    attach_functions(after)
    rng = np.random.default_rng(1)
    for batch in (1, 3):
        shape = (batch, 1, chain.width)
        feeds = {f"product{i}": rng.standard_normal(shape).astype(np.float32) for i in range(TOKENS)}
        for got, wanted in zip(run(after, feeds), run(before, feeds), strict=True):
            assert got.shape == wanted.shape
            assert np.abs(got - wanted).max() < TOLERANCE


@pytest.mark.parametrize(
    "chain",
    [Chain(is_masked=True), Chain(query_position_differs=True), Chain(value_is_turned=True), Chain(nodes=2)],
    ids=["a mask", "a query elsewhere", "rotated values", "two nodes a step"],
)
def test_other_attention_is_left_alone(chain: Chain) -> None:
    before, model = histogram_from_model(chain_model(chain)), chain_model(chain)
    assert FUSE_GROWING_ATTENTION.run(model) == 0
    assert histogram_from_model(model) == before


def test_what_is_no_rotation_is_left_alone() -> None:
    model = chain_model(Chain(first_query=1))
    cosines = [n for n in model.graph if n.op_type == "Mul" and n.inputs[1] is model.graph.initializers["cos0"]]
    key = cosines[2]  # the first two rotate the query
    key.replace_input_with(1, Editor(model).const(np.full((1, 1, 1, DIM // 2), 0.5, np.float32), "other"))
    assert FUSE_GROWING_ATTENTION.run(model) == 0
