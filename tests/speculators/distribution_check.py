# SPDX-License-Identifier: Apache-2.0
"""Whether text over mock engines follows the target's distribution exactly.

A chi-square over three tokens after one prompt; or, for batches that mix requests, one over all tokens, each by the
number in [0, 1) that an inverse CDF would draw it from: uniform and independent, whatever came before.
"""

import functools
import itertools
import random
from collections import Counter
from typing import Any

import numpy as np

from speccompile.core.sampling import SamplingParams, warp
from speccompile.runtime.scheduler import Scheduler, decode
from speccompile.runtime.sequences import RequestHandle, SequenceBatch, TokenSequence
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


def decode_mixed(target: MockEngine, proposer: Any, num: int, max_seq_len: int) -> list[TokenSequence]:
    """Decodes random prompts with each of `WARPS` or greedy; they join as others end, and some are cancelled."""
    rng, handles, waiting = random.Random(0), list[RequestHandle](), list[TokenSequence]()
    batch = SequenceBatch((), target.max_slots, not proposer.may_draw)
    scheduler = Scheduler(Verifier(target, max_seq_len, chunk=5), proposer, batch)
    for number in range(num):
        heat, top_k, top_p = (*WARPS, (0.0, 0, 1.0))[number % 5]
        asked = SamplingParams(rng.randint(1, 20), heat, top_k, top_p, seed=number)
        prompt = [rng.randrange(target.model.vocab) for _ in range(rng.randint(1, 9))]
        waiting.append(TokenSequence(number, prompt, asked, frozenset(), None))
        handles.append(RequestHandle(number, 0.0))
        handles[-1].add(waiting[-1])
        scheduler.add(handles[-1])
    while scheduler.has_work:
        scheduler.step()
        if rng.random() < 0.3:
            scheduler.cancel(rng.choice(handles))
    return waiting


def mixed_p_value(sequences: list[TokenSequence], model: MockLM, draft: MockLM) -> float:
    """Returns p of the numbers of all sampled tokens and of pairs of them; 0 where a token has no mass.

    Tokens are in the order of target / draft, by which a wrong acceptance moves mass.
    """
    from scipy.stats import chisquare, norm

    rng, rows = np.random.default_rng(0), list[list[float]]()
    for sequence in sequences:
        numbers, asked = list[float](), sequence.sampling
        for at in range(sequence.num_prompt, len(sequence.tokens)):
            context, token = np.array(sequence.tokens[:at]), sequence.tokens[at]
            logits = model.logits(context)
            probs = warp(logits[None], [asked.temperature], [asked.top_k], [asked.top_p])[0].astype(np.float64)
            if not probs[token]:
                return 0.0
            ratios = logits - draft.logits(context)
            numbers.append(probs[ratios < ratios[token]].sum() + rng.random() * probs[token])
        rows.append([] if asked.is_greedy else numbers)
    every = np.concatenate(rows)
    moments = [(every**k).mean() - 1 / (k + 1) for k in (1, 2)]
    errors = [np.sqrt((1 / (2 * k + 1) - 1 / (k + 1) ** 2) / len(every)) for k in (1, 2)]
    pairs = np.array([pair for row in rows for pair in itertools.pairwise(row)])
    cells = np.bincount((np.minimum(pairs * 6, 5).astype(int) @ [6, 1]), minlength=36)
    found = [*(2 * norm.sf(abs(m / e)) for m, e in zip(moments, errors, strict=True)), chisquare(cells).pvalue]
    return float(len(found) * min(found))
