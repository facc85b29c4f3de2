# SPDX-License-Identifier: Apache-2.0
"""The error-compensating quantiser: never worse than rounding, and rounding where nothing can be compensated."""

import numpy as np
import pytest

from speccompile.ops.grid import Grid
from speccompile.passes.compensation import BLOCK, DAMPING, MIDDLE, MOST, compensated_grid, factor_of, rounded_grid
from speccompile.passes.quantize_blocks import grid_from_weight

Array = np.ndarray


def correlated(num_rows: int, num_in: int, seed: int, rank: int | None = None) -> Array:
    """Inputs [rows, in] float32 with different scales and correlations between them."""
    rng = np.random.default_rng(seed)
    rank = num_in if rank is None else rank
    mixing = rng.standard_normal((rank, num_in)) * rng.uniform(0.1, 3, num_in)
    return (rng.standard_normal((num_rows, rank)) @ mixing).astype(np.float32)


def weights(num_in: int, num_out: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((num_in, num_out)).astype(np.float32) * 0.05


def error(inputs: Array, weight: Array, grid: Grid) -> float:
    """Squared error of the outputs over the inputs, in float64."""
    wrong = grid.weight().T.astype(np.float64) - weight
    return float(np.square(inputs.astype(np.float64) @ wrong).sum())


def hessian(inputs: Array) -> Array:
    return inputs.astype(np.float64).T @ inputs


def spread(values: Array, num_in: int) -> Array:
    """Returns values of blocks [out, blocks] by input, [in, out] float32."""
    return np.repeat(values.astype(np.float32), BLOCK, axis=1)[:, :num_in].T


def assert_nearest(grid: Grid, weight: Array, inputs: Array) -> None:
    """The levels of these inputs are the nearest of their blocks."""
    assert grid.minimums is not None
    scales, minimums = spread(grid.scales, len(weight)), spread(grid.minimums, len(weight))
    ratio = np.divide(weight - minimums, scales, out=np.zeros_like(weight), where=scales != 0)
    wanted = np.clip(np.rint(ratio), 0, MOST)[inputs]
    got = grid.levels.T[inputs]
    assert (np.abs(ratio[inputs] - got)[wanted != got] < 0.5001).all()  # the inverse of a scale is rounded


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("num_in", "num_out", "num_rows", "rank"), [(96, 33, 400, None), (192, 64, 100, 40)])
def test_the_error_is_below_that_of_rounding(seed, num_in, num_out, num_rows, rank):
    """Of correlated inputs, full rank and rank-deficient; rounded with and without minimums."""
    inputs, weight = correlated(num_rows, num_in, seed, rank), weights(num_in, num_out, seed + 100)
    found = error(inputs, weight, compensated_grid(weight, factor_of(hessian(inputs))))
    fine, plain = error(inputs, weight, rounded_grid(weight)), error(inputs, weight, grid_from_weight(weight, 4))
    assert found < 0.9 * fine < 0.9 * plain


def test_weights_beside_zero_get_minimums_and_those_around_it_on_few_levels_none():
    """Shifted weights need a minimum; those that are 15 levels around 0 are exact without one."""
    one_sided = weights(64, 40, 1) + 0.3
    found = rounded_grid(one_sided)
    assert found.minimums is not None and found.zero == 0
    plain = grid_from_weight(one_sided, 4).weight()
    assert np.square(found.weight().T - one_sided).sum() < 0.2 * np.square(plain.T - one_sided).sum()
    levels = np.random.default_rng(2).integers(-7, 8, (64, 40))
    levels[::BLOCK] = -8
    exact = rounded_grid((levels * 0.25).astype(np.float32))
    assert exact.minimums is None and exact.zero == MIDDLE
    np.testing.assert_array_equal(exact.weight().T, levels * 0.25)


def test_a_grid_of_scale_and_minimum_is_found_again():
    """As a file's: levels from 0 to 15 of which each block has both, with float16 scales and minimums."""
    rng = np.random.default_rng(3)
    levels = rng.integers(0, 16, (20, 96)).astype(np.uint8)
    levels[:, ::BLOCK], levels[:, 1::BLOCK] = 0, 15
    scales = (rng.uniform(0.01, 0.02, (20, 3))).astype(np.float16)
    minimums = (-rng.uniform(0.05, 0.2, (20, 3))).astype(np.float16)
    held = Grid(levels, scales, BLOCK, 4, minimums=minimums)
    found = rounded_grid(held.weight().T)
    np.testing.assert_allclose(found.weight(), held.weight(), atol=2e-4)
    assert (found.levels == levels).mean() > 0.999


def test_it_rounds_where_inputs_are_not_correlated():
    rng = np.random.default_rng(0)
    weight, diagonal = weights(128, 48, 1), rng.uniform(0.5, 20, 128)
    found = compensated_grid(weight, factor_of(np.diag(diagonal)))
    assert_nearest(found, weight, np.arange(128))


def test_inputs_that_are_always_zero_are_rounded_and_change_nothing_else():
    inputs, weight = correlated(300, 96, 3), weights(96, 20, 4)
    inputs[:, 32:64] = 0
    inputs[:, 70] = 0
    found = compensated_grid(weight, factor_of(hessian(inputs)))
    assert_nearest(found, weight, np.array([*range(32, 64), 70]))
    assert np.abs(found.weight().T - weight).max() < 0.05  # dead weights are not thrown away


def test_without_any_input_it_rounds():
    weight = weights(64, 8, 5)
    found, wanted = compensated_grid(weight, factor_of(np.zeros((64, 64)))), rounded_grid(weight)
    np.testing.assert_array_equal(found.weight(), wanted.weight())


@pytest.mark.parametrize("num_in", [1, 31, 40, 95])
def test_sizes_that_are_no_multiple_of_a_block(num_in):
    inputs, weight = correlated(200, num_in, num_in), weights(num_in, 7, num_in)
    found = compensated_grid(weight, factor_of(hessian(inputs)))
    assert found.levels.shape == weight.T.shape and found.scales.shape == (7, -(-num_in // BLOCK))
    assert error(inputs, weight, found) <= error(inputs, weight, grid_from_weight(weight, 4))


def test_one_row_of_inputs_is_reproduced_almost_exactly():
    """Later weights compensate all but the error of the last ones."""
    row, weight = correlated(1, 64, 8), weights(64, 30, 9)
    found = compensated_grid(weight, factor_of(hessian(row)))
    assert error(row, weight, found) < 0.05 * error(row, weight, grid_from_weight(weight, 4))


def test_levels_fit_four_bits_and_the_same_input_gives_the_same_bits():
    inputs, weight = correlated(500, 160, 10), weights(160, 600, 11)  # more outputs than are quantised at once
    first, second = (compensated_grid(weight, factor_of(hessian(inputs))) for _ in range(2))
    assert first.levels.max() <= MOST and first.bits == 4
    np.testing.assert_array_equal(first.levels, second.levels)
    np.testing.assert_array_equal(first.scales, second.scales)


def test_sums_of_float32_with_eigenvalues_below_zero_are_factorised():
    inputs = correlated(200, 64, 12, rank=2)
    broken = hessian(inputs) - 0.05 * np.trace(hessian(inputs)) / 64 * np.eye(64)
    assert np.linalg.eigvalsh(broken)[0] < 0
    factor = factor_of(broken)
    assert np.isfinite(factor.lower).all() and (factor.pivots > 0).all()


def test_zero_weights_have_scale_zero():
    found = compensated_grid(np.zeros((64, 3), np.float32), factor_of(hessian(correlated(90, 64, 13))))
    assert (found.weight() == 0).all() and (found.scales == 0).all()


def test_weights_beyond_float16_are_finite():
    assert np.isfinite(rounded_grid(np.linspace(-1e6, 1e6, 64, dtype=np.float32)[:, None]).weight()).all()


def test_the_factor_is_that_of_the_damped_hessian():
    full = hessian(correlated(300, 70, 14))
    factor = factor_of(full)
    assert sorted(factor.order) == list(range(70))
    assert [set(factor.order[i : i + BLOCK] // BLOCK) for i in (0,)] and (np.diag(factor.lower) == 1).all()
    rebuilt = factor.lower.T.astype(np.float64) * factor.pivots @ factor.lower
    damped = full + DAMPING * np.trace(full) / 70 * np.eye(70)
    np.testing.assert_allclose(rebuilt, damped[np.ix_(factor.order, factor.order)], rtol=1e-4, atol=1e-3 * full.max())
