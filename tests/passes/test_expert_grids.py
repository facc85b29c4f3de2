# SPDX-License-Identifier: Apache-2.0
"""Experts that come quantised stay on their grids."""

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.ops.grid import Grid
from speccompile.ops.packing import Packed, unpack
from speccompile.passes.attach_grids import attach_expert_grids
from speccompile.passes.pack_experts import pack_experts
from speccompile.passes.stored_rows import StoredRows
from tests.passes.graphs import ops
from tests.passes.test_pack_experts import Sizes, check_same, mixture, run


class Grids:
    """A checkpoint in which each expert's matrix is a tensor."""

    def __init__(self, model: ir.Model, is_transposed: bool, **kinds: dict[str, int]) -> None:
        rng, self.grids = np.random.default_rng(0), dict[str, Grid]()
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

    @property
    def grid_keys(self) -> tuple[str, ...]:
        return tuple(self.grids)

    def grid(self, key: str) -> Grid:
        return self.grids[key]


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
