# SPDX-License-Identifier: Apache-2.0
"""Linears get the grids of the checkpoint's rows that have the same numbers, however they were joined and permuted."""

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.backends.onnxruntime.engine import session_options
from speccompile.ops.grid import Grid
from speccompile.passes.attach_grids import attach_stored, grid_of
from speccompile.passes.pack_linears import pack_linears
from speccompile.passes.quantize_blocks import quantize_blocks
from speccompile.passes.stored_rows import StoredRows
from tests.lab.graphs import open_session
from tests.passes.graphs import GridTable, graph, ops, run

K = 64


def random_grid(num_out: int, seed: int, *, bits: int = 4, has_minimums: bool = True, order: bool = False) -> Grid:
    rng = np.random.default_rng(seed)
    levels = rng.integers(0, 1 << bits, (num_out, K)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.02, (num_out, 2)).astype(np.float16)
    inputs = rng.permutation(K).astype(np.int32) if order else None
    if has_minimums:
        return Grid(levels, scales, 32, bits, minimums=(-8 * scales).astype(np.float16), order=inputs)
    return Grid(levels, scales, 32, bits, 1 << (bits - 1), order=inputs)


class Checkpoint(GridTable):
    """Grids by name; `reads` counts what is read."""

    def __init__(self, **grids: Grid | None) -> None:
        super().__init__(grids)
        self.reads = 0

    def grid(self, key: str) -> Grid | None:
        self.reads += 1
        return super().grid(key)


def make(weight: np.ndarray, inputs: tuple[str, ...] = ("x",)) -> ir.Model:
    """The product of each input with the same weights."""
    names = ", ".join(f"float[b, t, {K}] {name}" for name in inputs)
    outputs = ", ".join(f"float[b, t, {weight.shape[1]}] {name}_out" for name in inputs)
    body = " ".join(f"{name}_out = MatMul({name}, w)" for name in inputs)
    text = f"test ({names}) => ({outputs}) <float[{K}, {weight.shape[1]}] w> {{ {body} }}"
    return graph(text, {"w": np.ascontiguousarray(weight)})


def check(weight: np.ndarray, checkpoint: Checkpoint, expected: dict[str, int]) -> tuple[ir.Model, StoredRows]:
    """Attaches, and compares operators and products."""
    rows = StoredRows(checkpoint)
    before, after = make(weight), make(weight)
    attach_stored(after, rows)
    assert ops(after) == expected
    x = np.random.default_rng(3).standard_normal((2, 3, K)).astype(np.float32)
    np.testing.assert_allclose(run(after, {"x": x})[0], run(before, {"x": x})[0], rtol=1e-4, atol=1e-5)
    return after, rows


Q, K_, V = (random_grid(n, seed) for seed, n in enumerate((40, 16, 16)))


def columns(*grids: Grid) -> np.ndarray:
    return np.concatenate([grid.weight() for grid in grids]).T


def test_joined_permuted_and_padded_outputs_are_found():
    order = np.random.default_rng(0).permutation(72)
    weight = np.concatenate([columns(Q, K_, V)[:, order], np.zeros((K, 3), np.float32)], axis=1)
    after, rows = check(weight, Checkpoint(q=Q, k=K_, v=V), {"MatMul": 1})
    grid = grid_of(after.graph.initializers["w"].const_value)
    assert grid is not None and grid.kind == Q.kind
    np.testing.assert_array_equal(grid.weight().T.view(np.uint32), weight.view(np.uint32))
    assert rows.record() == {
        "grids": {"4 bits, float16 scale and minimum for 32 inputs": 75 * K},
        "floats": 0,
        "float_names": [],
        "num_float": 0,
        "unheld": [],
        "num_widened": 0,
        "widened": 0,
    }


def test_a_kind_that_takes_much_more_is_not_taken():
    """8 bits for all, as V has them, would take far more than 4 bits for Q and K."""
    wide = random_grid(16, 5, bits=8, has_minimums=False)
    after, rows = check(columns(Q, K_, wide), Checkpoint(q=Q, k=K_, v=wide), {"MatMul": 2, "Concat": 1})
    kinds = [grid_of(value.const_value) for value in after.graph.initializers.values()]
    assert [grid.kind for grid in kinds if grid] == [Q.kind, wide.kind]
    assert list(rows.record()["grids"].values()) == [56 * K, 16 * K]


def test_a_small_part_takes_the_kind_of_the_others():
    small = random_grid(8, 6, bits=4, has_minimums=False)
    after, _ = check(columns(Q, small), Checkpoint(q=Q, v=small), {"MatMul": 1})
    grid = grid_of(after.graph.initializers["w"].const_value)
    assert grid is not None and grid.minimums is not None and grid.scales.dtype == np.float32
    np.testing.assert_array_equal(grid.weight().T, columns(Q, small))


def test_inputs_are_gathered_in_the_order_of_their_grid():
    ordered = random_grid(40, 7, order=True)
    after, _ = check(ordered.weight().T, Checkpoint(q=ordered), {"Gather": 1, "MatMul": 1})
    [grid] = [g for v in after.graph.initializers.values() if (g := grid_of(v.const_value)) is not None]
    assert grid.order is None
    np.testing.assert_array_equal(grid.levels, ordered.levels)
    other = random_grid(16, 8, order=True)
    check(columns(ordered, other), Checkpoint(q=ordered, k=other), {"Gather": 2, "MatMul": 2, "Concat": 1})
    alike = Grid(other.levels, other.scales, 32, 4, minimums=other.minimums, order=ordered.order)
    check(columns(ordered, alike), Checkpoint(q=ordered, k=alike), {"Gather": 1, "MatMul": 1})


def test_what_no_grid_has_stays_as_it_is_and_is_named():
    plain = np.random.default_rng(1).standard_normal((K, 16)).astype(np.float32)
    weight = np.concatenate([columns(Q), plain], axis=1)
    after, rows = check(weight, Checkpoint(q=Q, lost=None), {"MatMul": 2, "Concat": 1})
    assert sum(grid_of(v.const_value) is not None for v in after.graph.initializers.values()) == 1
    found = rows.record()
    assert found["float_names"] == ["w"] and found["floats"] == 16 * K and found["unheld"] == ["lost"]
    mixed = np.concatenate([columns(Q), plain], axis=1)[:, np.random.default_rng(2).permutation(56)]
    after, rows = check(mixed, Checkpoint(q=Q), {"MatMul": 1})  # not in tens of products
    assert grid_of(after.graph.initializers["w"].const_value) is None
    one = columns(Q).copy()
    one[3, 5] = np.nextafter(one[3, 5], np.float32(9))
    after, rows = check(one, Checkpoint(q=Q), {"MatMul": 3, "Concat": 1})
    assert rows.record()["floats"] == K


def test_a_weight_of_two_products_is_attached_once():
    ordered = random_grid(40, 9, order=True)
    model = make(ordered.weight().T, ("x", "z"))
    assert attach_stored(model, StoredRows(Checkpoint(q=ordered))) == 1
    assert ops(model) == {"Gather": 2, "MatMul": 2}
    assert len({node.inputs[1] for node in model.graph if node.op_type == "MatMul"}) == 1


@pytest.mark.parametrize("lower", ["blocks", "packed"])
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("has_minimums", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 5, 6, 8])
def test_the_products_have_the_weights_of_the_checkpoint(bits, has_minimums, order, lower):

    from speccompile.ops.registry import attach_functions

    grid = random_grid(40, bits, bits=bits, has_minimums=has_minimums, order=order)
    model = make(grid.weight().T)
    attach_stored(model, StoredRows(Checkpoint(q=grid)))
    assert (quantize_blocks(model, None) if lower == "blocks" else pack_linears(model, "stored")) == 1
    assert "w" not in model.graph.initializers
    attach_functions(model)
    got = open_session(model, options=session_options({})).run(None, {"x": np.eye(K, dtype=np.float32)[None]})[0][0]
    np.testing.assert_allclose(got, grid.weight().T, rtol=1e-4, atol=1e-5)
