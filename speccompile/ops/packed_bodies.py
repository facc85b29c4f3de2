# SPDX-License-Identifier: Apache-2.0
"""Statements that the bodies of ops with packed weights share."""

from __future__ import annotations

from speccompile.ops.packing import GROUP, ZEROS, has_minimums, is_int4

# y of `biased` and the attribute `activation`.
GATE = """
    gate, up = Split(biased, axis=-1, num_outputs=2)
    is_silu = attr.activation == 0
    is_tanh = attr.activation == 1
    active = If (is_silu) <
        then_branch = silu () => (silu_out) {
            silu_out = gate * Sigmoid(gate)
        },
        else_branch = gelu () => (gelu_out) { gelu_out = If (is_tanh) <
            then_branch = by_tanh () => (tanh_out) { tanh_out = Gelu<approximate = "tanh">(gate) },
            else_branch = by_erf () => (erf_out) { erf_out = Gelu(gate) }
        > }
    >
    y = active * up
"""

# `source`: the rows of `sum` normalised, by the attribute `epsilon`.
NORM = """
    sum = x + residual
    mean = ReduceMean(sum * sum, [-1])
    source = sum / Sqrt(mean + attr.epsilon) * gamma
"""

# Numbers from the attributes: of rows in and of units in a row, and of units in a group.
SIZES = """
    rows1 = Unsqueeze(attr.num_in, [0])
    unit = Unsqueeze(attr.unit, [0])
    group = Unsqueeze(attr.group, [0])
    units_a_group = group / unit
    units = (rows1 + (unit - [1])) / unit
"""

# `rounded` [..., num_in padded to 32]: what the levels of `source` [..., num_in] stand for; `wholes` [all units, unit].
ROUNDED = f"""
    missing = -rows1 % [{GROUP}]
    padded = Pad(source, Concat([0], missing, axis=0), 0.0, [-1])
    all_units = Reshape(padded, Concat([-1], unit, axis=0))
    peak = ReduceMax(Abs(all_units), [-1])
    inverse = Where(peak < 1e-30, 0.0, 127.0 / peak)
    wholes = Round(all_units * inverse) * (peak / 127.0)
    rounded = Reshape(wholes, Shape(padded), allowzero=1)
"""


def nibbles(source: str, axis: int) -> str:
    """Returns the statements for `halves`: the low and the high nibbles of `source` along a new axis."""
    return f"""
    low = BitwiseAnd({source}, uint8(15))
    high = BitShift({source}, uint8(4), direction="RIGHT")
    halves = Concat(Unsqueeze(low, [{axis}]), Unsqueeze(high, [{axis}]), axis={axis})
    """


def spread_groups(source: str, name: str, axis: int) -> str:
    """Returns the statements for `name` [..., units] of `source` [..., groups], whose last axis is `axis`."""
    return f"""
    {name}_times = Concat({[1] * (axis + 1)}, units_a_group, axis=0)
    {name}_flat = Reshape(Expand(Unsqueeze({source}, [-1]), {name}_times), {[0] * axis + [-1]})
    {name} = Slice({name}_flat, [0], units, [{axis}])
    """


def block_product(form: str, scales: str, minimums: str) -> str:
    """Returns the statements for `product` of `source` by MatMulNBits, in blocks of a unit.

    Args:
        scales: statements for `half_scales` [num_out, groups]; `kept` [num_out, padded num_in] are the levels.
    """
    middle = 8 if is_int4(form) else 128  # MatMulNBits' zero point
    sizes = f"""{SIZES}
    levels = Slice(kept, [0], units * unit, [1])
    """
    if is_int4(form):
        packed = """
    pairs = Reshape(levels, [0, -1, 2])
    even, odd = Split(pairs, axis=2, num_outputs=2)
    bytes = BitwiseOr(even, BitShift(odd, uint8(4), direction="LEFT"))
    packed = Reshape(bytes, Concat([0, -1], unit / [2], axis=0))
    """
    else:
        packed = "packed = Reshape(levels, Concat([0, -1], unit, axis=0))"
    steps = f"{scales}\n    group_steps = float32(half_scales)\n{spread_groups('group_steps', 'steps', 1)}"
    numbers = f"bits={4 if is_int4(form) else 8}, block_size=attr.unit, accuracy_level=4"
    product = f"com.microsoft.MatMulNBits(@, packed, steps, K=attr.num_in, N=attr.num_out, {numbers})"
    if not has_minimums(form):
        assert ZEROS[form] == middle
        return f"{sizes}\n    {packed}\n    {steps}\n    product = {product.replace('@', 'source')}"
    return f"""{sizes}
    {packed}
    {steps}
    {minimums}
    group_minimums = float32(half_minimums)
    {ROUNDED}
    own_rows = Slice(rounded, [0], rows1, [-1])
    centred = {product.replace("@", "own_rows")}
    group_centres = group_minimums + group_steps * {float(middle)}
    {spread_groups("group_centres", "centres", 1)}
    sums_shape = Concat(Shape(padded, end=-1), Shape(padded, start=-1) / unit, axis=0)
    padded_sums = Reshape(ReduceSum(wholes, [-1], keepdims=0), sums_shape, allowzero=1)
    sums = Slice(padded_sums, [0], units, [-1])
    product = centred + sums @ Transpose(centres, perm=[1, 0])
    """
