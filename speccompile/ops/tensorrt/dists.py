# SPDX-License-Identifier: Apache-2.0
"""Locate, Draw and Warp as TensorRT builds them.

TensorRT has no double, sorts 3840 entries at most and captures no CUDA graph over a branch. So running sums go in
blocks of 64 terms (their error grows with the length), and the edges of top-k and top-p are found by narrowing an
interval of logits, 16 thresholds at once, which fuse into one kernel (TensorRT-RTX 1.7.1).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from speccompile.core.sampling_params import COLDEST
from speccompile.core.specs import TensorSpec
from speccompile.core.tree import Floats, Ints
from speccompile.ops.dists import DRAW, RACE, ROWS, race_rates
from speccompile.ops.op import Op
from speccompile.ops.warp import WARP

WIDTH = 64  # entries of a block
SPAN = 128  # of logits: a token this far below the best has a float32 probability of 0
PARTS = 16  # an interval is divided into so many at once
NUM_ROUNDS = 9  # the last interval is 128 / 16**9 = 2e-9 wide: below the spacing of float32 from 0.02 on
_BIG = 1 << 24  # above any index; indices are exact in float32 up to here


def _locate(rows: Floats, bound: Floats) -> tuple[Ints]:
    upto = np.cumsum(rows, axis=-1, dtype=np.float64)
    first = ((upto <= bound[..., None]) | (rows <= 0)).argmin(axis=-1)
    is_found = (upto[..., -1] > bound) & (rows > 0).any(axis=-1)
    last = rows.shape[-1] - 1 - (rows > 0)[..., ::-1].argmax(axis=-1)
    return (np.where(is_found, first, np.where((rows > 0).any(axis=-1), last, 0)).astype(np.int64),)


def block_sizes(vocab: int) -> tuple[int, ...]:
    """Returns the sizes of the levels in which a row is read: (a, 64, 64) where it has more than 4096 entries."""
    sizes: list[int] = []
    while vocab > WIDTH:
        sizes.insert(0, WIDTH)
        vocab = -(-vocab // WIDTH)
        if len(sizes) == 2:
            break
    return (vocab, *sizes)


def _level(number: int, size: int, row: str, rest: str) -> str:
    """Returns statements for `at{number}` [batch, nodes, 1] float32, the entry of `row` that contains the bound.

    An entry without mass is never taken, however the sums were rounded.
    """
    return f"""
    index{number} = Range(0.0, {float(size)}, 1.0)
    upto{number} = CumSum({row}, 2)
    has_mass{number} = {row} > 0.0
    hit{number} = Where((upto{number} > {rest}) & has_mass{number}, index{number}, {float(_BIG)})
    final{number} = ReduceMax(Where(has_mass{number}, index{number}, 0.0), [-1], keepdims=1)
    at{number} = Min(ReduceMin(hit{number}, [-1], keepdims=1), final{number})
    """


def _descend(number: int, row: str, rest: str, next_rows: str) -> str:
    """Returns statements that go from level `number` to the block that it found: `row{n + 1}` and `rest{n + 1}`."""
    return f"""
    skip{number} = Where(index{number} == at{number}, upto{number} - {row}, 0.0)
    skipped{number} = ReduceSum(skip{number}, [-1], keepdims=1)
    rest{number + 1} = {rest} - skipped{number}
    places{number + 1} = {f"Concat(places{number}, int64(at{number}), axis=2)" if number else "int64(at0)"}
    row{number + 1} = GatherND({next_rows}, places{number + 1}, batch_dims=2)
    """


def _search(vocab: int, source: str, bound: str) -> str:
    """Returns statements that compute `index`, where the running sum of `source` exceeds the `rest0` of `bound`."""
    sizes = block_sizes(vocab)
    total = int(np.prod(sizes))
    text, rows = "", source
    if total != vocab:
        text, rows = f"    padded = Pad({source}, [0, {total - vocab}], 0.0, [2])\n", "padded"
    levels = [rows]
    if len(sizes) > 1:
        text += f"    blocks{len(sizes) - 1} = Reshape({rows}, {[0, 0, *sizes]})\n"
        levels = [f"blocks{i}" for i in range(len(sizes))]
        for level in reversed(range(len(sizes) - 1)):
            text += f"    blocks{level} = ReduceSum(blocks{level + 1}, [-1], keepdims=0)\n"
    row = levels[0]
    text += bound.replace("@", row)
    for number, size in enumerate(sizes):
        text += _level(number, size, row, f"rest{number}")
        if number + 1 < len(sizes):
            text += _descend(number, row, f"rest{number}", levels[number + 1])
            row = f"row{number + 1}"
    position = "at0"
    for number in range(1, len(sizes)):
        text += f"""
    position{number} = {position} * {float(sizes[number])} + at{number}
    """
        position = f"position{number}"
    return f"""{text}
    index = Squeeze(int64({position}), [-1])
    """


def locate_body(vocab: int) -> str:
    return _search(vocab, "rows", "    rest0 = Unsqueeze(bound, [-1])\n")


def draw_body(vocab: int) -> str:
    """Returns the statements of Draw for a vocabulary of `vocab` tokens."""
    return _search(vocab, "probs", "    rest0 = Unsqueeze(uniforms, [-1]) * ReduceSum(@, [-1], keepdims=1)\n")


LOCATE = Op(
    "Locate",
    (TensorSpec("rows", ROWS, "float32"), TensorSpec("bound", ("batch", "nodes"), "float32")),
    DRAW.outputs,
    _locate,
    locate_body(WIDTH),
    sized_body=locate_body,
)


def _narrowed(name: str, weights: str, wanted: str) -> str:
    """Returns statements for `low_{name}`: the weights above it reach `wanted`, those above any larger value do not.

    Thresholds lie on a grid of powers of two from a whole number on, so each is exact, and where the grid is finer than
    float32 they are neighbouring floats. All operands have four dims: others make TensorRT's parser add layers.
    """
    text = f"    low_{name}_0 = Identity(floor4)\n"
    for number in range(NUM_ROUNDS):
        step = SPAN / PARTS ** (number + 1)
        steps = ", ".join(f"{step * part:.17e}" for part in range(1, PARTS))
        low, n = f"low_{name}_{number}", f"{name}_{number}"
        text += f"""
    steps_{n} = Constant<value = float[1, 1, {PARTS - 1}, 1] {{{steps}}}>()
    tried_{n} = {low} + steps_{n}
    reached_{n} = ReduceSum(Where(scaled4 > tried_{n}, {weights}, zero4), [-1], keepdims=1)
    lifted_{n} = Where(reached_{n} < {wanted}, {low}, tried_{n})
    low_{name}_{number + 1} = ReduceMax(lifted_{n}, [2], keepdims=1)
    """
    return text + f"    low_{name} = Squeeze(low_{name}_{NUM_ROUNDS}, [2])\n"


def warp_body(vocab: int) -> str:
    """Returns the statements of Warp for a vocabulary of `vocab` tokens."""
    return f"""
    zero4 = Constant<value = float[1, 1, 1, 1] {{0.0}}>()
    on4 = Constant<value = float[1, 1, 1, 1] {{1.0}}>()
    index = Range(0.0, {float(vocab)}, 1.0)
    heat = Reshape(temperature, [-1, 1, 1])
    is_hot = heat >= {COLDEST}
    scaled = logits / Where(is_hot, heat, 1.0)
    scaled4 = Unsqueeze(scaled, [2])
    top = ReduceMax(scaled, [-1], keepdims=1)
    floor4 = Unsqueeze(Floor(top - {SPAN - PARTS:.1f}), [2])

    count1 = Reshape(float32(top_k), [-1, 1, 1])
    asks_k = count1 > 0.0
    count4 = Unsqueeze(Min(count1, {float(vocab)}), [2])
    {_narrowed("k", "on4", "count4")}
    weights = Where(scaled > Where(asks_k, low_k, -3.4e38), Exp(scaled - top), 0.0)

    share = Reshape(top_p, [-1, 1, 1])
    mass = share * ReduceSum(weights, [-1], keepdims=1)
    weights4 = Unsqueeze(weights, [2])
    mass4 = Unsqueeze(mass, [2])
    {_narrowed("p", "weights4", "mass4")}
    edge_p = ReduceMin(Where(scaled > low_p, scaled, 3.4e38), [-1], keepdims=1)
    is_sure = scaled > edge_p
    is_tie = scaled == edge_p
    missing = mass - ReduceSum(Where(is_sure, weights, 0.0), [-1], keepdims=1)
    num_ties = Min(Max(Ceil(missing / Exp(edge_p - top)), 1.0), {float(_BIG)})
    tie_bound = Squeeze(num_ties - 0.5, [-1])
    cut = Unsqueeze(float32(speccompile.Locate(float32(is_tie), tie_bound)), [-1])
    is_in_p = is_sure | is_tie & (index <= cut) | ~(share < 1.0)
    kept = Where(is_in_p, weights, 0.0)

    best = ReduceMin(Where(scaled == top, index, {float(_BIG)}), [-1], keepdims=1)
    probs = Where(is_hot, kept / ReduceSum(kept, [-1], keepdims=1), float32(index == best))
    """


_RACE = f"""
    {race_rates("probs", is_fenced=True)}
    best = ReduceMax(rates, [-1], keepdims=1)
    index = int64(ReduceMin(Where(rates == best, float32(numbers), {float(_BIG)}), [-1], keepdims=0)) - 1
    """

TRT_RACE = replace(RACE, body=_RACE, uses=())
TRT_DRAW = replace(DRAW, body=draw_body(WIDTH), uses=(), sized_body=draw_body)
TRT_WARP = replace(WARP, body=warp_body(WIDTH), uses=("Locate",), sized_body=warp_body)
