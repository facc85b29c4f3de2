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
    end = f"end{number} = Constant<value_float = {float(size)}>()"
    return f"""
    {end}
    index{number} = Range(zero, end{number}, on)
    upto{number} = CumSum({row}, along)
    is_over{number} = Greater(upto{number}, {rest})
    has_mass{number} = Greater({row}, zero)
    is_hit{number} = And(is_over{number}, has_mass{number})
    hit{number} = Where(is_hit{number}, index{number}, big)
    first{number} = ReduceMin<keepdims = 1>(hit{number}, last)
    held{number} = Where(has_mass{number}, index{number}, zero)
    final{number} = ReduceMax<keepdims = 1>(held{number}, last)
    at{number} = Min(first{number}, final{number})
    """


def _descend(number: int, row: str, rest: str, next_rows: str) -> str:
    """Returns statements that go from level `number` to the block that it found: `row{n + 1}` and `rest{n + 1}`."""
    return f"""
    before{number} = Sub(upto{number}, {row})
    is_at{number} = Equal(index{number}, at{number})
    skip{number} = Where(is_at{number}, before{number}, zero)
    skipped{number} = ReduceSum<keepdims = 1>(skip{number}, last)
    rest{number + 1} = Sub({rest}, skipped{number})
    place{number} = Cast<to = 7>(at{number})
    places{number + 1} = {f"Concat<axis = 2>(places{number}, place{number})" if number else f"Identity(place{number})"}
    row{number + 1} = GatherND<batch_dims = 2>({next_rows}, places{number + 1})
    """


def _search(vocab: int, source: str, bound: str) -> str:
    """Returns statements that compute `index`, where the running sum of `source` exceeds the `rest0` of `bound`."""
    sizes = block_sizes(vocab)
    total = int(np.prod(sizes))
    text = f"""
    zero = Constant<value_float = 0.0>()
    on = Constant<value_float = 1.0>()
    big = Constant<value_float = {float(_BIG)}>()
    last = Constant<value_ints = [-1]>()
    along = Constant<value_int = 2>()
    """
    rows = source
    if total != vocab:
        text += f"""
    pads = Constant<value_ints = [0, {total - vocab}]>()
    padded_axis = Constant<value_ints = [2]>()
    padded = Pad({source}, pads, zero, padded_axis)
    """
        rows = "padded"
    levels = [rows]
    if len(sizes) > 1:
        shape = ", ".join(map(str, (0, 0, *sizes)))
        text += f"""
    shape = Constant<value_ints = [{shape}]>()
    blocks{len(sizes) - 1} = Reshape({rows}, shape)
    """
        levels = [f"blocks{i}" for i in range(len(sizes))]
        for level in reversed(range(len(sizes) - 1)):
            text += f"    blocks{level} = ReduceSum<keepdims = 0>(blocks{level + 1}, last)\n"
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
    width{number} = Constant<value_float = {float(sizes[number])}>()
    start{number} = Mul({position}, width{number})
    position{number} = Add(start{number}, at{number})
    """
        position = f"position{number}"
    return f"""{text}
    found = Cast<to = 7>({position})
    index = Squeeze(found, last)
    """


def locate_body(vocab: int) -> str:
    return _search(vocab, "rows", "    rest0 = Unsqueeze(bound, last)\n")


def draw_body(vocab: int) -> str:
    """Returns the statements of Draw for a vocabulary of `vocab` tokens."""
    bound = """
    share = Unsqueeze(uniforms, last)
    total = ReduceSum<keepdims = 1>(@, last)
    rest0 = Mul(share, total)
    """
    return _search(vocab, "probs", bound)


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
    tried_{n} = Add({low}, steps_{n})
    is_over_{n} = Greater(scaled4, tried_{n})
    over_{n} = Where(is_over_{n}, {weights}, zero4)
    reached_{n} = ReduceSum<keepdims = 1>(over_{n}, last)
    is_short_{n} = Less(reached_{n}, {wanted})
    lifted_{n} = Where(is_short_{n}, {low}, tried_{n})
    low_{name}_{number + 1} = ReduceMax<keepdims = 1>(lifted_{n}, third)
    """
    return text + f"    low_{name} = Squeeze(low_{name}_{NUM_ROUNDS}, third)\n"


def warp_body(vocab: int) -> str:
    """Returns the statements of Warp for a vocabulary of `vocab` tokens."""
    return f"""
    zero = Constant<value_float = 0.0>()
    on = Constant<value_float = 1.0>()
    big = Constant<value_float = {float(_BIG)}>()
    depth = Constant<value_float = {SPAN - PARTS:.1f}>()
    size = Constant<value_float = {float(vocab)}>()
    lowest = Constant<value_float = -3.4e38>()
    highest = Constant<value_float = 3.4e38>()
    half = Constant<value_float = 0.5>()
    zero4 = Constant<value = float[1, 1, 1, 1] {{0.0}}>()
    on4 = Constant<value = float[1, 1, 1, 1] {{1.0}}>()
    last = Constant<value_ints = [-1]>()
    third = Constant<value_ints = [2]>()
    column = Constant<value_ints = [-1, 1, 1]>()
    index = Range(zero, size, on)
    coldest = Constant<value_float = {COLDEST}>()
    heat = Reshape(temperature, column)
    is_hot = GreaterOrEqual(heat, coldest)
    divisor = Where(is_hot, heat, on)
    scaled = Div(logits, divisor)
    scaled4 = Unsqueeze(scaled, third)
    top = ReduceMax<keepdims = 1>(scaled, last)
    bottom = Sub(top, depth)
    floor3 = Floor(bottom)
    floor4 = Unsqueeze(floor3, third)

    count0 = Cast<to = 1>(top_k)
    count1 = Reshape(count0, column)
    asks_k = Greater(count1, zero)
    count = Min(count1, size)
    count4 = Unsqueeze(count, third)
    {_narrowed("k", "on4", "count4")}
    edge_k = Where(asks_k, low_k, lowest)
    is_in_k = Greater(scaled, edge_k)
    below_top = Sub(scaled, top)
    raised = Exp(below_top)
    weights = Where(is_in_k, raised, zero)

    share = Reshape(top_p, column)
    asks_p = Less(share, on)
    total = ReduceSum<keepdims = 1>(weights, last)
    mass = Mul(share, total)
    weights4 = Unsqueeze(weights, third)
    mass4 = Unsqueeze(mass, third)
    {_narrowed("p", "weights4", "mass4")}
    is_near = Greater(scaled, low_p)
    near = Where(is_near, scaled, highest)
    edge_p = ReduceMin<keepdims = 1>(near, last)
    is_sure = Greater(scaled, edge_p)
    sure = Where(is_sure, weights, zero)
    sure_mass = ReduceSum<keepdims = 1>(sure, last)
    is_tie = Equal(scaled, edge_p)
    tie = Cast<to = 1>(is_tie)
    tie_below = Sub(edge_p, top)
    tie_weight = Exp(tie_below)
    missing = Sub(mass, sure_mass)
    num_ties0 = Div(missing, tie_weight)
    num_ties1 = Ceil(num_ties0)
    num_ties2 = Max(num_ties1, on)
    num_ties = Min(num_ties2, big)
    under = Sub(num_ties, half)
    tie_bound = Squeeze(under, last)
    cut0 = speccompile.Locate(tie, tie_bound)
    cut1 = Cast<to = 1>(cut0)
    cut = Unsqueeze(cut1, last)
    is_early = LessOrEqual(index, cut)
    is_tie_in = And(is_tie, is_early)
    is_in_p0 = Or(is_sure, is_tie_in)
    is_off_p = Not(asks_p)
    is_in_p = Or(is_in_p0, is_off_p)
    kept = Where(is_in_p, weights, zero)
    kept_mass = ReduceSum<keepdims = 1>(kept, last)
    dist = Div(kept, kept_mass)

    is_top = Equal(scaled, top)
    top_index = Where(is_top, index, big)
    best = ReduceMin<keepdims = 1>(top_index, last)
    is_best = Equal(index, best)
    one_hot = Cast<to = 1>(is_best)
    probs = Where(is_hot, dist, one_hot)
    """


_RACE = f"""
    {race_rates("probs", is_fenced=True)}
    last = Constant<value_ints = [-1]>()
    big = Constant<value_float = {float(_BIG)}>()
    best = ReduceMax<keepdims = 1>(rates, last)
    is_best = Equal(rates, best)
    places = Cast<to = 1>(numbers)
    place = Where(is_best, places, big)
    winner = ReduceMin<keepdims = 0>(place, last)
    winner64 = Cast<to = 7>(winner)
    index = Sub(winner64, start)
    """

TRT_RACE = replace(RACE, body=_RACE, uses=())
TRT_DRAW = replace(DRAW, body=draw_body(WIDTH), uses=(), sized_body=draw_body)
TRT_WARP = replace(WARP, body=warp_body(WIDTH), uses=("Locate",), sized_body=warp_body)
