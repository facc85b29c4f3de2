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
    vocab = Shape({rows}, start=2)
    odd = vocab % [64]
    is_whole = odd == [0]
    index = If(is_whole) <
      then_branch = whole () => (int64[] index_whole) {{
        divisor = Where(is_whole, [64], vocab)
        index_whole = {call.replace("@", f"{rows}, divisor")}
      }},
      else_branch = odd_sized () => (int64[] index_odd) {{
        pads = Concat([0], [64] - odd, axis=0)
        padded = Pad({rows}, pads, {filler}, [2])
        index_odd = {call.replace("@", "padded, [64]")}
      }}>
    """


def _in_known_blocks(rows: str, filler: float, call: str, vocab: int) -> str:
    if vocab % 64 == 0:
        return f"index = {call.replace('@', f'{rows}, [64]')}"
    return f"""
    padded = Pad({rows}, [0, {-vocab % 64}], {filler}, [2])
    index = {call.replace("@", "padded, [64]")}
    """


_BLOCKS = """
    blocks = Reshape(rows, Concat([0, 0, -1], width, axis=0))
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
    block = ArgMax(ReduceMax(blocks, [-1], keepdims=0), axis=2, keepdims=1)
    row = GatherND(blocks, block, batch_dims=2)
    index = Squeeze(block, [-1]) * width + ArgMax(row, axis=2, keepdims=0)
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
    masses = double(ReduceSum(blocks, [-1], keepdims=0))
    upto = CumSum(masses, 2)
    bound = double(Unsqueeze(uniforms, [-1])) * Gather(upto, [-1], axis=2)
    block = ReduceSum(int64(upto <= bound), [-1], keepdims=1)
    row = GatherND(blocks, block, batch_dims=2)
    within = CumSum(double(row), 2)
    left = bound - Unsqueeze(GatherND(CumSum(masses, 2, exclusive=1), block, batch_dims=2), [-1])
    passed = within <= Min(left, Gather(within, [-1], axis=2) * double(0.9999999))
    index = Squeeze(block, [-1]) * width + ReduceSum(int64(passed), [-1], keepdims=0)
    """,
)


def race_rates(probs: str, *, is_fenced: bool = False) -> str:
    """Returns statements for `rates` [batch, nodes, vocab]: `probs` over the variates of `core.race.race_times`.

    A compiler that fuses squares into one expression writes an operand out 2^n times: with `is_fenced` a reduction over
    nothing stands between them (TensorRT-RTX 1.7.1 builds in 0.3 s instead of 60). Integers are exact; -log(1 - u) is
    float32: for u up to 1/2 the series 2 artanh(u / (2 - u)), whose error is below 3e-8, and above it the logarithm of
    1 - u, which is exact there.
    """
    fenced = "ReduceMax(Unsqueeze(@, [-1]), [-1], keepdims=0)" if is_fenced else "@"
    squares, series = "", repr(2 / 13)
    for number in range(NUM_SQUARES):
        keyed = f"state_{number} * state_{number} + {('second_key', 'first_key')[number % 2 == 0]}"
        squares += f"\n    state_{number + 1} = {fenced.replace('@', f'({keyed}) % {PRIME}')}"
    for power in reversed(range(6)):
        series = f"({series} * z_square + {2 / (2 * power + 1)!r})"
    return f"""
    keys = int64(uniforms * {KEY_SCALE}) * {KEY_STEP} + 1
    first_key = Gather(keys, [0], axis=2)
    second_key = Gather(keys, [1], axis=2)
    numbers = Range(1, Squeeze(Shape({probs}, start=2)) + 1, 1)
    state_0 = {fenced.replace("@", f"(first_key * numbers + second_key) % {PRIME}")}{squares}
    u = (float32(state_{NUM_SQUARES}) + 0.5) / {float(PRIME + 1)}
    c = (float32({PRIME} - state_{NUM_SQUARES}) + 0.5) / {float(PRIME + 1)}
    z = u / (2.0 - u)
    z_square = z * z
    rates = {probs} / Where(u > 0.5, -Log(c), z * {series})
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
