# SPDX-License-Identifier: Apache-2.0
"""Linears of which each row chooses one of several packed weights: the experts of a mixture (`plugins/cpu/experts.h`).

ExpertLinear is x W[expert] + bias[expert], GatedExpertLinear applies a gate to it, in the forms and arithmetic of
`packed_linear`. Weights stand in the panels of `packing`, one expert after the other. Every (row, expert) is a row of
the result, in order, and depends on that row alone. The bodies unpack the experts' weights in every step: right, but
slow. An id outside the experts is an error of the gather.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from speccompile.core.specs import TensorSpec
from speccompile.ops.op import Op
from speccompile.ops.packed_bodies import GATE, ROUNDED, SIZES, nibbles, spread_groups
from speccompile.ops.packed_linear import SILU, activated, columns_of, constant_specs, grid_attributes, product_of
from speccompile.ops.packing import COLUMNS, FORMS, GROUP, ZEROS, Packed, has_minimums, is_int4, is_integer


def _twin(form: str, has_gate: bool) -> Callable[..., tuple[Any, ...]]:
    """Returns the numpy twin; inputs and attributes are those of the op."""

    def twin(
        x: Any,
        ids: Any,
        *rest: Any,
        num_in: int,
        num_out: int,
        num_experts: int,
        activation: int = SILU,
        group: int = GROUP,
        unit: int = GROUP,
    ) -> tuple[Any, ...]:
        *constants, bias = rest
        chosen = ids.reshape(-1)
        if ((chosen < 0) | (chosen >= num_experts)).any():
            raise IndexError(f"an expert outside 0 to {num_experts - 1}")
        rows = np.repeat(x.reshape(-1, num_in), len(chosen) // max(len(x), 1), axis=0)
        flat = np.zeros((len(chosen), num_out), np.float32)
        columns = columns_of(num_out, has_gate)
        for expert in np.unique(chosen):
            weights, scales, minimums = (*[constant[expert] for constant in constants], None, None)[:3]
            packed = Packed(weights, scales, minimums, group, unit)
            own = chosen == expert
            flat[own] = product_of(rows[own], packed, form, columns) + bias[expert]
        if has_gate:
            flat = (activated(flat[:, : num_out // 2], activation) * flat[:, num_out // 2 :]).astype(np.float32)
        return (flat,)

    return twin


# x's row of each id, and the ids without negative ones, which would count from the end.
_ROUTES = """
    zero = Constant<value_ints = [0]>()
    one = Constant<value_ints = [1]>()
    all = Constant<value_ints = [-1]>()
    given = Reshape(ids, all)
    none = Constant<value_int = 0>()
    single = Constant<value_int = 1>()
    num_experts = Constant<value_int: int = @num_experts>()
    is_negative = Less(given, none)
    experts = Where(is_negative, num_experts, given)
    num_ids1 = Shape(experts)
    num_rows1 = Shape<start = 0, end = 1>(x)
    num_ids = Squeeze(num_ids1)
    num_rows = Squeeze(num_rows1)
    at_least_one_row = Max(num_rows, single)
    per_row = Div(num_ids, at_least_one_row)
    at_least_one = Max(per_row, single)
    numbers = Range(none, num_ids, single)
    sources = Div(numbers, at_least_one)
    source = Gather<axis = 0>(x, sources)
    chosen = Gather<axis = 0>(weights, experts)
    chosen_bias = Gather<axis = 0>(bias, experts)
"""

# By form: `matrix` [ids, panels, 32, K padded] float32 of the chosen weights.
_MATRIX = {
    "F32": "matrix = Transpose<perm = [0, 1, 3, 2]>(chosen)",
    "Bf16": """
    wide = Cast<to = 1>(chosen)
    turned = Transpose<perm = [0, 1, 3, 2, 4]>(wide)
    in_rows = Constant<value_ints = [0, 0, 0, -1]>()
    matrix = Reshape(turned, in_rows)
    """,
}


def _grid_matrix(form: str) -> str:
    if is_int4(form):
        stored = f"{nibbles('chosen', 4)}\n    stored = Transpose<perm = [0, 1, 5, 2, 3, 4, 6]>(halves)"
    else:
        stored = "stored = Transpose<perm = [0, 1, 4, 2, 3, 5]>(chosen)"
    of_units = "".join(
        f"""
    chosen_{name} = Gather<axis = 0>({name}, experts)
    half_{name} = Transpose<perm = [0, 1, 3, 2]>(chosen_{name})
    group_{name} = Cast<to = 1>(half_{name})
    {spread_groups(f"group_{name}", f"unit_{name}", 3)}
    own_{name} = Unsqueeze(unit_{name}, last)
    """
        for name in ("scales", *(("minimums",) if has_minimums(form) else ()))
    )
    return f"""
    {SIZES}
    {stored}
    in_rows = Constant<value_ints = [0, 0, 0, -1]>()
    stored_rows = Reshape(stored, in_rows)
    levels_end = Mul(units, unit)
    level_axis = Constant<value_ints = [3]>()
    own_levels = Slice(stored_rows, zero, levels_end, level_axis)
    every = Constant<value_ints = [0, 0, 0, -1]>()
    unit_shape = Concat<axis = 0>(every, unit)
    as_levels = Reshape(own_levels, unit_shape)
    wide_levels = Cast<to = 1>(as_levels)
    middle = Constant<value = float {{{float(ZEROS[form])}}}>()
    levels = Sub(wide_levels, middle)
    {of_units}
    {"steps = Mul(levels, own_scales)" if has_minimums(form) else "weighed = Mul(levels, own_scales)"}
    {"weighed = Add(steps, own_minimums)" if has_minimums(form) else ""}
    matrix = Reshape(weighed, in_rows)
    """


def _columns(has_gate: bool) -> str:
    """Returns the statements for `kept` [ids, num_out, K padded] from `matrix`, padding of columns dropped."""
    sizes = """
    num_columns = Constant<value_int: int = @num_out>()
    columns = Unsqueeze(num_columns, zero)
    """
    if not has_gate:
        return f"""{sizes}
    shape4 = Shape(matrix)
    depth = Slice(shape4, three, four)
    flat_shape = Concat<axis = 0>(zero, all, depth)
    by_column = Reshape(matrix, flat_shape)
    kept = Slice(by_column, zero, columns, one)
    """
    return f"""{sizes}
    two = Constant<value_int = 2>()
    half_columns = Div(columns, two)
    shape4 = Shape(matrix)
    depth = Slice(shape4, three, four)
    width1 = Constant<value_ints = [{COLUMNS // 2}]>()
    two1 = Constant<value_ints = [2]>()
    turn_shape = Concat<axis = 0>(zero, zero, two1, width1, depth)
    turns = Reshape(matrix, turn_shape)
    sides = Transpose<perm = [2, 0, 1, 3, 4]>(turns)
    gates, ups = Split<axis = 0, num_outputs = 2>(sides)
    flat_shape = Concat<axis = 0>(num_ids1, all, depth)
    gate_all = Reshape(gates, flat_shape)
    up_all = Reshape(ups, flat_shape)
    gate_own = Slice(gate_all, zero, half_columns, one)
    up_own = Slice(up_all, zero, half_columns, one)
    kept = Concat<axis = 1>(gate_own, up_own)
    """


# One product of a matrix with a vector for each id, so that no row depends on their number.
_PRODUCT = """
    width = Shape<start = 1, end = 2>(source)
    axis1 = Constant<value_ints = [1]>()
    axis2 = Constant<value_ints = [2]>()
    own = Slice(kept, zero, width, axis2)
    own_rows = Slice(rounded, zero, width, axis1)
    as_column = Unsqueeze(own_rows, axis2)
    column = MatMul(own, as_column)
    product = Squeeze(column, axis2)
    biased = Add(product, chosen_bias)
"""


def _body(form: str, has_gate: bool) -> str:
    ends = "three = Constant<value_ints = [3]>()\n    four = Constant<value_ints = [4]>()"
    matrix = (
        f"{_grid_matrix(form)}{ROUNDED}" if is_integer(form) else f"{_MATRIX[form]}\n    rounded = Identity(source)"
    )
    end = GATE if has_gate else "y = Identity(biased)"
    return "\n    ".join((_ROUTES, ends, matrix, _columns(has_gate), _PRODUCT, end))


def _make_op(form: str, has_gate: bool) -> Op:
    attributes: dict[str, int | float] = {"num_in": 0, "num_out": 0, "num_experts": 0, **grid_attributes(form)}
    attributes |= {"activation": SILU} if has_gate else {}
    return Op(
        expert_op_name(form, has_gate),
        (
            TensorSpec("x", ("rows", "num_in"), "float32"),
            TensorSpec("ids", ("rows", "per_row"), "int64"),
            *constant_specs(form, "experts"),
            TensorSpec("bias", ("experts", "num_out"), "float32"),
        ),
        (TensorSpec("y", ("ids", "num_out"), "float32"),),
        _twin(form, has_gate),
        _body(form, has_gate),
        attributes=attributes,
    )


def expert_op_name(form: str, has_gate: bool = False) -> str:
    return f"{'Gated' if has_gate else ''}ExpertLinear{form}"


EXPERT_LINEARS: tuple[Op, ...] = tuple(_make_op(form, has_gate) for form in FORMS for has_gate in (False, True))
