# SPDX-License-Identifier: Apache-2.0
"""Experts of few bits: they stay on their grids, and gathered ones become one product with all."""

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.ops.grid import Grid
from speccompile.ops.packing import Packed, unpack
from speccompile.passes.attach_grids import attach_expert_grids
from speccompile.passes.dense_experts import EXPERT_FORMS, dense_experts, expert_levels, expert_scales
from speccompile.passes.pack_experts import pack_experts
from speccompile.passes.stored_rows import StoredRows
from tests.passes.graphs import GridTable, graph, ops
from tests.passes.test_pack_experts import Sizes, check_same, mixture, numbers, run


class Grids(GridTable):
    """A checkpoint in which each expert's matrix is a tensor."""

    def __init__(self, model: ir.Model, is_transposed: bool, **kinds: dict[str, int]) -> None:
        super().__init__({})
        rng = np.random.default_rng(0)
        for name, kind in kinds.items():
            value = model.graph.initializers[name]
            whole = value.const_value.numpy().copy()
            for expert, matrix in enumerate(whole):
                num_out, num_in = matrix.shape[::-1] if is_transposed else matrix.shape
                levels = rng.integers(0, 1 << kind["bits"], (num_out, num_in)).astype(np.uint8)
                group, dtype = kind.get("group", 32), np.float32 if kind.get("is_wide") else np.float16
                scales = rng.uniform(0.01, 0.05, (num_out, num_in // group)).astype(dtype)
                minimums = None if "zero" in kind else (-scales * dtype(3)).astype(dtype)
                grid = Grid(levels, scales, group, kind["bits"], kind.get("zero", 0), minimums)
                self.grids[f"{name}.{expert}"] = grid
                matrix[:] = grid.weight().T if is_transposed else grid.weight()
            value.const_value = ir.tensor(whole, name=name)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ({"bits": 6, "zero": 32}, "Int8"),
        ({"bits": 4}, "Int4Min"),
        ({"bits": 5, "group": 16, "is_wide": 1}, "Int8Min"),
        ({"bits": 4, "group": 64}, "Int4Min"),
    ],
)
def test_experts_that_come_quantised_stay_on_their_grids(kind, form, is_transposed):
    sizes = Sizes(hidden=64, inner=64)
    model = mixture(sizes, is_transposed=is_transposed)
    grids = Grids(model, is_transposed, w1={"bits": 4, "zero": 8}, w2=kind)
    after, rows = model.clone(), StoredRows(grids)
    assert attach_expert_grids(after, rows) == 2
    assert pack_experts(after, "stored") == 2
    assert ops(after)["GatedExpertLinearInt4"] == ops(after)[f"ExpertLinear{form}"] == 1
    assert rows.record()["num_float"] == 0 and len(rows.record()["grids"]) == 2
    held = after.graph.initializers
    for expert in range(sizes.experts):
        names = ("", ".scales", *((".minimums",) if form.endswith("Min") else ()))
        parts = [held[f"w2.packed{part}"].const_value.numpy()[expert] for part in names]
        packed = Packed(*parts, group=kind.get("group", 32))
        weight = unpack(packed, form)[: sizes.inner, : sizes.hidden].T
        np.testing.assert_array_equal(weight, grids.grids[f"w2.{expert}"].weight())
    check_same(run(after, sizes), run(model, sizes), 0.03)


def test_experts_of_which_one_has_no_grid_stay_floats():
    sizes = Sizes(hidden=64, inner=64)
    model = mixture(sizes)
    grids = Grids(model, False, w1={"bits": 4, "zero": 8}, w2={"bits": 4, "zero": 8})
    del grids.grids["w2.3"]
    rows = StoredRows(grids)
    assert attach_expert_grids(model, rows) == 1
    assert rows.record()["float_names"] == ["w2"] and rows.record()["num_widened"] == 0
    assert pack_experts(model, "stored") == 2 and ops(model)["ExpertLinearF32"] == 1


SIZES = Sizes(experts=6, hidden=128, inner=64, per_row=3)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("gather", ["GatherND<batch_dims = 0>", "Gather<axis = 0>"])
def test_a_mixture_keeps_its_numbers(is_transposed, gather):
    model = mixture(SIZES, has_bias=True, is_transposed=is_transposed, gather=gather)
    wanted = run(model.clone(), SIZES)
    assert dense_experts(model, "none", "float32") == 2
    check_same(run(model, SIZES), wanted)
    assert ops(model)["MatMul"] == 2 and "Expand" not in ops(model), "rows are multiplied once, not once an expert"
    held = {v.name: tuple(v.shape) for v in model.graph.initializers.values() if len(v.shape) == 3}
    assert held == {"w1.dense": (6, 128, 128), "w2.dense": (6, 64, 128)}


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_weights_of_few_bits_give_what_the_rounded_ones_do(quantization):
    form = EXPERT_FORMS[quantization]
    model = mixture(SIZES, has_bias=True)
    whole, rounded = run(model.clone(), SIZES), model.clone()
    for name in ("w1", "w2"):
        value = rounded.graph.initializers[name]
        made = []
        for weight in value.const_value.numpy():
            scales = expert_scales(weight.T, form, "float16")
            levels = expert_levels(weight.T, scales, form).astype(np.float32)
            made.append((levels.reshape(len(scales), -1, weight.shape[0]) * scales[:, None]).reshape(weight.T.shape).T)
        value.const_value = ir.tensor(np.stack(made), name=name)
    assert dense_experts(model, quantization, "float16") == 2
    dense = run(model, SIZES)
    check_same(dense, run(rounded, SIZES), 1e-5)
    error = np.abs(dense - whole).max() / np.abs(whole).max()
    assert 0 < error < {"int8": 0.02, "int4": 0.3}[form]
    for node in model.graph:
        if node.op_type == "DequantizeLinear":
            levels, scales = (node.inputs[i].const_value for i in (0, 1))
            assert (levels.nbytes + scales.nbytes / 2) / levels.size <= {"int8": 1.1, "int4": 0.6}[form]


def test_an_input_that_no_block_divides_stays_as_it_is():
    sizes = Sizes(hidden=40, inner=64)
    model = mixture(sizes)
    assert dense_experts(model, "int4", "float16") == 2
    assert ops(model)["DequantizeLinear"] == 1 and "w1.dense" in model.graph.initializers


@pytest.mark.parametrize(("quantization", "num_changed"), [("none", 0), ("int4", 1)])
def test_a_product_with_all_experts_is_quantised_where_it_is(quantization, num_changed):
    text = "test (float[4, rows, 64] x) => (float[4, rows, 32] out) { out = MatMul(x, w) }"
    model = graph(text, {"w": numbers(4, 64, 32)})
    assert dense_experts(model, quantization, "float16") == num_changed
    assert ops(model) == {"MatMul": 1, **({"DequantizeLinear": 1} if num_changed else {})}
    assert ("w" in model.graph.initializers) == (not num_changed)


def test_what_was_changed_is_not_found_again():
    model = mixture(SIZES)
    assert [dense_experts(model, "int8", "float16") for _ in range(2)] == [2, 0]
