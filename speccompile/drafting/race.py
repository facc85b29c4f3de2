# SPDX-License-Identifier: Apache-2.0
"""Deterministic drafts for sequences that sample: candidates in the order in which they finish the target's race.

The target emits the token with the least E / target_probs (`core.race`). The draft knows E, so its token with the least
E / draft_probs is the most likely one. Any order is legal, as drafts are kept by match.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from speccompile.core.protocols import Batch, Outputs
from speccompile.core.sampling import race_times
from speccompile.core.specs import CANDIDATE_PROBS, CANDIDATES, NODE_PROBS
from speccompile.core.tree import Floats, Ints

# Exponent of the draft's probabilities beside 1 / temperature. At temperature 1 the best on the example pair is 1.1 to
# 1.2, at 0.7 it is 1.4, and 1.15 is within 2 % of both (`bench/acceptance_rules.py`).
SHARPNESS = 1.15
# Of a distribution, at most. At temperature 1 the 512 likeliest of 8192 lose 4 % of the tokens of a step, 64 lose 9 %.
NUM_RACERS = 4096
MIN_RACERS = 8  # candidates of a draft that race without its distributions
CLOSENESS = 1.5  # how sure the order is, by log times; estimates of each sequence correct it


def order_candidates(
    batch: Batch, depth: int, tokens: Ints, confidences: Floats, *, is_warped: bool = False, num: int | None = None
) -> tuple[Ints, Floats]:
    """Returns the candidates of sequences that sample in the order of their times; those of greedy ones are unchanged.

    Args:
        depth: of the candidates, 1 = children of the root.
        tokens: [batch, scored, candidates] int64, the target's tokens, the most probable first (any order if warped).
        confidences: of the same shape, float32: probabilities at temperature 1.
        is_warped: they are those of the request's temperature, top-k and top-p instead.
        num: how many of them are returned, the first; None: all.

    Returns:
        Tokens and confidences, [batch, scored, num]: probabilities that a candidate wins the target's race.
    """
    if batch.is_greedy or tokens.shape[-1] == 1:
        return tokens, confidences
    params = [sequence.sampling for sequence in batch.sequences]
    is_hot = np.array([not p.is_greedy for p in params])[:, None, None]
    heat = np.array([1.0 if p.is_greedy or is_warped else p.temperature for p in params])[:, None, None]
    logs = np.log(np.maximum(np.nan_to_num(confidences), 1e-30).astype(np.float64))
    times = np.log(race_times(batch.race_draws(depth)[:, None], tokens)) - SHARPNESS / heat * logs
    ranks = np.arange(tokens.shape[-1])
    if not is_warped:
        top_k = np.array([p.top_k or len(ranks) for p in params])[:, None, None]
        top_p = np.array([p.top_p for p in params])[:, None, None]
        shares = np.where(ranks < top_k, np.exp((logs - logs[..., :1]) / heat), 0)
        before = (np.cumsum(shares, axis=-1) - shares) / shares.sum(axis=-1, keepdims=True)
        times = np.where((ranks < top_k) & ((before < top_p) | (ranks == 0)), times, times + 1e3)
    times = np.where(is_hot, times, ranks)
    odds = np.exp(-CLOSENESS * (times - times.min(axis=-1, keepdims=True)))
    odds /= odds.sum(axis=-1, keepdims=True)
    order = _least(times, num)
    tokens, odds, confidences = (np.take_along_axis(part, order, axis=-1) for part in (tokens, odds, confidences))
    return tokens, np.where(is_hot, odds, confidences).astype(np.float32)


def _least(times: NDArray[np.float64], num: int | None) -> Ints:
    if num is None or num >= times.shape[-1]:
        return np.argsort(times, axis=-1, kind="stable")
    # Sorting all of a long row takes longer than everything else here.
    least = np.sort(np.argpartition(times, num - 1, axis=-1)[..., :num], axis=-1)
    return np.take_along_axis(least, np.argsort(np.take_along_axis(times, least, axis=-1), axis=-1, kind="stable"), -1)


def raced_candidates(batch: Batch, depth: int, outputs: Outputs, d2t: Ints | None = None) -> tuple[Ints, Floats]:
    """Returns candidates and confidences of a draft's outputs, those of sequences that sample in the order of the race.

    The race is among the most probable tokens of the draft's distributions, else among the candidates.

    Args:
        depth: of the candidates, 1 = children of the root.
        outputs: of the draft; with `node_probs` where the warps of the batch were fed.
        d2t: [draft_vocab] int64, the target's token for each draft token; None: the vocabularies are the same.
    """
    tokens, sure = np.asarray(outputs[CANDIDATES]), np.asarray(outputs[CANDIDATE_PROBS])
    num = tokens.shape[-1]
    probs = None if batch.is_greedy or NODE_PROBS not in outputs else np.asarray(outputs[NODE_PROBS])
    is_warped = probs is not None and probs.shape[-1] > tokens.shape[-1]
    if probs is not None and is_warped:
        most = max(num, min(NUM_RACERS, int(np.count_nonzero(probs, axis=-1).max())))
        racers = np.argpartition(probs, -most, axis=-1)[..., -most:]
        rates = np.take_along_axis(probs, racers, axis=-1)
        is_cold = np.array([sequence.sampling.is_greedy for sequence in batch.sequences])
        racers[is_cold, :, :num], rates[is_cold, :, :num] = tokens[is_cold], sure[is_cold]
        tokens, sure = racers, rates
    return order_candidates(batch, depth, tokens if d2t is None else d2t[tokens], sure, is_warped=is_warped, num=num)
