# SPDX-License-Identifier: Apache-2.0
"""Steps of a chain that attend to each other within one run become RotaryQkvAttention; other attention stays."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from speccompile.ops.registry import attach_functions
from speccompile.passes.attention_mask import HIDDEN_SCORE
from speccompile.passes.base import histogram_from_model, run_pipeline
from speccompile.passes.cleanup import remove_dead, share_common_subexpressions
from speccompile.passes.edit import OPS_DOMAIN, Editor, add_input
from speccompile.passes.fuse_growing_attention import fuse_growing_attention
from tests.passes.test_lowering import add_output, empty_model, run

TOLERANCE = 2e-6  # of numbers of order 1, float32
DIM, STEPS = 6, 4


@dataclass(frozen=True)
class Chain:
    """A layer that runs step by step."""

    heads: int = 4
    kv_heads: int = 2
    nodes: tuple[int, ...] = (1,) * STEPS  # tokens of each step
    first_query: int = 0  # steps before it have no query
    is_masked: bool = False  # by an addition
    is_causal: bool = True  # tokens of a step see those before them alone
    query_position_differs: bool = False
    value_is_turned: bool = False
    is_last_first: bool = False  # the last step's product stands before the others

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * DIM


def _shaped(value: ir.Value, *dims: int) -> ir.Value:
    value.shape, value.type = ir.Shape(["batch", *dims]), ir.TensorType(ir.DataType.FLOAT)
    return value


def _angles(edit: Editor, position: int, nodes: int) -> tuple[ir.Value, ir.Value]:
    positions = np.arange(position, position + nodes, dtype=np.float32)
    angles = (positions[:, None] * 0.7 ** np.arange(DIM // 2, dtype=np.float32))[None, None]
    return edit.const(np.cos(angles), f"cos{position}"), edit.const(np.sin(angles), f"sin{position}")


def _turned(edit: Editor, x: ir.Value, position: int, dims: tuple[int, int]) -> ir.Value:
    heads, nodes = dims
    cos, sin = _angles(edit, position, nodes)
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


def _projected(edit: Editor, product: ir.Value, chain: Chain, step: int) -> list[ir.Value]:
    """Heads of Q, K and V of a step."""
    nums, nodes, heads = (chain.heads, chain.kv_heads, chain.kv_heads), chain.nodes[step], []
    parts = edit.op("Split", product, edit.ints([n * DIM for n in nums]), axis=-1, num_outputs=3)
    for part, num, name in zip(parts, nums, "qkv", strict=True):
        rows = edit.op("Reshape", _shaped(part, nodes, num * DIM), edit.ints([0, nodes, num, DIM]))
        value = _shaped(edit.op("Transpose", rows, perm=[0, 2, 1, 3]), num, nodes, DIM)
        position = sum(chain.nodes[:step]) + int(name == "q" and chain.query_position_differs)
        is_turned = name != "v" or chain.value_is_turned
        heads.append(_turned(edit, value, position, (num, nodes)) if is_turned else value)
    return heads


def _attended(edit: Editor, q: ir.Value, held: list[ir.Value], chain: Chain, step: int) -> ir.Value:
    """Rows of the output product."""
    nodes, num_rows = chain.nodes[step], sum(chain.nodes[: step + 1])
    k, v = (_repeated(edit, x, chain, num_rows) for x in held)
    scale = edit.const(np.asarray(0.4, np.float32), "scale")
    scores = edit.op("Mul", edit.op("MatMul", q, edit.op("Transpose", k, perm=[0, 1, 3, 2])), scale)
    if nodes > 1:
        seen = np.tri(nodes, num_rows, num_rows - nodes, dtype=np.bool_)
        hidden = edit.const(~seen if chain.is_causal else seen, f"hidden{step}")
        scores = edit.op("Where", hidden, edit.const(np.asarray(-np.inf, np.float32), "lowest"), scores)
    if chain.is_masked:
        scores = edit.op("Add", scores, edit.const(np.zeros(1, np.float32), "mask"))
    mixed = edit.op("MatMul", edit.op("Softmax", scores, axis=-1), v)
    rows = edit.op("Reshape", edit.op("Transpose", mixed, perm=[0, 2, 1, 3]), edit.ints([0, nodes, -1]))
    return _shaped(rows, nodes, chain.heads * DIM)


def chain_model(chain: Chain) -> ir.Model:
    """Rows of a merged product of each step -> rows for the output product, in the nodes of an export."""
    model = empty_model()
    edit = Editor(model)
    dims = [["batch", nodes, chain.width] for nodes in chain.nodes]
    products = [add_input(model, f"product{i}", dims[i], "float32") for i in range(STEPS)]
    order = [STEPS - 1, *range(STEPS - 1)] if chain.is_last_first else range(STEPS)
    heads = {step: _projected(edit, products[step], chain, step) for step in order}
    held: list[ir.Value] = []
    for step in range(STEPS):
        q, *new = heads[step]
        if held:
            rows = sum(chain.nodes[: step + 1])
            joined = (edit.op("Concat", *pair, axis=2) for pair in zip(held, new, strict=True))
            new = [_shaped(value, chain.kv_heads, rows, DIM) for value in joined]
        held = new
        if step >= chain.first_query:
            out = edit.op("Identity", _attended(edit, q, held, chain, step))
            add_output(model, out, f"out{step}", ["batch", chain.nodes[step], chain.heads * DIM])
    return model


FUSED = {
    "grouped": Chain(),
    "one key head": Chain(heads=3, kv_heads=1),
    "no groups": Chain(heads=2, kv_heads=2),
    "keys without a query": Chain(first_query=1),
    "one query": Chain(first_query=STEPS - 1),
    "products in another order": Chain(is_last_first=True),
    "a first step of two tokens": Chain(nodes=(2, 1, 1, 1)),
    "steps of several tokens": Chain(nodes=(1, 3, 1, 2)),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_growing_chain_is_fused_and_keeps_the_function(name):
    chain = FUSED[name]
    before, after = chain_model(chain), chain_model(chain)
    assert fuse_growing_attention(after) == STEPS - chain.first_query
    run_pipeline(after, (share_common_subexpressions, remove_dead))
    counts = histogram_from_model(after)
    assert counts[f"{OPS_DOMAIN}::RotaryQkvAttention"] == STEPS
    assert not {"MatMul", "Softmax", "Split", "Slice", "Transpose"} & counts.keys()
    attach_functions(after)
    rng = np.random.default_rng(1)
    for batch in (1, 3):
        shapes = [(batch, nodes, chain.width) for nodes in chain.nodes]
        feeds = {f"product{i}": rng.standard_normal(shapes[i]).astype(np.float32) for i in range(STEPS)}
        for got, wanted in zip(run(after, feeds), run(before, feeds), strict=True):
            assert got.shape == wanted.shape
            assert np.abs(got - wanted).max() < TOLERANCE


@pytest.mark.parametrize(
    "chain",
    [
        Chain(is_masked=True),
        Chain(query_position_differs=True),
        Chain(value_is_turned=True),
        Chain(nodes=(2, 2, 2, 2), is_causal=False, first_query=1),
    ],
    ids=["an added mask", "a query elsewhere", "rotated values", "another mask"],
)
def test_other_attention_is_left_alone(chain):
    before, model = histogram_from_model(chain_model(chain)), chain_model(chain)
    assert fuse_growing_attention(model) == 0
    assert histogram_from_model(model) == before


def test_what_is_no_rotation_is_left_alone():
    model = chain_model(Chain(first_query=1))
    cosines = [n for n in model.graph if n.op_type == "Mul" and n.inputs[1] is model.graph.initializers["cos0"]]
    key = cosines[2]  # the first two rotate the query
    key.replace_input_with(1, Editor(model).const(np.full((1, 1, 1, DIM // 2), 0.5, np.float32), "other"))
    assert fuse_growing_attention(model) == 0


def test_a_hidden_score_is_absorbed_and_stays_finite_in_base_2():
    """Kernels multiply scores by log2(e) = 1.44 before they subtract the row's greatest."""
    for hidden in (HIDDEN_SCORE, HIDDEN_SCORE.astype(ml_dtypes.bfloat16).astype(np.float32)):
        for score in (np.float32(1e6), np.float32(-1e6)):
            assert hidden + score == hidden and np.isfinite(2 * hidden * np.float32(1.4427))
            assert np.exp2(hidden * np.float32(1.4427) - score) == 0
