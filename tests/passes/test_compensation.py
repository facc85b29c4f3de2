# SPDX-License-Identifier: Apache-2.0
"""The error-compensating quantiser: never worse than rounding, and rounding where nothing can be compensated."""

import numpy as np
import pytest

from speccompile.passes.compensation import (
    BLOCK,
    DAMPING,
    LEAST,
    MOST,
    Blocks,
    best_scales,
    compensated_blocks,
    factor_of,
)
from speccompile.passes.quantize_blocks import levels_from_weight

Array = np.ndarray


def correlated(num_rows: int, num_in: int, seed: int, rank: int | None = None) -> Array:
    """Inputs [rows, in] float32 with different scales and correlations between them."""
    rng = np.random.default_rng(seed)
    rank = num_in if rank is None else rank
    mixing = rng.standard_normal((rank, num_in)) * rng.uniform(0.1, 3, num_in)
    return (rng.standard_normal((num_rows, rank)) @ mixing).astype(np.float32)


def weights(num_in: int, num_out: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((num_in, num_out)).astype(np.float32) * 0.05


def error(inputs: Array, weight: Array, blocks: Blocks) -> float:
    """Squared error of the outputs over the inputs, in float64."""
    wrong = blocks.weight().astype(np.float64) - weight
    return float(np.square(inputs.astype(np.float64) @ wrong).sum())


def hessian(inputs: Array) -> Array:
    return inputs.astype(np.float64).T @ inputs


def rounded(weight: Array, importance: Array) -> Blocks:
    """Each weight rounded to its nearest level, with scales of least error under the same importance."""
    scales = np.stack(
        [best_scales(weight[s : s + BLOCK], importance[s : s + BLOCK]) for s in range(0, len(weight), BLOCK)]
    )
    wide = np.repeat(scales.astype(np.float32), BLOCK, axis=0)[: len(weight)]
    ratio = np.divide(weight, wide, out=np.zeros_like(weight), where=wide != 0)
    return Blocks(np.clip(np.rint(ratio), LEAST, MOST).astype(np.int8), scales)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("num_in", "num_out", "num_rows", "rank"), [(96, 33, 400, None), (192, 64, 100, 40)])
def test_the_error_is_below_that_of_rounding(seed: int, num_in: int, num_out: int, num_rows: int, rank: int) -> None:
    """Of correlated inputs, full rank and rank-deficient, rounded as before and with scales of least error."""
    inputs, weight = correlated(num_rows, num_in, seed, rank), weights(num_in, num_out, seed + 100)
    found = error(inputs, weight, compensated_blocks(weight, factor_of(hessian(inputs))))
    plain = Blocks(*levels_from_weight(weight, 4))
    fine = rounded(weight, np.square(inputs).sum(axis=0))
    assert found < 0.9 * error(inputs, weight, fine)
    assert found < 0.9 * error(inputs, weight, plain)


def test_it_rounds_where_inputs_are_not_correlated() -> None:
    rng = np.random.default_rng(0)
    weight, diagonal = weights(128, 48, 1), rng.uniform(0.5, 20, 128)
    found = compensated_blocks(weight, factor_of(np.diag(diagonal)))
    order = np.concatenate([s + np.argsort(-diagonal[s : s + BLOCK]) for s in range(0, 128, BLOCK)])
    damped = (diagonal + DAMPING * diagonal.mean()).astype(np.float32)
    wanted = rounded(weight[order], damped[order])  # errors of a block are summed in the same order
    np.testing.assert_array_equal(found.scales, wanted.scales)
    np.testing.assert_array_equal(found.levels[order], wanted.levels)


def test_inputs_that_are_always_zero_are_rounded_and_change_nothing_else() -> None:
    inputs, weight = correlated(300, 96, 3), weights(96, 20, 4)
    inputs[:, 32:64] = 0
    inputs[:, 70] = 0
    found = compensated_blocks(weight, factor_of(hessian(inputs)))
    scale = np.repeat(found.scales.astype(np.float32), BLOCK, axis=0)
    for dead in (*range(32, 64), 70):
        wanted = np.clip(np.rint(weight[dead] / scale[dead]), LEAST, MOST)
        np.testing.assert_array_equal(found.levels[dead], wanted)
    assert np.abs(found.weight() - weight).max() < 0.05  # dead weights are not thrown away


def test_without_any_input_it_rounds() -> None:
    weight = weights(64, 8, 5)
    found = compensated_blocks(weight, factor_of(np.zeros((64, 64))))
    wanted = rounded(weight, np.ones(64, np.float32))
    np.testing.assert_array_equal(found.levels, wanted.levels)
    np.testing.assert_array_equal(found.scales, wanted.scales)


@pytest.mark.parametrize("num_in", [1, 31, 40, 95])
def test_sizes_that_are_no_multiple_of_a_block(num_in: int) -> None:
    inputs, weight = correlated(200, num_in, num_in), weights(num_in, 7, num_in)
    found = compensated_blocks(weight, factor_of(hessian(inputs)))
    assert found.levels.shape == weight.shape and found.scales.shape == (-(-num_in // BLOCK), 7)
    plain = Blocks(*levels_from_weight(weight, 4))
    assert error(inputs, weight, found) <= error(inputs, weight, plain)


def test_one_row_of_inputs_is_reproduced_almost_exactly() -> None:
    """Later weights compensate all but the error of the last ones."""
    row, weight = correlated(1, 64, 8), weights(64, 30, 9)
    found = compensated_blocks(weight, factor_of(hessian(row)))
    assert error(row, weight, found) < 0.05 * error(row, weight, Blocks(*levels_from_weight(weight, 4)))


def test_levels_fit_four_bits_and_the_same_input_gives_the_same_bits() -> None:
    inputs, weight = correlated(500, 160, 10), weights(160, 600, 11)  # more outputs than are quantised at once
    first, second = (compensated_blocks(weight, factor_of(hessian(inputs))) for _ in range(2))
    assert first.levels.min() >= LEAST and first.levels.max() <= MOST
    np.testing.assert_array_equal(first.levels, second.levels)
    np.testing.assert_array_equal(first.scales, second.scales)


def test_sums_of_float32_with_eigenvalues_below_zero_are_factorised() -> None:
    inputs = correlated(200, 64, 12, rank=2)
    broken = hessian(inputs) - 0.05 * np.trace(hessian(inputs)) / 64 * np.eye(64)
    assert np.linalg.eigvalsh(broken)[0] < 0
    factor = factor_of(broken)
    assert np.isfinite(factor.lower).all() and (factor.pivots > 0).all()


def test_zero_weights_have_scale_zero() -> None:
    found = compensated_blocks(np.zeros((64, 3), np.float32), factor_of(hessian(correlated(90, 64, 13))))
    assert (found.levels == 0).all() and (found.scales == 0).all()


def test_the_factor_is_that_of_the_damped_hessian() -> None:
    full = hessian(correlated(300, 70, 14))
    factor = factor_of(full)
    assert sorted(factor.order) == list(range(70))
    assert [set(factor.order[i : i + BLOCK] // BLOCK) for i in (0,)] and (np.diag(factor.lower) == 1).all()
    rebuilt = factor.lower.T.astype(np.float64) * factor.pivots @ factor.lower
    damped = full + DAMPING * np.trace(full) / 70 * np.eye(70)
    np.testing.assert_allclose(rebuilt, damped[np.ix_(factor.order, factor.order)], rtol=1e-4, atol=1e-3 * full.max())


def test_means_of_zero_change_nothing() -> None:
    inputs, weight = correlated(300, 96, 20), weights(96, 20, 21)
    factor = factor_of(hessian(inputs))
    plain, same = compensated_blocks(weight, factor), compensated_blocks(weight, factor, np.zeros_like(weight))
    np.testing.assert_array_equal(plain.levels, same.levels)


def test_an_output_with_a_mean_is_quantised_for_its_own_hessian() -> None:
    """As if its whole Hessian were factorised, up to the order of inputs, which that of the means decides too."""
    inputs = correlated(400, 64, 22)
    weight, means = weights(64, 40, 23), np.random.default_rng(24).standard_normal((64, 40)).astype(np.float32) * 30
    factor = factor_of(hessian(inputs))
    found, plain = compensated_blocks(weight, factor, means), compensated_blocks(weight, factor)

    def own_errors(blocks: Blocks) -> Array:
        wrong = blocks.weight().astype(np.float64) - weight
        return np.einsum("kn,kn->n", wrong, hessian(inputs) @ wrong) + np.square((means * wrong).sum(axis=0))

    direct = [
        compensated_blocks(weight[:, [n]], factor_of(hessian(inputs) + np.outer(means[:, n], means[:, n])))
        for n in range(40)
    ]
    levels, scales = (np.concatenate([getattr(row, name) for row in direct], axis=1) for name in ("levels", "scales"))
    assert own_errors(found).sum() < 0.9 * own_errors(plain).sum()
    assert own_errors(found).sum() < 1.1 * own_errors(Blocks(levels, scales)).sum()
