# SPDX-License-Identifier: Apache-2.0
"""Error-compensating quantisation of a linear's weights to 4 bits in blocks of 32 along its input.

GPTQ, by a Cholesky factor of the inverse Hessian: Frantar, Ashkboos, Hoefler and Alistarh, "GPTQ: Accurate
Post-Training Quantization for Generative Pre-trained Transformers", 2022, equations (2) and (3) and algorithm 1; the
step is that of Optimal Brain Surgeon, as in Frantar and Alistarh, "Optimal Brain Compression", 2022.

The weights w of an output are quantised to q, one input after the other, so that the squared error of the output over
the calibration text, (w - q)^T H (w - q) with H the sum of x x^T over its inputs x, is small: the error of an input is
compensated by those that are not quantised yet. With H = U diag(d) U^T, U unit upper triangular, the rows of U^-1 over
the roots of d are the Cholesky factor of H^-1 that algorithm 1 uses, and its updates are a back substitution: input k
is quantised at

    t_k = w_k + sum over j < k of U_jk (w_j - q_j)

which adds d_k (t_k - q_k)^2 to the error. So no inverse is computed, and the sums over earlier blocks are one product
of matrices for each block. Blocks are taken in the order of their importance, the sum of H's diagonal over their
inputs, and so are the inputs of a block: what matters most is rounded while most can still compensate it.

For an LM head an error of a token's logit matters where the token is likely, so that each output has a Hessian of its
own, with inputs weighed by the token's probability. It is taken as C + m m^T: m the mean input under these weights, C
the scatter around the means, the same for all outputs. The factor of such a sum follows from that of C: method C1 of
Gill, Golub, Murray and Saunders, "Methods for modifying matrix factorizations", 1974.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speccompile.ops.grid import Grid

BLOCK = 32  # inputs with one scale
LEAST, MOST = -8, 7  # levels of 4 bits
DAMPING = 0.01  # times the mean of H's diagonal, added to the diagonal
# Candidates of a scale, times the one with which the block's largest magnitude is level -8; of either sign, as there is
# one level more on the negative side.
RATIOS = (1.06, 1.0, 0.94, 0.88, 0.82, 0.76, 0.7)
COLUMNS = 512  # outputs that are quantised at once: their blocks stay in a core's cache
_MAX_SCALE = np.float32(65504)  # of float16

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Blocks:
    """Quantised weights [in, out] of a linear.

    Args:
        levels: [in, out] int8, -8 to 7.
        scales: [in / 32 rounded up, out] float16; may be negative.
    """

    levels: NDArray[np.int8]
    scales: NDArray[np.float16]

    def weight(self) -> Floats:
        """Returns the weights that the levels stand for, [in, out] float32."""
        scales = np.repeat(self.scales.astype(np.float32), BLOCK, axis=0)[: len(self.levels)]
        return self.levels * scales

    def grid(self) -> Grid:
        """Returns them as a grid, [out, in]."""
        levels = (self.levels.T - np.int8(LEAST)).view(np.uint8)
        return Grid(levels, self.scales.T, BLOCK, bits=4, zero=-LEAST)


@dataclass(frozen=True)
class Factor:
    """A damped Hessian as U diag(d) U^T, its rows and columns in the order in which inputs are quantised.

    Args:
        order: [in] the inputs; those of a block are neighbours.
        lower: [in, in] float32, U^T, unit lower triangular.
        pivots: [in] float32, d: error of an output by an input's weight alone, once later inputs compensate it.
    """

    order: NDArray[np.int64]
    lower: Floats
    pivots: Floats


def factor_of(hessian: NDArray[np.floating]) -> Factor:
    """Factorises H + DAMPING mean(diag(H)) I, which keeps a rank-deficient one positive definite.

    An input that is always 0 has no error of its own: its weights are rounded and compensate nothing.

    Args:
        hessian: [in, in] float32 or float64, symmetric, positive semi-definite.
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


def compensated_blocks(weight: Floats, factor: Factor, means: Floats | None = None) -> Blocks:
    """Quantises the weights of a linear; each output on its own.

    Args:
        weight: [in, out].
        factor: of the sum of x x^T over the linear's inputs.
        means: [in, out] m, where the Hessian of an output is the factor's plus m m^T; None: 0.
    """
    num_in, num_out = weight.shape
    levels = np.empty((num_in, num_out), np.int8)
    scales = np.empty((-(-num_in // BLOCK), num_out), np.float16)
    inverse = None if means is None else np.linalg.inv(factor.lower.T)
    for start in range(0, num_out, COLUMNS):
        columns = slice(start, start + COLUMNS)
        part = np.ascontiguousarray(weight[:, columns], np.float32)
        own = None
        if means is not None and inverse is not None:
            own = Means.of(np.asarray(inverse @ means[factor.order, columns], np.float32), factor.pivots)
        levels[:, columns], scales[:, columns] = _compensate(part, factor, own)
    return Blocks(levels, scales)


@dataclass
class Means:
    """What the means of some outputs add to the goals of their weights.

    Args:
        solved: [in, out] U^-1 m.
        gains: [in, out] by which the projected error so far shifts a goal.
        projected: [out] m^T times the errors of the inputs so far.
    """

    solved: Floats
    gains: Floats
    projected: Floats

    @classmethod
    def of(cls, solved: Floats, pivots: Floats) -> Means:
        """Returns them before the first input, for U^-1 m [in, out] and d [in]."""
        gains, rest = np.empty_like(solved), np.ones(solved.shape[1], np.float32)
        for k in reversed(range(len(solved))):
            pivot = pivots[k] + rest * solved[k] ** 2
            gains[k] = rest * solved[k] / pivot
            rest = rest * pivots[k] / pivot
        return cls(solved, gains, np.zeros_like(rest))


def _compensate(weight: Floats, factor: Factor, means: Means | None) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    num_in, num_out = weight.shape
    levels = np.empty((num_in, num_out), np.int8)
    scales = np.empty((-(-num_in // BLOCK), num_out), np.float16)
    weight, errors, first = weight[factor.order], np.empty_like(weight), 0
    while first < num_in:
        index = int(factor.order[first]) // BLOCK
        end = first + min(BLOCK, num_in - index * BLOCK)
        kept = weight[first:end] + factor.lower[first:end, :first] @ errors[:first]
        goals = kept if means is None else kept + means.gains[first:end] * means.projected
        scales[index] = best_scales(goals, factor.pivots[first:end])
        scale = scales[index].astype(np.float32)
        inverse = _inverse(scale)
        for k in range(first, end):
            goal = own = kept[k - first] + factor.lower[k, first:k] @ errors[first:k]
            if means is not None:
                goal = own + means.gains[k] * means.projected
            level = np.rint(goal * inverse)
            np.clip(level, LEAST, MOST, out=level)
            levels[factor.order[k]] = level
            errors[k] = weight[k] - level * scale
            if means is not None:  # this input's row of U^T, times the errors
                means.projected += means.solved[k] * (errors[k] + own - weight[k])
        first = end
    return levels, scales


def best_scales(block: Floats, importance: Floats) -> NDArray[np.float16]:
    """Returns for each output the scale, of a small grid, with which rounding has the least squared error.

    Args:
        block: [inputs, out], at most 32 inputs.
        importance: [inputs], the weight of an input's squared error.

    Returns:
        [out] float16, rounded before the errors are computed; 0 where all weights are.
    """
    index = np.abs(block).argmax(axis=0)
    peak = np.take_along_axis(block, index[None], axis=0)[0] / np.float32(LEAST)
    best = np.zeros_like(peak)
    least = np.full_like(peak, np.inf)
    for ratio in (*RATIOS, *(-r for r in RATIOS)):
        scale = np.clip(peak * np.float32(ratio), -_MAX_SCALE, _MAX_SCALE).astype(np.float16).astype(np.float32)
        level = block * _inverse(scale)
        np.rint(level, out=level)
        np.clip(level, LEAST, MOST, out=level)
        level *= scale
        level -= block
        error = importance @ np.square(level, out=level)
        is_better = error < least
        np.copyto(best, scale, where=is_better)
        np.copyto(least, error, where=is_better)
    rounded: NDArray[np.float16] = best.astype(np.float16)
    return rounded


def _inverse(scale: Floats) -> Floats:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
