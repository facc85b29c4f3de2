# SPDX-License-Identifier: Apache-2.0
"""Deterministic drafts for sequences that sample: candidates in the order in which they finish the target's race.

The target emits the token with the least E / target_probs (`core.race`). A draft knows the same E, so the token with
the least E / draft_probs is the likeliest to be the one, then the second least, and so on. Any order is legal, as
drafts are kept by match: the text stays plain decoding's.
"""

from __future__ import annotations

import numpy as np

from speccompile.core.protocols import Batch, Outputs
from speccompile.core.race import race_times
from speccompile.core.specs import CANDIDATE_PROBS, CANDIDATES, NODE_PROBS
from speccompile.core.tree import Floats, Ints

# Exponent of the draft's probabilities beside 1 / temperature: more than 1 follows a target that is cut by top-p.
# Within 0.03 tokens a step of the best on the example pair, for chains and two siblings.
SHARPNESS = 1.25
NUM_RACERS = 512  # of a distribution: on the example pair as good as all 8192, and 16 are not
MIN_RACERS = 8  # candidates of a draft that race without its distributions
CLOSENESS = 1.5  # how sure the order is, by log times; estimates of each sequence correct it


def order_candidates(
    batch: Batch, depth: int, tokens: Ints, confidences: Floats, *, is_warped: bool = False
) -> tuple[Ints, Floats]:
    """Returns the candidates of sequences that sample in the order of their times; those of greedy ones are unchanged.

    Args:
        batch: the sequences.
        depth: of the candidates, 1 = children of the root.
        tokens: [batch, scored, candidates] int64, the target's tokens, the likeliest first (in any order if warped).
        confidences: of the same shape, float32: probabilities at temperature 1.
        is_warped: they are those of the request's temperature, top-k and top-p instead.

    Returns:
        Tokens and confidences of the same shapes. Confidences then estimate the probability that the candidate
        wins the target's race.
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
    order = np.argsort(times, axis=-1, kind="stable")
    times = np.take_along_axis(times, order, axis=-1)
    odds = np.exp(-CLOSENESS * (times - times[..., :1]))
    sure = (odds / odds.sum(axis=-1, keepdims=True)).astype(np.float32)
    return np.take_along_axis(tokens, order, axis=-1), np.where(is_hot, sure, confidences)


def raced_candidates(batch: Batch, depth: int, outputs: Outputs, d2t: Ints | None = None) -> tuple[Ints, Floats]:
    """Returns candidates and confidences of a draft's outputs, those of sequences that sample in the order of the race.

    Where the draft gives its distributions the race is among their likeliest tokens, otherwise among the candidates.

    Args:
        batch: the sequences.
        depth: of the candidates, 1 = children of the root.
        outputs: of the draft; with `node_probs` where the warps of the batch were fed.
        d2t: [draft_vocab] int64, the target's token for each draft token; None: the vocabularies are the same.
    """
    tokens, sure = np.asarray(outputs[CANDIDATES]), np.asarray(outputs[CANDIDATE_PROBS])
    probs = None if batch.is_greedy or NODE_PROBS not in outputs else np.asarray(outputs[NODE_PROBS])
    is_warped = probs is not None and probs.shape[-1] > tokens.shape[-1]
    if probs is not None and is_warped:
        num = min(max(NUM_RACERS, tokens.shape[-1]), probs.shape[-1])
        racers = np.argpartition(probs, -num, axis=-1)[..., -num:]
        rates = np.take_along_axis(probs, racers, axis=-1)
        is_cold = np.array([sequence.sampling.is_greedy for sequence in batch.sequences])
        racers[is_cold, :, : tokens.shape[-1]], rates[is_cold, :, : tokens.shape[-1]] = tokens[is_cold], sure[is_cold]
        tokens, sure = racers, rates
    return order_candidates(batch, depth, tokens if d2t is None else d2t[tokens], sure, is_warped=is_warped)
