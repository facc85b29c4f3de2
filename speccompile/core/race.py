# SPDX-License-Identifier: Apache-2.0
"""Draws by an exponential race: the token v with the least E_v / probs(v), where E depends on seed, position and token.

E is exponential, so each token wins with its probability. A draft that races with the same E over its own distribution
picks the same token with probability of at least (1 - d) / (1 + d), where d is the total variation between the two
(Daliri et al. 2024, arXiv 2408.07978), and the text depends on seed and position alone.

E comes from integers below the prime 2**31 - 1, so that graphs without bit operations compute the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speccompile.core.tree import Floats, Ints

SAMPLER_VERSION = 2  # of the texts that seeds give; 1 drew by the inverse distribution function
PRIME = 2**31 - 1
NUM_SQUARES = 4
KEY_SCALE, KEY_STEP = 2.0**24, 128  # a key has 24 bits; 128 times that, plus 1, is below the prime


def race_times(draws: Floats, tokens: ArrayLike) -> NDArray[np.float64]:
    """Returns the exponential variates of tokens.

    Args:
        draws: [..., 2] float32 in [0, 1), multiples of 2**-24 (`sampling.race_draws`).
        tokens: [..., num] int64, not negative; broadcasts against the leading dims.

    Returns:
        [..., num] float64, above 0. The least is 2.3e-10: small times decide, so these are the finest.
    """
    keys = (draws * np.float32(KEY_SCALE)).astype(np.uint64) * np.uint64(KEY_STEP) + np.uint64(1)
    first, second = keys[..., :1], keys[..., 1:]
    state = first * (np.asarray(tokens).astype(np.uint64) + np.uint64(1)) + second  # in place: rows are long
    state %= np.uint64(PRIME)
    for number in range(NUM_SQUARES):
        state *= state
        state += second if number % 2 else first
        state %= np.uint64(PRIME)
    times: NDArray[np.float64] = (state + 0.5) / -(PRIME + 1)
    np.log1p(times, out=times)
    return -times


def race(probs: Floats, draws: Floats) -> Ints:
    """Returns the winners, of equal ones the first.

    Args:
        probs: [..., vocab] float32, need not be normalised, but no row may be all zero.
        draws: [..., 2] float32 (`sampling.race_draws`).

    Returns:
        [...] int64.
    """
    if ((probs > 0).sum(axis=-1) <= 1).all():  # greedy rows: whatever its time, the only token that may win does
        return np.asarray(probs.argmax(axis=-1), dtype=np.int64)
    rates = probs / race_times(draws, np.arange(probs.shape[-1]))
    return np.asarray(rates.argmax(axis=-1), dtype=np.int64)
