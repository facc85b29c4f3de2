# SPDX-License-Identifier: Apache-2.0
"""From logits to probs, and from probs to tokens: warping, counter-based uniforms, inverse-CDF draws, races.

A race draws the token v with the least E_v / probs(v), where E is exponential and depends on seed, position and token.
A draft that races with the same E over its own distribution picks the same token with probability of at least (1 - d) /
(1 + d), with d the total variation between the two (Daliri et al. 2024, arXiv 2408.07978). E comes from integers below
the prime 2**31 - 1, so that graphs without bit operations compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speccompile.core.sampling_params import COLDEST, SamplingParams
from speccompile.core.tree import Floats, Ints, TokenTree

Words = NDArray[np.uint64]

TARGET_LANE = 1  # recovered, bonus or plain draw from the target's distribution
RACE_LANE = 3  # both words of a race
# Accept draws of a depth, and draws of drafts: these + depth. A block is decided by the draws of all its drafts, also
# those that are refused, so the next step must not see them again at its positions.
ACCEPT_LANE = 1 << 21
DRAFT_LANE = 1 << 22
DRAFT_LANE_STEP = 1 << 11  # between the drafts of one depth: above any depth

_LEAST_TOP_P = 1e-30  # the likeliest token alone; a smaller one could be 0 in float32

# Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_NUM_ROUNDS = 10
# Added to the keys, [rounds, 2, 1].
_KEY_STEPS = np.arange(_NUM_ROUNDS, dtype=np.uint64)[:, None, None] * np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def warp_inputs(params: Sequence[SamplingParams]) -> tuple[Floats, Ints, Floats]:
    """Returns (temperature [batch] float32, top_k [batch] int64, top_p [batch] float32) of a batch of requests."""
    return (
        np.array([p.temperature for p in params], dtype=np.float32),
        np.array([p.top_k for p in params], dtype=np.int64),
        np.array([max(p.top_p, _LEAST_TOP_P) for p in params], dtype=np.float32),
    )


def warp(logits: Floats, temperature: ArrayLike, top_k: ArrayLike, top_p: ArrayLike) -> Floats:
    """Returns [batch, ..., vocab] float32 probs: temperature, top-k, top-p, in transformers' order.

    Args:
        logits: [batch, ..., vocab] float32.
        temperature: [batch]; below `COLDEST` it gives a one-hot row at the first maximum, whatever top_k and top_p are.
        top_k: [batch] int64, 0 = off. Ties with the k-th logit are all kept.
        top_p: [batch], 1 = off. Keeps the shortest run of tokens, by falling probability and rising index, whose mass
            reaches top_p; at least one.
    """
    column = (-1,) + (1,) * (logits.ndim - 1)
    heat = np.asarray(temperature, dtype=np.float32).reshape(column)
    keep_num = np.asarray(top_k, dtype=np.int64).reshape(column)
    mass = np.maximum(np.asarray(top_p, dtype=np.float32), np.float32(_LEAST_TOP_P)).reshape(column)
    vocab = logits.shape[-1]
    # Scaled in float32, so that a tie made by rounding is a tie for every backend.
    is_hot = heat >= np.float32(COLDEST)
    one_hot: Floats = (np.arange(vocab) == logits.argmax(axis=-1)[..., None]).astype(np.float32)
    if not is_hot.any():
        return one_hot
    scaled = (logits / np.where(is_hot, heat, np.float32(1))).astype(np.float64)
    if np.any(keep_num > 0):
        falling = -np.sort(-scaled, axis=-1)
        last = np.broadcast_to(np.clip(keep_num, 1, vocab) - 1, (*scaled.shape[:-1], 1))
        scaled = np.where((keep_num > 0) & (scaled < np.take_along_axis(falling, last, axis=-1)), -np.inf, scaled)
    probs = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    if np.any(mass < 1):
        order = np.argsort(-probs, axis=-1, kind="stable")
        falling = np.take_along_axis(probs, order, axis=-1)
        before = np.cumsum(falling, axis=-1) - falling
        falling = np.where((mass < 1) & (before >= mass), 0.0, falling)
        np.put_along_axis(probs, order, falling, axis=-1)
        probs /= probs.sum(axis=-1, keepdims=True)
    warped: Floats = np.where(is_hot, probs, one_hot).astype(np.float32)
    return warped


def draw(probs: Floats, uniforms: ArrayLike) -> Ints:
    """Returns [...] int64 inverse-CDF draws: the first index whose cumulative mass exceeds uniform * total mass.

    `probs` [..., vocab] need not be normalised, but no row may be all zero; `uniforms` [...] are in [0, 1).
    """
    mass = np.cumsum(probs, axis=-1, dtype=np.float64)
    bound = np.asarray(uniforms, dtype=np.float64)[..., None] * mass[..., -1:]
    drawn: Ints = (mass <= bound).sum(axis=-1, dtype=np.int64)
    return drawn


def philox(counters: Words, keys: Words) -> Words:
    """Returns Philox4x32-10 blocks [4, ...] of counters [4, ...] and keys [2, ...]; all uint64 words below 2**32."""
    words = counters.reshape(4, -1).astype(np.uint32)
    even, odd = words[0::2], words[1::2]
    for key in (keys.reshape(2, -1) + _KEY_STEPS).astype(np.uint32):
        product = (even * _MULTIPLIERS).view("<u4")  # the two words of each, the low one first
        even, odd = product[::-1, 1::2] ^ odd ^ key, product[::-1, 0::2]
    return np.stack((even[0], odd[0], even[1], odd[1])).astype(np.uint64).reshape(counters.shape)


def uniforms(seeds: ArrayLike, positions: ArrayLike, lane: ArrayLike) -> Floats:
    """Returns [batch, nodes] float32 multiples of 2**-24 in [0, 1) that depend on seed, position and lane alone.

    Args:
        seeds: [batch] uint64.
        positions: [batch, nodes] int64, index in the sequence (prompt included) of the token the draw decides.
        lane: what the draw is for, below 2**32; broadcasts against positions.
    """
    drawn: Floats = uniform_words(seeds, positions, lane)[0]
    return drawn


def race_draws(seeds: ArrayLike, positions: ArrayLike) -> Floats:
    """Returns the draws of a race (`core.race`), [batch, nodes, 2] float32; arguments as of `uniforms`."""
    words = uniform_words(seeds, positions, RACE_LANE)
    return np.stack((words[0], words[1]), axis=-1)


def uniform_words(seeds: ArrayLike, positions: ArrayLike, lane: ArrayLike) -> Floats:
    """Returns all words of the draws, [4, batch, nodes] float32; arguments as of `uniforms`, which gives the first."""
    at = np.asarray(positions, dtype=np.int64).astype(np.uint64)
    seed = np.asarray(seeds, dtype=np.uint64)[:, None]
    counters, keys = np.zeros((4, *at.shape), np.uint64), np.empty((2, *at.shape), np.uint64)
    counters[0], counters[1], counters[2] = at & _LOW, at >> _HALF, np.asarray(lane, dtype=np.uint64)
    keys[0], keys[1] = seed & _LOW, seed >> _HALF
    words = philox(counters, keys)
    drawn: Floats = (words >> np.uint64(8)).astype(np.float32) * np.float32(2**-24)
    return drawn


def tree_uniforms(seeds: ArrayLike, root_positions: ArrayLike, tree: TokenTree) -> Floats:
    """Returns [batch, nodes, 2] float32 draws that acceptance reads for a tree, of `seeds` [batch] uint64.

    In slots whose drafts are drawn: accept draw of the node, draw made at it; in others those of the race at the node.
    Nodes of one depth share their draws: at most one of them is on the path.

    Args:
        root_positions: [batch] int64, index in the sequence of the root token.
    """
    depths = tree.depths()
    positions = np.asarray(root_positions, dtype=np.int64)[:, None] + depths
    raced = race_draws(seeds, positions + 1)
    if tree.draft_probs is None:
        return raced
    drawn = (uniforms(seeds, positions, ACCEPT_LANE + depths), uniforms(seeds, positions + 1, TARGET_LANE))
    return np.where((tree.num_nodes > 1)[:, None, None], np.stack(drawn, axis=-1), raced)


SAMPLER_VERSION = 3  # of the texts that seeds give; 2 verified drawn trees node by node
PRIME = 2**31 - 1
NUM_SQUARES = 4
KEY_SCALE, KEY_STEP = 2.0**24, 128  # a key has 24 bits; 128 times that, plus 1, is below the prime


def race_times(draws: Floats, tokens: ArrayLike) -> NDArray[np.float64]:
    """Returns [..., num] float64 exponential variates above 0; the least, 2.3e-10, decide, and so are the finest.

    Args:
        draws: [..., 2] float32 in [0, 1), multiples of 2**-24 (`sampling.race_draws`).
        tokens: [..., num] int64, not negative; broadcasts against the leading dims.
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
    """Returns the winners [...] int64, of equal ones the first, by `draws` [..., 2] float32.

    `probs` [..., vocab] need not be normalised, but no row may be all zero.
    """
    if ((probs > 0).sum(axis=-1) <= 1).all():  # greedy rows: whatever its time, the only token that may win does
        return np.asarray(probs.argmax(axis=-1), dtype=np.int64)
    rates = probs / race_times(draws, np.arange(probs.shape[-1]))
    return np.asarray(rates.argmax(axis=-1), dtype=np.int64)
