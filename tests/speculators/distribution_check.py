# SPDX-License-Identifier: Apache-2.0
"""Whether text over mock engines follows the target's distribution exactly: a chi-square over three tokens."""

import functools
from collections import Counter
from typing import Any

import numpy as np

from speccompile.core.sampling import SamplingParams, warp
from speccompile.runtime.scheduler import decode
from speccompile.runtime.sequences import SequenceBatch, TokenSequence
from speccompile.runtime.verifier import Verifier
from tests.mock_lm import MockEngine, MockLM

PROMPT = (3, 1, 4)
NUM_TOKENS = 3
# Seeds are fixed; a correct proposer fails at this bound by chance once in ten thousand choices of them.
LEAST = 1e-4

Warp = tuple[float, int, float]  # temperature, top_k, top_p
WARPS: tuple[Warp, ...] = ((0.9, 4, 1.0), (0.5, 0, 0.9), (1.5, 3, 1.0), (1.0, 0, 0.6))


@functools.cache
def exact_dist(model: MockLM, heat: Warp, num_tokens: int = NUM_TOKENS) -> dict[tuple[int, ...], float]:
    """Returns the probability of every text of `num_tokens` after PROMPT."""
    dist: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        rows = {
            path: warp(model.logits(np.array([*PROMPT, *path]))[None], *([part] for part in heat))[0] for path in dist
        }
        dist = {
            (*path, int(token)): mass * float(rows[path][token])
            for path, mass in dist.items()
            for token in np.flatnonzero(rows[path])
        }
    return dist


def decode_many(
    target: MockEngine, proposer: Any, heat: Warp, num: int, max_seq_len: int, max_new_tokens: int = NUM_TOKENS + 1
) -> list[TokenSequence]:
    """Decodes PROMPT with `num` seeds; returns the finished sequences."""
    asked = [
        SamplingParams(max_new_tokens=max_new_tokens, temperature=heat[0], top_k=heat[1], top_p=heat[2], seed=s)
        for s in range(num)
    ]
    waiting = [TokenSequence(i, list(PROMPT), p, frozenset(), None) for i, p in enumerate(asked)]
    verifier = Verifier(target, max_seq_len)
    verifier.may_read_last = False  # so that the first of the few tokens comes with drafts, too
    for _ in decode(verifier, proposer, SequenceBatch(waiting, target.max_slots)):
        pass
    return waiting


def fit_p_value(sequences: list[TokenSequence], model: MockLM, heat: Warp, num_tokens: int = NUM_TOKENS) -> float:
    """Returns p of the chi-square test of the first `num_tokens` after PROMPT; 0 where one has no mass."""
    from scipy.stats import chisquare

    num, dist = len(sequences), exact_dist(model, heat, num_tokens)
    counts = Counter(tuple(sequence.tokens[len(PROMPT) : len(PROMPT) + num_tokens]) for sequence in sequences)
    if not set(counts) <= set(dist):
        return 0.0
    common = [path for path, mass in dist.items() if mass * num >= 8]
    rest = num * (1 - sum(dist[path] for path in common))
    got, wanted = [counts[path] for path in common], [num * dist[path] for path in common]
    if rest > 1e-3:
        got, wanted = [*got, num - sum(got)], [*wanted, rest]
    return float(chisquare(got, wanted, sum_check=False).pvalue)
