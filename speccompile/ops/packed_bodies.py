# SPDX-License-Identifier: Apache-2.0
"""Statements in ONNX's textual syntax that the bodies of ops with packed weights share."""

from __future__ import annotations

from speccompile.ops.packing import GROUP, ZEROS, has_minimums, is_int4

# y of `biased` and the attribute `activation`.
GATE = """
    gate, up = Split<axis = -1, num_outputs = 2>(biased)
    kind = Constant<value_int: int = @activation>()
    silu_kind = Constant<value_int = 0>()
    tanh_kind = Constant<value_int = 1>()
    is_silu = Equal(kind, silu_kind)
    is_tanh = Equal(kind, tanh_kind)
    active = If (is_silu) <
        then_branch = silu () => (silu_out) { share = Sigmoid(gate) silu_out = Mul(gate, share) },
        else_branch = gelu () => (gelu_out) { gelu_out = If (is_tanh) <
            then_branch = by_tanh () => (tanh_out) { tanh_out = Gelu<approximate = "tanh">(gate) },
            else_branch = by_erf () => (erf_out) { erf_out = Gelu(gate) }
        > }
    >
    y = Mul(active, up)
"""

# Numbers from the attributes: of rows in and of units in a row, and of units in a group. `zero` and `one` are there.
SIZES = """
    last = Constant<value_ints = [-1]>()
    rows_in = Constant<value_int: int = @num_in>()
    rows1 = Unsqueeze(rows_in, zero)
    unit0 = Constant<value_int: int = @unit>()
    unit = Unsqueeze(unit0, zero)
    group0 = Constant<value_int: int = @group>()
    group = Unsqueeze(group0, zero)
    units_a_group = Div(group, unit)
    all_but_one = Sub(unit, one)
    units_end = Add(rows1, all_but_one)
    units = Div(units_end, unit)
"""

# `rounded` [..., num_in padded to 32]: what the levels of `source` [..., num_in] stand for; `wholes` [all units, unit].
ROUNDED = f"""
    step = Constant<value_ints = [{GROUP}]>()
    negative = Neg(rows1)
    missing = Mod(negative, step)
    pads = Concat<axis = 0>(zero, missing)
    nothing = Constant<value = float {{0.0}}>()
    padded = Pad(source, pads, nothing, last)
    by_unit = Concat<axis = 0>(last, unit)
    all_units = Reshape(padded, by_unit)
    magnitudes = Abs(all_units)
    peak = ReduceMax(magnitudes, last)
    most = Constant<value = float {{127.0}}>()
    least_peak = Constant<value = float {{1e-30}}>()
    ratio = Div(most, peak)
    is_small = Less(peak, least_peak)
    inverse = Where(is_small, nothing, ratio)
    ratios = Mul(all_units, inverse)
    levels_of_rows = Round(ratios)
    row_steps = Div(peak, most)
    wholes = Mul(levels_of_rows, row_steps)
    padded_shape = Shape(padded)
    rounded = Reshape<allowzero = 1>(wholes, padded_shape)
"""


def nibbles(source: str, axis: int) -> str:
    """Returns the statements for `halves`: the low and the high nibbles of `source` along a new axis."""
    return f"""
    mask = Constant<value = uint8 {{15}}>()
    shift = Constant<value = uint8 {{4}}>()
    low = BitwiseAnd({source}, mask)
    high = BitShift<direction = "RIGHT">({source}, shift)
    half_axis = Constant<value_ints = [{axis}]>()
    low_half = Unsqueeze(low, half_axis)
    high_half = Unsqueeze(high, half_axis)
    halves = Concat<axis = {axis}>(low_half, high_half)
    """


def spread_groups(source: str, name: str, axis: int) -> str:
    """Returns the statements for `name` [..., units] of `source` [..., groups], whose last axis is `axis`."""
    return f"""
    {name}_single = Unsqueeze({source}, last)
    {name}_ones = Constant<value_ints = {[1] * (axis + 1)}>()
    {name}_times = Concat<axis = 0>({name}_ones, units_a_group)
    {name}_each = Expand({name}_single, {name}_times)
    {name}_rows = Constant<value_ints = {[0] * axis + [-1]}>()
    {name}_flat = Reshape({name}_each, {name}_rows)
    {name}_axis = Constant<value_ints = [{axis}]>()
    {name} = Slice({name}_flat, zero, units, {name}_axis)
    """


def block_product(form: str, scales: str, minimums: str) -> str:
    """Returns the statements for `product` of `source` by MatMulNBits, in blocks of a unit.

    Args:
        scales: statements for `half_scales` [num_out, groups]; `kept` [num_out, padded num_in] are the levels.
    """
    middle = 8 if is_int4(form) else 128  # MatMulNBits' zero point
    numbers = f"bits = {4 if is_int4(form) else 8}, block_size: int = @unit, accuracy_level = 4"
    sizes = f"""one = Constant<value_ints = [1]>()
    {SIZES}
    levels_end = Mul(units, unit)
    levels = Slice(kept, zero, levels_end, one)
    """
    if is_int4(form):
        packed = """
    in_pairs = Constant<value_ints = [0, -1, 2]>()
    pairs = Reshape(levels, in_pairs)
    even, odd = Split<axis = 2, num_outputs = 2>(pairs)
    odd_bits = BitShift<direction = "LEFT">(odd, shift)
    bytes = BitwiseOr(even, odd_bits)
    per_byte = Constant<value_ints = [2]>()
    block_bytes = Div(unit, per_byte)
    block_shape = Concat<axis = 0>(zero, last, block_bytes)
    packed = Reshape(bytes, block_shape)
    """
    else:
        packed = "block_shape = Concat<axis = 0>(zero, last, unit)\n    packed = Reshape(levels, block_shape)"
    steps = f"{scales}\n    group_steps = Cast<to = 1>(half_scales)\n{spread_groups('group_steps', 'steps', 1)}"
    product = f"com.microsoft.MatMulNBits<K: int = @num_in, N: int = @num_out, {numbers}>"
    if not has_minimums(form):
        assert ZEROS[form] == middle
        return f"{sizes}\n    {packed}\n    {steps}\n    product = {product}(source, packed, steps)"
    return f"""{sizes}
    {packed}
    {steps}
    {minimums}
    group_minimums = Cast<to = 1>(half_minimums)
    {ROUNDED}
    own_rows = Slice(rounded, zero, rows1, last)
    centred = {product}(own_rows, packed, steps)
    middle = Constant<value = float {{{float(middle)}}}>()
    middle_steps = Mul(group_steps, middle)
    group_centres = Add(group_minimums, middle_steps)
    {spread_groups("group_centres", "centres", 1)}
    sums_of_units = ReduceSum<keepdims = 0>(wholes, last)
    leading = Shape<end = -1>(padded)
    padded_rows = Shape<start = -1>(padded)
    padded_units = Div(padded_rows, unit)
    sums_shape = Concat<axis = 0>(leading, padded_units)
    padded_sums = Reshape<allowzero = 1>(sums_of_units, sums_shape)
    sums = Slice(padded_sums, zero, units, last)
    centres_in_rows = Transpose<perm = [1, 0]>(centres)
    shares = MatMul(sums, centres_in_rows)
    product = Add(centred, shares)
    """
