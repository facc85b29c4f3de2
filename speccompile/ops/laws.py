# SPDX-License-Identifier: Apache-2.0
"""Ops on rows of logits and laws that the other ops are made of: FirstMax, Warp, Draw.

Rows are reduced in two levels, blocks of 64 and then one block: ONNX Runtime's ArgMax and CumSum walk the
vocabulary element by element on CPUs (16 rows of 32000: ArgMax 310 us, TopK(1) 135 us, two levels 37 us).
A vocabulary that 64 does not divide is padded first. Rows are read by GatherND: onnx's reference evaluator has a
GatherElements that fails beyond 64 entries.
"""

from __future__ import annotations

import numpy as np

from speccompile.core.sampling import draw, warp
from speccompile.core.specs import TEMPERATURE, TOP_K, TOP_P, UNIFORMS, TensorSpec
from speccompile.core.tree import Floats, Ints
from speccompile.ops.op import Op

WARP_INPUTS = (
    TensorSpec(TEMPERATURE, ("batch",), "float32"),
    TensorSpec(TOP_K, ("batch",), "int64"),
    TensorSpec(TOP_P, ("batch",), "float32"),
)
_ROWS = ("batch", "nodes", "vocab")


def _in_blocks(rows: str, filler: float, call: str) -> str:
    """Statements that make `index` = `call` of `rows` (written @), padded first if 64 does not divide the vocabulary.

    Both branches exist twice over, since an Identity for "no padding" would copy the rows, and both reshape
    validly whatever the vocabulary is, since shape inference also looks at the branch not taken.
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


_BLOCKS = """
    leading = Constant<value_ints = [0, 0, -1]>()
    shape = Concat<axis = 0>(leading, width)
    last = Constant<value_ints = [-1]>()
    blocks = Reshape(rows, shape)
"""
_ROWS_IN_BLOCKS = (TensorSpec("rows", _ROWS, "float32"), TensorSpec("width", (1,), "int64"))
_INDEX = (TensorSpec("index", ("batch", "nodes"), "int64"),)


def first_max(logits: Floats) -> tuple[Ints]:
    """Index of the first maximum of each row: [batch, nodes, vocab] -> [batch, nodes]."""
    return (logits.argmax(axis=-1).astype(np.int64),)


def _draw(probs: Floats, uniforms: Floats) -> tuple[Ints]:
    return (draw(probs, uniforms),)


def _warp(logits: Floats, temperature: Floats, top_k: Ints, top_p: Floats) -> tuple[Floats]:
    return (warp(logits, temperature, top_k, top_p),)


FIRST_MAX = Op(
    "FirstMax",
    (TensorSpec("logits", _ROWS, "float32"),),
    _INDEX,
    first_max,
    _in_blocks("logits", -3.4e38, "speccompile.FirstMaxInBlocks(@)"),
    uses=("FirstMaxInBlocks",),
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
    (TensorSpec("probs", _ROWS, "float32"), TensorSpec(UNIFORMS, ("batch", "nodes"), "float32")),
    _INDEX,
    _draw,
    _in_blocks("probs", 0.0, "speccompile.DrawInBlocks(@, uniforms)"),
    uses=("DrawInBlocks",),
)

# Sums run in double: a float32 running sum of 32000 terms is off by up to 1e-5. The bound inside the block stays
# below the block's own sum, so that rounding never yields a token of no mass.
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

# Only when some sampled slot truncates are logits sorted, and then 256 of them (or top_k) first: the whole
# vocabulary only where those carry less mass than top_p.
_TRUNCATE = """
      kept_k = Where(is_cut_k, top_k3, one)
      widest = ReduceMax<keepdims = 0>(kept_k)
      some = Constant<value_int = 256>()
      wished = Max(widest, some)
      vocab = Shape<start = 2>(logits)
      first = Min(wished, vocab)
      tops, order_first = TopK<axis = 2>(scaled, first)
      highest = Sub(first, one)
      place0 = Sub(kept_k, one)
      place = Min(place0, highest)
      nodes_shape = Shape<end = 2>(logits)
      row_shape = Concat<axis = 0>(nodes_shape, unit)
      places = Expand(place, row_shape)
      kth1 = GatherND<batch_dims = 2>(tops, places)
      kth = Unsqueeze(kth1, last)
      is_below = Less(scaled, kth)
      is_cut = And(is_cut_k, is_below)
      masked = Where(is_cut, lowest, scaled)
      probs_k = Softmax<axis = -1>(masked)
      probs_cut = If(any_p) <
        then_branch = nucleus () => (float[] probs_p) {
          mass_p = Cast<to = 11>(top_p3)
          order_first1 = Unsqueeze(order_first, last)
          probs_first = GatherND<batch_dims = 2>(probs_k, order_first1)
          covered32 = ReduceSum<keepdims = 1>(probs_first, last)
          covered = Cast<to = 11>(covered32)
          reaches = GreaterOrEqual(covered, mass_p)
          is_off = Not(is_cut_p)
          is_held = Or(reaches, is_off)
          held = Cast<to = 7>(is_held)
          all_held = ReduceMin<keepdims = 0>(held)
          is_enough = Cast<to = 9>(all_held)
          order = If(is_enough) <
            then_branch = short () => (int64[] order_short) { order_short = Identity(order_first) },
            else_branch = long () => (int64[] order_long) { unused, order_long = TopK<axis = 2>(scaled, vocab) }>
          order1 = Unsqueeze(order, last)
          falling = GatherND<batch_dims = 2>(probs_k, order1)
          falling64 = Cast<to = 11>(falling)
          axis = Constant<value_int = 2>()
          before = CumSum<exclusive = 1>(falling64, axis)
          is_inside = Less(before, mass_p)
          inside = Where(is_inside, falling, off)
          full_shape = Shape(logits)
          blank = Expand(off, full_shape)
          nucleus_mass = ScatterElements<axis = 2>(blank, order, inside)
          nucleus_total = ReduceSum<keepdims = 1>(nucleus_mass, last)
          nucleus_law = Div(nucleus_mass, nucleus_total)
          probs_p = Where(is_cut_p, nucleus_law, probs_k)
        },
        else_branch = no_nucleus () => (float[] probs_same) { probs_same = Identity(probs_k) }>
"""

WARP = Op(
    "Warp",
    (TensorSpec("logits", _ROWS, "float32"), *WARP_INPUTS),
    (TensorSpec("probs", _ROWS, "float32"),),
    _warp,
    f"""
    off = Constant<value_float = 0.0>()
    on = Constant<value_float = 1.0>()
    none = Constant<value_int = 0>()
    one = Constant<value_int = 1>()
    unit = Constant<value_ints = [1]>()
    last = Constant<value_ints = [-1]>()
    lowest = Constant<value_float = -3.4e38>()
    column = Constant<value_ints = [-1, 1, 1]>()
    heat = Reshape(temperature, column)
    top_k3 = Reshape(top_k, column)
    top_p3 = Reshape(top_p, column)
    is_hot = Greater(heat, off)
    divisor = Where(is_hot, heat, on)
    scaled = Div(logits, divisor)
    asks_k = Greater(top_k3, none)
    asks_p = Less(top_p3, on)
    is_cut_k = And(asks_k, is_hot)
    is_cut_p = And(asks_p, is_hot)
    cut_p = Cast<to = 7>(is_cut_p)
    max_p = ReduceMax<keepdims = 0>(cut_p)
    any_p = Cast<to = 9>(max_p)
    is_cut_any = Or(is_cut_k, is_cut_p)
    cut_any = Cast<to = 7>(is_cut_any)
    max_cut = ReduceMax<keepdims = 0>(cut_any)
    any_cut = Cast<to = 9>(max_cut)
    hot_probs = If(any_cut) <
      then_branch = truncate () => (float[] probs_cut) {{ {_TRUNCATE} }},
      else_branch = plain () => (float[] probs_plain) {{ probs_plain = Softmax<axis = -1>(scaled) }}>
    hot = Cast<to = 7>(is_hot)
    min_hot = ReduceMin<keepdims = 0>(hot)
    all_hot = Cast<to = 9>(min_hot)
    probs = If(all_hot) <
      then_branch = sampled () => (float[] probs_sampled) {{ probs_sampled = Identity(hot_probs) }},
      else_branch = mixed () => (float[] probs_mixed) {{
        best = speccompile.FirstMax(logits)
        best3 = Unsqueeze(best, last)
        size1 = Shape<start = 2>(logits)
        size = Squeeze(size1)
        tokens = Range(none, size, one)
        is_best = Equal(tokens, best3)
        one_hot = Cast<to = 1>(is_best)
        probs_mixed = Where(is_hot, hot_probs, one_hot)
      }}>
    """,
    uses=("FirstMax",),
)
