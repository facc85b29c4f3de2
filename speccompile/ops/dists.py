# SPDX-License-Identifier: Apache-2.0
"""Ops that reduce rows of a vocabulary: FirstMax of logits, Draw and Race from distributions.

Rows are reduced in blocks of 64 and then one block: ONNX Runtime's ArgMax and CumSum visit the vocabulary element by
element on CPUs (16 rows of 32000: ArgMax 310 us, TopK(1) 135 us, two levels 37 us). Other vocabularies are padded. Rows
are read by GatherND: onnx's reference evaluator fails in GatherElements beyond 64 entries.
"""

from __future__ import annotations

import numpy as np

from speccompile.core.sampling import KEY_SCALE, KEY_STEP, NUM_SQUARES, PRIME, draw, race
from speccompile.core.specs import UNIFORMS, TensorSpec
from speccompile.core.tree import Floats, Ints
from speccompile.ops.op import Op

ROWS = ("batch", "nodes", "vocab")


def _in_blocks(rows: str, filler: float, call: str) -> str:
    """Returns statements for `index` = `call` of `rows` (written @), padded first if 64 does not divide the vocabulary.

    Both branches exist twice, since an Identity for "no padding" would copy the rows, and both reshape validly whatever
    the vocabulary is, since shape inference also looks at the branch not taken.
    """
    return f"""
    width = Constant<value_ints = [64]>()
    vocab = Shape<start = 2>({rows})
    odd = Mod(vocab, width)
    nothing = Constant<value_ints = [0]>()
    is_whole = Equal(odd, nothing)
    index = If(is_whole) <
      then_branch = whole () => (int64[] index_whole) {{
        divisor = Where(is_whole, width, vocab)
        index_whole = {call.replace("@", f"{rows}, divisor")}
      }},
      else_branch = odd_sized () => (int64[] index_odd) {{
        missing = Sub(width, odd)
        pads = Concat<axis = 0>(nothing, missing)
        filler = Constant<value_float = {filler}>()
        axis = Constant<value_ints = [2]>()
        padded = Pad({rows}, pads, filler, axis)
        index_odd = {call.replace("@", "padded, width")}
      }}>
    """


def _in_known_blocks(rows: str, filler: float, call: str, vocab: int) -> str:
    width = "width = Constant<value_ints = [64]>()"
    if vocab % 64 == 0:
        return f"{width}\n    index = {call.replace('@', f'{rows}, width')}"
    return f"""
    {width}
    pads = Constant<value_ints = [0, {-vocab % 64}]>()
    filler = Constant<value_float = {filler}>()
    axis = Constant<value_ints = [2]>()
    padded = Pad({rows}, pads, filler, axis)
    index = {call.replace("@", "padded, width")}
    """


_BLOCKS = """
    leading = Constant<value_ints = [0, 0, -1]>()
    shape = Concat<axis = 0>(leading, width)
    last = Constant<value_ints = [-1]>()
    blocks = Reshape(rows, shape)
"""
_ROWS_IN_BLOCKS = (TensorSpec("rows", ROWS, "float32"), TensorSpec("width", (1,), "int64"))
_INDEX = (TensorSpec("index", ("batch", "nodes"), "int64"),)


def first_max(logits: Floats) -> tuple[Ints]:
    """Returns the index of the first maximum of each row: [batch, nodes, vocab] -> [batch, nodes]."""
    return (logits.argmax(axis=-1).astype(np.int64),)


def _draw(probs: Floats, uniforms: Floats) -> tuple[Ints]:
    return (draw(probs, uniforms),)


_FIRST_MAX = ("logits", -3.4e38, "speccompile.FirstMaxInBlocks(@)")
_DRAW = ("probs", 0.0, "speccompile.DrawInBlocks(@, uniforms)")

FIRST_MAX = Op(
    "FirstMax",
    (TensorSpec("logits", ROWS, "float32"),),
    _INDEX,
    first_max,
    _in_blocks(*_FIRST_MAX),
    uses=("FirstMaxInBlocks",),
    sized_body=lambda vocab: _in_known_blocks(*_FIRST_MAX, vocab),
)

FIRST_MAX_IN_BLOCKS = Op(
    "FirstMaxInBlocks",
    _ROWS_IN_BLOCKS,
    _INDEX,
    lambda rows, width: first_max(rows),
    f"""{_BLOCKS}
    tops = ReduceMax<keepdims = 0>(blocks, last)
    block = ArgMax<axis = 2, keepdims = 1>(tops)
    row = GatherND<batch_dims = 2>(blocks, block)
    within = ArgMax<axis = 2, keepdims = 0>(row)
    number = Squeeze(block, last)
    start = Mul(number, width)
    index = Add(start, within)
    """,
)

DRAW = Op(
    "Draw",
    (TensorSpec("probs", ROWS, "float32"), TensorSpec(UNIFORMS, ("batch", "nodes"), "float32")),
    _INDEX,
    _draw,
    _in_blocks(*_DRAW),
    uses=("DrawInBlocks",),
    sized_body=lambda vocab: _in_known_blocks(*_DRAW, vocab),
)

# Sums run in double: a float32 running sum of 32000 terms is off by up to 1e-5. The bound inside the block stays
# below the block's own sum, so that rounding never yields a token without mass.
DRAW_IN_BLOCKS = Op(
    "DrawInBlocks",
    (*_ROWS_IN_BLOCKS, TensorSpec(UNIFORMS, ("batch", "nodes"), "float32")),
    _INDEX,
    lambda rows, width, uniforms: _draw(rows, uniforms),
    f"""{_BLOCKS}
    along = Constant<value_int = 2>()
    end = Constant<value_ints = [-1]>()
    under = Constant<value = double {{0.9999999}}>()
    sums = ReduceSum<keepdims = 0>(blocks, last)
    masses = Cast<to = 11>(sums)
    upto = CumSum(masses, along)
    total = Gather<axis = 2>(upto, end)
    u = Unsqueeze(uniforms, last)
    u64 = Cast<to = 11>(u)
    bound = Mul(u64, total)
    is_before = LessOrEqual(upto, bound)
    count = Cast<to = 7>(is_before)
    block = ReduceSum<keepdims = 1>(count, last)
    before = CumSum<exclusive = 1>(masses, along)
    skipped1 = GatherND<batch_dims = 2>(before, block)
    skipped = Unsqueeze(skipped1, last)
    row = GatherND<batch_dims = 2>(blocks, block)
    row64 = Cast<to = 11>(row)
    within = CumSum(row64, along)
    mass = Gather<axis = 2>(within, end)
    left = Sub(bound, skipped)
    most = Mul(mass, under)
    rest = Min(left, most)
    is_passed = LessOrEqual(within, rest)
    passed = Cast<to = 7>(is_passed)
    offset = ReduceSum<keepdims = 0>(passed, last)
    number = Squeeze(block, last)
    start = Mul(number, width)
    index = Add(start, offset)
    """,
)


def race_rates(probs: str, *, is_fenced: bool = False) -> str:
    """Returns statements for `rates` [batch, nodes, vocab]: `probs` over the variates of `core.race.race_times`.

    A compiler that fuses squares into one expression writes an operand out 2^n times: with `is_fenced` a reduction over
    nothing stands between them (TensorRT-RTX 1.7.1 builds in 0.3 s instead of 60). Integers are exact; -log(1 - u) is
    float32: for u up to 1/2 the series 2 artanh(u / (2 - u)), whose error is below 3e-8, and above it the logarithm of
    1 - u, which is exact there.
    """
    squares, terms = "", "series_6 = Identity(term_6)"
    fence = """
    behind_@ = Unsqueeze(rest_@, last_place)
    state_@ = ReduceMax<keepdims = 0>(behind_@, last_place)"""
    fence = fence if is_fenced else "\n    state_@ = Identity(rest_@)"
    for number in range(NUM_SQUARES):
        squares += f"""
    square_{number} = Mul(state_{number}, state_{number})
    keyed_{number} = Add(square_{number}, {("second_key", "first_key")[number % 2 == 0]})
    rest_{number + 1} = Mod(keyed_{number}, prime){fence.replace("@", str(number + 1))}"""
    for power in reversed(range(6)):
        terms += f"""
    raised_{power} = Mul(series_{power + 1}, z_square)
    series_{power} = Add(raised_{power}, term_{power})"""
    constants = "".join(f"    term_{power} = Constant<value_float = {2 / (2 * power + 1)!r}>()\n" for power in range(7))
    return f"""
    key_scale = Constant<value_float = {KEY_SCALE}>()
    key_step = Constant<value_int = {KEY_STEP}>()
    prime = Constant<value_int = {PRIME}>()
    half = Constant<value_float = 0.5>()
    two = Constant<value_float = 2.0>()
    modulus = Constant<value_float = {float(PRIME + 1)}>()
    start = Constant<value_int = 1>()
    first_place = Constant<value_ints = [0]>()
    second_place = Constant<value_ints = [1]>()
    last_place = Constant<value_ints = [-1]>()
    key_floats = Mul(uniforms, key_scale)
    key_bits = Cast<to = 7>(key_floats)
    key_steps = Mul(key_bits, key_step)
    keys = Add(key_steps, start)
    first_key = Gather<axis = 2>(keys, first_place)
    second_key = Gather<axis = 2>(keys, second_place)
    num_tokens1 = Shape<start = 2>({probs})
    num_tokens0 = Squeeze(num_tokens1)
    num_tokens = Add(num_tokens0, start)
    numbers = Range(start, num_tokens, start)
    scaled_number = Mul(first_key, numbers)
    shifted_number = Add(scaled_number, second_key)
    rest_0 = Mod(shifted_number, prime){fence.replace("@", "0")}
    {squares}
    whole_state = Cast<to = 1>(state_{NUM_SQUARES})
    above_state = Add(whole_state, half)
    u = Div(above_state, modulus)
    rest_state = Sub(prime, state_{NUM_SQUARES})
    whole_rest = Cast<to = 1>(rest_state)
    above_rest = Add(whole_rest, half)
    c = Div(above_rest, modulus)
    under_two = Sub(two, u)
    z = Div(u, under_two)
    z_square = Mul(z, z)
{constants}    {terms}
    time_low = Mul(z, series_0)
    log_c = Log(c)
    time_high = Neg(log_c)
    is_high = Greater(u, half)
    time = Where(is_high, time_high, time_low)
    rates = Div({probs}, time)
    """


# The greatest rate is the least time. On ONNX Runtime's CPU the remainders take some 5 ns an entry.
RACE = Op(
    "Race",
    (TensorSpec("probs", ROWS, "float32"), TensorSpec(UNIFORMS, ("batch", "nodes", 2), "float32")),
    _INDEX,
    lambda probs, uniforms: (race(probs, uniforms),),
    f"{race_rates('probs')}\n    index = speccompile.FirstMax(rates)\n",
    uses=("FirstMax",),
)
