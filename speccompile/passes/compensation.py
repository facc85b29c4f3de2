# SPDX-License-Identifier: Apache-2.0
"""Error-compensating quantisation of a linear's weights to 4 bits in blocks of 32 along its input.

A block has a scale and a minimum, or a scale alone where rounding to that is nearer. GPTQ, by a Cholesky factor of the
inverse Hessian: Frantar et al., "GPTQ", 2022, equations (2) and (3) and algorithm 1; the step is that of Frantar and
Alistarh, "Optimal Brain Compression", 2022.

The weights w of an output are quantised to q, one input after the other, so that the squared error over the calibration
text, (w - q)^T H (w - q) with H the sum of x x^T over its inputs x, is small. With H = U diag(d) U^T, U unit upper
triangular, the rows of U^-1 over the roots of d are the Cholesky factor of H^-1 that algorithm 1 uses, and its updates
are a back substitution: input k is quantised at

    t_k = w_k + sum over j < k of U_jk (w_j - q_j)

which adds d_k (t_k - q_k)^2 to the error. So no inverse is computed, and the sums over earlier blocks are one product
of matrices a block. Blocks are taken by falling sum of H's diagonal over their inputs, and so are the inputs of a
block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speccompile.ops.grid import Grid

BLOCK = 32  # inputs with one scale
BITS = 4
MOST = (1 << BITS) - 1
MIDDLE = 1 << (BITS - 1)  # level of 0 where there is no minimum
DAMPING = 0.01  # times the mean of H's diagonal, added to the diagonal
# Candidates of a block's range, times the one from its least to its largest weight, or, without a minimum, with which
# its largest magnitude is the lowest level: of either sign, as there is one level more on that side.
RATIOS = (1.06, 1.0, 0.94, 0.88, 0.82, 0.76, 0.7)
COLUMNS = 512  # outputs that are quantised at once: their blocks stay in a core's cache
_MOST_SCALE = np.float32(65504)  # of float16

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Factor:
    """A damped Hessian as U diag(d) U^T, its rows and columns in the order in which inputs are quantised."""

    order: NDArray[np.int64]  # [in] the inputs; those of a block are neighbours
    lower: Floats  # [in, in] float32, U^T, unit lower triangular
    pivots: Floats  # [in] float32, d: error of an output by an input's weight alone, once later inputs compensate it


def factor_of(hessian: NDArray[np.floating]) -> Factor:
    """Factorises H + DAMPING mean(diag(H)) I, which keeps a rank-deficient one positive definite.

    `hessian` is [in, in], symmetric, positive semi-definite. An input that is always 0 has no error of its own.
    """
    diagonal = np.diag(hessian).astype(np.float64)
    order = _order(diagonal)
    damping = DAMPING * float(diagonal.mean()) or 1.0
    damped = hessian[np.ix_(order, order)].astype(np.float64)
    entries = np.diag_indices_from(damped)
    damped[entries] += damping
    while (upper := _upper_factor(damped)) is None:  # sums of float32 may leave eigenvalues below zero
        damping *= 2
        damped[entries] += damping
    roots = np.diag(upper)
    return Factor(order, np.ascontiguousarray((upper / roots).T, np.float32), (roots**2).astype(np.float32))


def _order(diagonal: NDArray[np.float64]) -> NDArray[np.int64]:
    blocks = np.array_split(np.arange(len(diagonal)), range(BLOCK, len(diagonal), BLOCK))
    blocks.sort(key=lambda block: -diagonal[block].sum())
    return np.concatenate([block[np.argsort(-diagonal[block], kind="stable")] for block in blocks])


def _upper_factor(matrix: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Returns V with V V^T = matrix, upper triangular; None where it is not positive definite."""
    try:
        upper = np.asarray(np.linalg.cholesky(matrix[::-1, ::-1]), np.float64)[::-1, ::-1]
    except np.linalg.LinAlgError:
        return None
    return upper


def compensated_grid(weight: Floats, factor: Factor) -> Grid:
    """Quantises the weights [in, out] of a linear by the factor of the sum of x x^T; each output on its own."""
    has_minimums = _has_minimums(weight, factor)
    return _grid([_compensate(part, factor, has_minimums) for part in _parts(weight)], has_minimums)


def rounded_grid(weight: Floats) -> Grid:
    """Quantises the weights [in, out] of a linear without a text: every weight to the nearest level of its block."""
    num_in = len(weight)
    alike = Factor(np.arange(num_in), np.zeros((0, 0), np.float32), np.ones(num_in, np.float32))
    has_minimums = _has_minimums(weight, alike)
    return _grid([_round(part, alike, has_minimums) for part in _parts(weight)], has_minimums)


@dataclass(frozen=True)
class _Part:
    """Quantised weights of some outputs: levels [in, out], scales and minimums [blocks, out]."""

    levels: NDArray[np.uint8]
    scales: NDArray[np.float16]
    minimums: NDArray[np.float16]

    @classmethod
    def empty(cls, weight: Floats) -> _Part:
        num_in, num_out = weight.shape
        shape = (-(-num_in // BLOCK), num_out)
        return cls(np.empty((num_in, num_out), np.uint8), np.empty(shape, np.float16), np.empty(shape, np.float16))


def _parts(weight: Floats) -> Iterator[Floats]:
    for start in range(0, weight.shape[1], COLUMNS):
        yield np.ascontiguousarray(weight[:, start : start + COLUMNS], np.float32)


def _grid(parts: list[_Part], has_minimums: bool) -> Grid:
    levels = np.concatenate([part.levels.T for part in parts])
    scales = np.concatenate([part.scales.T for part in parts])
    if not has_minimums:
        return Grid(levels, scales, BLOCK, BITS, MIDDLE)
    return Grid(levels, scales, BLOCK, BITS, minimums=np.concatenate([part.minimums.T for part in parts]))


def _has_minimums(weight: Floats, factor: Factor) -> bool:
    part = np.ascontiguousarray(weight[:, :: -(-weight.shape[1] // COLUMNS)], np.float32)
    errors = []
    for has_minimums in (True, False):
        rounded = _grid([_round(part, factor, has_minimums)], has_minimums).weight().T
        errors.append(float((np.square(rounded - part)[factor.order].sum(axis=1) * factor.pivots).sum()))
    return errors[0] < errors[1]


def _blocks(order: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    first = 0
    while first < len(order):
        index = int(order[first]) // BLOCK
        end = first + min(BLOCK, len(order) - index * BLOCK)
        yield index, first, end
        first = end


def _round(weight: Floats, factor: Factor, has_minimums: bool) -> _Part:
    found = _Part.empty(weight)
    for index, first, end in _blocks(factor.order):
        inputs = factor.order[first:end]
        goals = weight[inputs]
        scale, minimum = best_range(goals, factor.pivots[first:end], has_minimums)
        found.scales[index], found.minimums[index] = scale, minimum
        found.levels[inputs] = _levels(goals, scale, minimum)
    return found


def _compensate(weight: Floats, factor: Factor, has_minimums: bool) -> _Part:
    found = _Part.empty(weight)
    weight, errors = weight[factor.order], np.empty_like(weight)
    for index, first, end in _blocks(factor.order):
        goals = weight[first:end] + factor.lower[first:end, :first] @ errors[:first]
        scale, minimum = best_range(goals, factor.pivots[first:end], has_minimums)
        found.scales[index], found.minimums[index] = scale, minimum
        for k in range(first, end):
            goal = goals[k - first] + factor.lower[k, first:k] @ errors[first:k]
            levels = _levels(goal, scale, minimum)
            found.levels[factor.order[k]] = levels
            errors[k] = weight[k] - (levels * scale + minimum)
    return found


def best_range(block: Floats, importance: Floats, has_minimums: bool) -> tuple[Floats, Floats]:
    """Returns for each output [out] the scale and the value of level 0 with the least squared error, in float16.

    Args:
        block: [inputs, out], at most 32 inputs.
        importance: [inputs], the weight of an input's squared error.
        has_minimums: level 0 has any value; else that of `-MIDDLE` scales, so that level `MIDDLE` is 0.
    """
    best_scale, best_minimum = np.zeros_like(block[0]), np.zeros_like(block[0])
    least = np.full_like(best_scale, np.inf)
    for scale, minimum in (_ranges if has_minimums else _symmetric)(block, importance):
        error = importance @ np.square(_levels(block, scale, minimum) * scale + minimum - block)
        is_better = error < least
        np.copyto(best_scale, scale, where=is_better)
        np.copyto(best_minimum, minimum, where=is_better)
        np.copyto(least, error, where=is_better)
    return best_scale, best_minimum


def _symmetric(block: Floats, importance: Floats) -> Iterator[tuple[Floats, Floats]]:
    del importance
    index = np.abs(block).argmax(axis=0)
    peak = np.take_along_axis(block, index[None], axis=0)[0] / np.float32(-MIDDLE)
    for ratio in (*RATIOS, *(-r for r in RATIOS)):
        scale = _float16(peak * np.float32(ratio))
        yield scale, scale * np.float32(-MIDDLE)


def _ranges(block: Floats, importance: Floats) -> Iterator[tuple[Floats, Floats]]:
    low, high = block.min(axis=0), block.max(axis=0)
    middle, total = (low + high) / 2, importance.sum()
    mean = importance @ block / total
    for ratio in RATIOS:
        scale = _float16((high - low) * np.float32(ratio / MOST))
        minimum = _float16(middle - scale * np.float32(MOST / 2))
        yield scale, minimum
        levels = _levels(block, scale, minimum)
        centre = importance @ levels / total
        rest = levels - centre
        spread = importance @ np.square(rest)
        fitted = np.divide(importance @ (rest * block), spread, out=np.zeros_like(spread), where=spread > 0)
        scale = _float16(fitted)
        yield scale, _float16(mean - scale * centre)


def _float16(values: Floats) -> Floats:
    return np.clip(values, -_MOST_SCALE, _MOST_SCALE).astype(np.float16).astype(np.float32)


def _levels(goals: Floats, scale: Floats, minimum: Floats) -> Floats:
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    levels = (goals - minimum) * inverse
    np.rint(levels, out=levels)
    return np.clip(levels, 0, MOST, out=levels)
