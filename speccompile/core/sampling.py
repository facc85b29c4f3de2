# SPDX-License-Identifier: Apache-2.0
"""From logits to laws, and from laws to tokens: warping, counter-based uniforms, inverse-CDF draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speccompile.core.parameters import FLAG, INTEGER, NUMBER, STRINGS, TOKENS, Kind, parameter, parameters
from speccompile.core.tree import Floats, Ints, TokenTree
from speccompile.errors import RuntimeFault

Words = NDArray[np.uint64]

ACCEPT_LANE = 0  # accept draw of a first child; later siblings use SIBLING_LANE + rank
TARGET_LANE = 1  # recovered, bonus or plain draw from the target's law
DRAFT_LANE = 2  # the draft's own draw
SIBLING_LANE = 16
DRAFT_SIBLING_LANE = 1 << 20  # the draft's draws of later siblings: this + rank

# Below it a slot is greedy. Logits differ by more than this, so the law is the same; a logit below 2^63 stays finite.
COLDEST = 2.0**-64
_HOTTEST = 1e30  # every token is as likely as any other there; 1 / temperature must not underflow
_LEAST_TOP_P = 1e-30  # the likeliest token alone; a smaller one could be 0 in float32
MAX_TOP_K = 2**31 - 1  # far above any vocabulary

# Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_KEY_STEPS = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_NUM_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks of decoding.

    Each field is declared once, with its range: the recipe's `decoding` section derives from here.
    Ranges and meanings of the penalties are those of the OpenAI API and of vLLM, see `runtime.logits_processors`.

    Args:
        max_new_tokens: upper bound of tokens to emit.
        temperature: 0 = greedy; below 2**-64 it becomes 0, above 1e30 it becomes 1e30: float32 holds no more.
        top_k: keep the k most probable tokens, at most 2**31 - 1; 0 = off.
        top_p: keep the smallest set of tokens with this mass; 1 = off.
        seed: 0 to 2**64 - 1. The same seed gives the same text in any batch composition.
        min_p: keep the tokens that are at least this times as probable as the likeliest; 0 = off.
        repetition_penalty: divides the positive logits of tokens of prompt and text, multiplies the negative ones;
            1 = off.
        presence_penalty: taken off the logit of each token that the text has; 0 = off.
        frequency_penalty: taken off the logit of each token as often as the text has it; 0 = off.
        logit_bias: added to logits, as (token, bias) pairs or as a mapping, which becomes pairs in order of tokens.
        stop: end the text before the first of these strings.
        stop_token_ids: end at these tokens, besides the model's own.
        ignore_eos: do not end at the model's own end-of-sequence tokens.

    Raises:
        RuntimeFault: a value is out of range, or of another type.
    """

    max_new_tokens: int = parameter(
        128, INTEGER, "at least 1", ge=1, in_recipe=True, description="Most tokens to emit."
    )
    temperature: float = parameter(
        0.0, NUMBER, "0 (greedy) or above", ge=0.0, lt=float("inf"), in_recipe=True, description="0 is greedy."
    )
    top_k: int = parameter(
        0,
        INTEGER,
        "0 (off) or above, at most 2**31 - 1",
        ge=0,
        le=MAX_TOP_K,
        in_recipe=True,
        description="Keep the k most probable tokens; 0 is off.",
    )
    top_p: float = parameter(
        1.0,
        NUMBER,
        "above 0, at most 1 (off)",
        gt=0.0,
        le=1.0,
        in_recipe=True,
        description="Keep the smallest set with this mass; 1 is off.",
    )
    seed: int = parameter(
        0, INTEGER, "0 to 2**64 - 1", ge=0, lt=2**64, in_recipe=True, description="Same seed, same text."
    )
    min_p: float = parameter(
        0.0,
        NUMBER,
        "0 (off) to 1",
        ge=0.0,
        le=1.0,
        in_recipe=True,
        description="Keep tokens this near to the likeliest; 0 is off.",
    )
    repetition_penalty: float = parameter(
        1.0,
        NUMBER,
        "above 0",
        gt=0.0,
        lt=float("inf"),
        in_recipe=True,
        description="Above 1: tokens of prompt and text become less likely; 1 is off.",
    )
    presence_penalty: float = parameter(
        0.0,
        NUMBER,
        "-2 to 2",
        ge=-2.0,
        le=2.0,
        in_recipe=True,
        description="Taken off the logits of tokens that the text has; 0 is off.",
    )
    frequency_penalty: float = parameter(
        0.0,
        NUMBER,
        "-2 to 2",
        ge=-2.0,
        le=2.0,
        in_recipe=True,
        description="Taken off as often as the text has the token; 0 is off.",
    )
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = parameter((), STRINGS, in_recipe=True, description="End the text before these strings.")
    stop_token_ids: tuple[int, ...] = parameter((), TOKENS)
    ignore_eos: bool = parameter(False, FLAG)

    def __post_init__(self) -> None:
        bias = self._pairs()
        declared = parameters(type(self))
        for name, rule in declared.items():
            if rule.kind is not None:
                self._set(name, _converted(name, getattr(self, name), rule.kind))
        self._set("logit_bias", bias)
        for name, rule in declared.items():
            if not rule.contains(getattr(self, name)):
                raise _refusal(name, getattr(self, name), rule.expected)
        if not all(t >= 0 and -100 <= b <= 100 for t, b in bias):
            raise _refusal("logit_bias", bias, "token ids, biases of -100 to 100")
        if not all(self.stop):
            raise _refusal("stop", self.stop, STRINGS.expected)
        self._set("temperature", min(self.temperature, _HOTTEST) if self.temperature >= COLDEST else 0.0)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _pairs(self) -> tuple[tuple[int, float], ...]:
        """The biases in order of tokens; a token that is named twice keeps its last."""
        given = self.logit_bias
        try:
            pairs = given.items() if isinstance(given, Mapping) else given
            named = {int(token): float(bias) for token, bias in pairs}
        except (TypeError, ValueError, OverflowError) as fault:
            raise _refusal("logit_bias", given, "(token id, bias) pairs, or a mapping") from fault
        return tuple(sorted(named.items()))

    @property
    def is_greedy(self) -> bool:
        """True when no random number is needed."""
        return self.temperature == 0.0

    @property
    def is_shaped(self) -> bool:
        """True when the law needs more than temperature, top-k and top-p: see `runtime.logits_processors`."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return any(penalties) or bool(self.logit_bias) or (self.min_p > 0 and not self.is_greedy)


def _converted(name: str, value: Any, kind: Kind) -> object:
    """Returns the value in the type of its field.

    Raises:
        RuntimeFault: it is of another type.
    """
    try:
        return kind.convert(value)
    except (TypeError, ValueError, OverflowError) as fault:
        raise _refusal(name, value, kind.expected) from fault


def _refusal(name: str, value: object, expected: str) -> RuntimeFault:
    return RuntimeFault(f"SamplingParams.{name}", _shown(value), expected, "Correct the request.")


def _shown(value: object) -> str:
    """The value as an error message shows it: whatever it is, and not at any length."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]}..."


def warp_inputs(params: Sequence[SamplingParams]) -> tuple[Floats, Ints, Floats]:
    """(temperature [batch] float32, top_k [batch] int64, top_p [batch] float32) of a batch of requests."""
    return (
        np.array([p.temperature for p in params], dtype=np.float32),
        np.array([p.top_k for p in params], dtype=np.int64),
        np.array([max(p.top_p, _LEAST_TOP_P) for p in params], dtype=np.float32),
    )


def warp(logits: Floats, temperature: ArrayLike, top_k: ArrayLike, top_p: ArrayLike) -> Floats:
    """The law that tokens are drawn from: temperature, then top-k, then top-p, as transformers orders them.

    Args:
        logits: [batch, ..., vocab] float32.
        temperature: [batch]; below `COLDEST` it gives a one-hot row at the first maximum, whatever top_k and top_p are.
        top_k: [batch] int64, 0 = off. Ties with the k-th logit are all kept.
        top_p: [batch], 1 = off. Keeps the shortest run of tokens, by falling probability and rising index,
            whose mass reaches top_p; at least one.

    Returns:
        [batch, ..., vocab] float32, each row sums to 1.
    """
    column = (-1,) + (1,) * (logits.ndim - 1)
    heat = np.asarray(temperature, dtype=np.float32).reshape(column)
    keep_num = np.asarray(top_k, dtype=np.int64).reshape(column)
    mass = np.asarray(top_p, dtype=np.float32).reshape(column)
    vocab = logits.shape[-1]
    # Scaled in float32, so that a tie made by rounding is a tie for every backend.
    is_hot = heat >= np.float32(COLDEST)
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
    one_hot = np.arange(vocab) == logits.argmax(axis=-1)[..., None]
    warped: Floats = np.where(is_hot, probs, one_hot).astype(np.float32)
    return warped


def draw(probs: Floats, uniforms: ArrayLike) -> Ints:
    """Inverse-CDF draws: the first index whose cumulative mass exceeds uniform * total mass.

    Args:
        probs: [..., vocab] float32, need not be normalised, but no row may be all zero.
        uniforms: [...] in [0, 1).

    Returns:
        [...] int64.
    """
    mass = np.cumsum(probs, axis=-1, dtype=np.float64)
    bound = np.asarray(uniforms, dtype=np.float64)[..., None] * mass[..., -1:]
    drawn: Ints = (mass <= bound).sum(axis=-1, dtype=np.int64)
    return drawn


def philox(counters: Words, keys: Words) -> Words:
    """Philox4x32-10 blocks.

    Args:
        counters: [4, ...] uint64, each word below 2**32.
        keys: [2, ...] uint64, each word below 2**32, same trailing dims.

    Returns:
        [4, ...] uint64, each word below 2**32.
    """
    column = (2,) + (1,) * (counters.ndim - 1)
    multipliers, steps = _MULTIPLIERS.reshape(column), _KEY_STEPS.reshape(column)
    even, odd = counters[0::2], counters[1::2]
    for _ in range(_NUM_ROUNDS):
        product = even * multipliers
        even, odd = (product >> _HALF)[::-1] ^ odd ^ keys, (product & _LOW)[::-1]
        keys = (keys + steps) & _LOW
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniforms(seeds: ArrayLike, positions: ArrayLike, lane: ArrayLike) -> Floats:
    """Uniform draws that depend on seed, position and lane alone.

    Args:
        seeds: [batch] uint64.
        positions: [batch, nodes] int64, index in the sequence (prompt included) of the token the draw decides.
        lane: what the draw is for, below 2**32; broadcasts against positions.

    Returns:
        [batch, nodes] float32, multiples of 2**-24 in [0, 1).
    """
    places = np.asarray(positions, dtype=np.int64).astype(np.uint64)
    seed = np.asarray(seeds, dtype=np.uint64)[:, None]
    counters = np.zeros((4, *places.shape), dtype=np.uint64)
    counters[0], counters[1], counters[2] = places & _LOW, places >> _HALF, np.asarray(lane, dtype=np.uint64)
    keys = np.stack((np.broadcast_to(seed & _LOW, places.shape), np.broadcast_to(seed >> _HALF, places.shape)))
    word = philox(counters, keys)[0]
    drawn: Floats = (word >> np.uint64(8)).astype(np.float32) * np.float32(2**-24)
    return drawn


def tree_uniforms(seeds: ArrayLike, root_positions: ArrayLike, tree: TokenTree) -> Floats:
    """The draws that acceptance reads for a tree.

    Nodes of one depth share the draw made at them: at most one of them is on the path.

    Args:
        seeds: [batch] uint64.
        root_positions: [batch] int64, index in the sequence of the root token.
        tree: the tree to be scored.

    Returns:
        [batch, nodes, 2] float32: accept draw of the node, draw made at the node.
    """
    depths, ranks = tree.depths(), tree.sibling_ranks()
    places = np.asarray(root_positions, dtype=np.int64)[:, None] + depths
    accept_lanes = np.where(ranks > 0, SIBLING_LANE + ranks, ACCEPT_LANE)
    lanes = np.concatenate((accept_lanes, np.full_like(ranks, TARGET_LANE)), axis=1)
    drawn = uniforms(seeds, np.concatenate((places, places + 1), axis=1), lanes)
    return np.ascontiguousarray(drawn.reshape(tree.batch, 2, tree.nodes).swapaxes(1, 2))
