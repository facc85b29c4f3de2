# SPDX-License-Identifier: Apache-2.0
"""Warp: from logits to the distribution from which tokens are drawn (temperature, top-k, top-p)."""

from __future__ import annotations

from speccompile.core.sampling import warp
from speccompile.core.sampling_params import COLDEST
from speccompile.core.specs import TEMPERATURE, TOP_K, TOP_P, TensorSpec
from speccompile.core.tree import Floats, Ints
from speccompile.ops.dists import ROWS
from speccompile.ops.op import Op

WARP_INPUTS = (
    TensorSpec(TEMPERATURE, ("batch",), "float32"),
    TensorSpec(TOP_K, ("batch",), "int64"),
    TensorSpec(TOP_P, ("batch",), "float32"),
)


def _warp(logits: Floats, temperature: Floats, top_k: Ints, top_p: Floats) -> tuple[Floats]:
    return (warp(logits, temperature, top_k, top_p),)


# Sorting a vocabulary takes 2.5 ms a row, the first 64 of it 15 us. So only the first 64 (or top_k) are sorted, and
# where they carry less than top_p (all rows at once), the edge of the nucleus is bracketed by bisection of the
# probability, 15 us a step, and only the entries within the bracket are sorted. The branch depends on the batch, the
# kept set must not: the bracket leaves room for the error of a float32 sum, and the decision itself is in double.
_BRACKET = """
              tau0 = Sub(on, top_p3)
              tau1 = Div(tau0, size)
              half = Constant<value_float = 0.5>()
              tau = Mul(tau1, half)
              low0 = Expand(tau, row_shape)
              two = Constant<value_float = 2.0>()
              high0 = Expand(two, row_shape)
              margin = Constant<value_float = 1e-5>()
              mass_high = Add(top_p3, margin)
              mass_low = Sub(top_p3, margin)
              steps = Constant<value_int = 10>()
              go = Constant<value = bool {1}>()
              low, high = Loop(steps, go, low0, high0) <body = bisect
                (int64 i, bool go_on, float[] low_in, float[] high_in)
                => (bool same, float[] low_out, float[] high_out) {
                  same = Identity(go_on)
                  product = Mul(low_in, high_in)
                  middle = Sqrt(product)
                  is_over = GreaterOrEqual(probs_k, middle)
                  over = Where(is_over, probs_k, off)
                  mass_over = ReduceSum<keepdims = 1>(over, last)
                  is_wide = GreaterOrEqual(mass_over, mass_high)
                  is_narrow = Less(mass_over, mass_low)
                  low_out = Where(is_wide, middle, low_in)
                  high_out = Where(is_narrow, middle, high_in)
                }>
              is_sure = GreaterOrEqual(probs_k, high)
              sure_long = Where(is_sure, probs_k, off)
              sure64 = Cast<to = 11>(sure_long)
              sure_mass_long = ReduceSum<keepdims = 1>(sure64, last)
              is_likely = GreaterOrEqual(probs_k, low)
              is_unsure = Not(is_sure)
              is_near = And(is_likely, is_unsure)
              is_edge = And(is_near, is_cut_p)
              edge = Cast<to = 7>(is_edge)
              num_edge = ReduceSum<keepdims = 1>(edge, last)
              most_edge = ReduceMax<keepdims = 0>(num_edge)
              num_sorted0 = Max(most_edge, one)
              num_sorted = Reshape(num_sorted0, unit)
              excluded = Constant<value_float = -1.0>()
              at_edge = Where(is_edge, probs_k, excluded)
              falling_long, order_long = TopK<axis = 2>(at_edge, num_sorted)
"""

_NUCLEUS = f"""
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
          falling, order, sure, sure_mass = If(is_enough) <
            then_branch = short ()
              => (float[] falling_short, int64[] order_short, float[] sure_short, double[] sure_none) {{
              falling_short = Identity(probs_first)
              order_short = Identity(order_first)
              full_shape = Shape(logits)
              sure_short = Expand(off, full_shape)
              sure_none = Constant<value = double {{0.0}}>()
            }},
            else_branch = long ()
              => (float[] falling_long, int64[] order_long, float[] sure_long, double[] sure_mass_long) {{
              {_BRACKET} }}>
          falling64 = Cast<to = 11>(falling)
          axis = Constant<value_int = 2>()
          ahead = CumSum<exclusive = 1>(falling64, axis)
          before = Add(sure_mass, ahead)
          is_inside = Less(before, mass_p)
          inside = Where(is_inside, falling, off)
          nucleus_mass = ScatterElements<axis = 2, reduction = "max">(sure, order, inside)
          nucleus_total = ReduceSum<keepdims = 1>(nucleus_mass, last)
          nucleus_dist = Div(nucleus_mass, nucleus_total)
          probs_p = Where(is_cut_p, nucleus_dist, probs_k)
"""

_TRUNCATE = f"""
      kept_k = Where(is_cut_k, top_k3, one)
      widest = ReduceMax<keepdims = 0>(kept_k)
      some = Constant<value_int = 64>()
      least = Where(any_p, some, one)
      wished = Max(widest, least)
      vocab = Shape<start = 2>(logits)
      size = Cast<to = 1>(vocab)
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
        then_branch = nucleus () => (float[] probs_p) {{ {_NUCLEUS} }},
        else_branch = no_nucleus () => (float[] probs_same) {{ probs_same = Identity(probs_k) }}>
"""

WARP = Op(
    "Warp",
    (TensorSpec("logits", ROWS, "float32"), *WARP_INPUTS),
    (TensorSpec("probs", ROWS, "float32"),),
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
    coldest = Constant<value_float = {COLDEST}>()
    heat = Reshape(temperature, column)
    top_k3 = Reshape(top_k, column)
    top_p3 = Reshape(top_p, column)
    is_hot = GreaterOrEqual(heat, coldest)
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
