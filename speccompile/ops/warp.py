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
              low0 = Expand((1.0 - top_p3) / size * 0.5, row_shape)
              high0 = Expand(2.0, row_shape)
              mass_high = top_p3 + 1e-5
              mass_low = top_p3 - 1e-5
              steps = Identity(10)
              go = Identity(boolean(1))
              low, high = Loop(steps, go, low0, high0) <body = bisect
                (int64 i, bool go_on, float[] low_in, float[] high_in)
                => (bool same, float[] low_out, float[] high_out) {
                  same = Identity(go_on)
                  middle = Sqrt(low_in * high_in)
                  mass_over = ReduceSum(Where(probs_k >= middle, probs_k, 0.0), [-1], keepdims=1)
                  low_out = Where(mass_over >= mass_high, middle, low_in)
                  high_out = Where(mass_over < mass_low, middle, high_in)
                }>
              is_sure = probs_k >= high
              sure_long = Where(is_sure, probs_k, 0.0)
              sure_mass_long = ReduceSum(double(sure_long), [-1], keepdims=1)
              is_edge = (probs_k >= low) & ~is_sure & is_cut_p
              edge = int64(is_edge)
              num_sorted0 = Max(ReduceMax(ReduceSum(edge, [-1], keepdims=1), keepdims=0), 1)
              at_edge = Where(is_edge, probs_k, -1.0)
              falling_long, order_long = TopK(at_edge, Reshape(num_sorted0, [1]), axis=2)
"""

_NUCLEUS = f"""
          mass_p = double(top_p3)
          probs_first = GatherND(probs_k, Unsqueeze(order_first, [-1]), batch_dims=2)
          is_held = (double(ReduceSum(probs_first, [-1], keepdims=1)) >= mass_p) | ~is_cut_p
          is_enough = boolean(ReduceMin(int64(is_held), keepdims=0))
          falling, order, sure, sure_mass = If(is_enough) <
            then_branch = short ()
              => (float[] falling_short, int64[] order_short, float[] sure_short, double[] sure_none) {{
              falling_short = Identity(probs_first)
              order_short = Identity(order_first)
              sure_short = Expand(0.0, Shape(logits))
              sure_none = Identity(double(0.0))
            }},
            else_branch = long ()
              => (float[] falling_long, int64[] order_long, float[] sure_long, double[] sure_mass_long) {{
              {_BRACKET} }}>
          is_inside = sure_mass + CumSum(double(falling), 2, exclusive=1) < mass_p
          inside = Where(is_inside, falling, 0.0)
          nucleus_mass = ScatterElements(sure, order, inside, axis=2, reduction="max")
          nucleus_dist = nucleus_mass / ReduceSum(nucleus_mass, [-1], keepdims=1)
          probs_p = Where(is_cut_p, nucleus_dist, probs_k)
"""

_TRUNCATE = f"""
      kept_k = Where(is_cut_k, top_k3, 1)
      vocab = Shape(logits, start=2)
      size = float32(vocab)
      first = Min(Max(ReduceMax(kept_k, keepdims=0), Where(any_p, 64, 1)), vocab)
      tops, order_first = TopK(scaled, first, axis=2)
      row_shape = Concat(Shape(logits, end=2), [1], axis=0)
      kth1 = GatherND(tops, Expand(Min(kept_k - 1, first - 1), row_shape), batch_dims=2)
      masked = Where(is_cut_k & (scaled < Unsqueeze(kth1, [-1])), -3.4e38, scaled)
      probs_k = Softmax(masked, axis=-1)
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
    heat = Reshape(temperature, [-1, 1, 1])
    top_k3 = Reshape(top_k, [-1, 1, 1])
    top_p3 = Reshape(top_p, [-1, 1, 1])
    is_hot = heat >= {COLDEST}
    scaled = logits / Where(is_hot, heat, 1.0)
    is_cut_k = (top_k3 > 0) & is_hot
    is_cut_p = (top_p3 < 1.0) & is_hot
    any_p = boolean(ReduceMax(int64(is_cut_p), keepdims=0))
    any_cut = boolean(ReduceMax(int64(is_cut_k | is_cut_p), keepdims=0))
    hot_probs = If(any_cut) <
      then_branch = truncate () => (float[] probs_cut) {{ {_TRUNCATE} }},
      else_branch = plain () => (float[] probs_plain) {{ probs_plain = Softmax<axis = -1>(scaled) }}>
    all_hot = boolean(ReduceMin(int64(is_hot), keepdims=0))
    probs = If(all_hot) <
      then_branch = sampled () => (float[] probs_sampled) {{ probs_sampled = Identity(hot_probs) }},
      else_branch = mixed () => (float[] probs_mixed) {{
        size = Squeeze(Shape(logits, start=2))
        tokens = Range(0, size, 1)
        one_hot = float32(tokens == Unsqueeze(speccompile.FirstMax(logits), [-1]))
        probs_mixed = Where(is_hot, hot_probs, one_hot)
      }}>
    """,
    uses=("FirstMax",),
)
