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
    given = Reshape(ids, [-1])
    experts = Where(given < 0, attr.num_experts, given)
    num_ids1 = Shape(experts)
    num_ids = Squeeze(num_ids1)
    per_row = num_ids / Max(Squeeze(Shape(x, start=0, end=1)), 1)
    numbers = Range(0, num_ids, 1)
    source = Gather(x, numbers / Max(per_row, 1), axis=0)
    chosen = Gather(weights, experts, axis=0)
    chosen_bias = Gather(bias, experts, axis=0)
"""

# By form: `matrix` [ids, panels, 32, K padded] float32 of the chosen weights.
_MATRIX = {
    "F32": "matrix = Transpose(chosen, perm=[0, 1, 3, 2])",
    "Bf16": "matrix = Reshape(Transpose(float32(chosen), perm=[0, 1, 3, 2, 4]), [0, 0, 0, -1])",
}


def _grid_matrix(form: str) -> str:
    if is_int4(form):
        stored = f"{nibbles('chosen', 4)}\n    stored = Transpose(halves, perm=[0, 1, 5, 2, 3, 4, 6])"
    else:
        stored = "stored = Transpose(chosen, perm=[0, 1, 4, 2, 3, 5])"
    of_units = "".join(
        f"""
    group_{name} = float32(Transpose(Gather({name}, experts, axis=0), perm=[0, 1, 3, 2]))
    {spread_groups(f"group_{name}", f"unit_{name}", 3)}
    own_{name} = Unsqueeze(unit_{name}, [-1])
    """
        for name in ("scales", *(("minimums",) if has_minimums(form) else ()))
    )
    return f"""
    {SIZES}
    {stored}
    unit_shape = Concat([0, 0, 0, -1], unit, axis=0)
    as_levels = Reshape(Slice(Reshape(stored, [0, 0, 0, -1]), [0], units * unit, [3]), unit_shape)
    levels = float32(as_levels) - {float(ZEROS[form])}
    {of_units}
    matrix = Reshape(levels * own_scales{" + own_minimums" if has_minimums(form) else ""}, [0, 0, 0, -1])
    """


def _columns(has_gate: bool) -> str:
    """Returns the statements for `kept` [ids, num_out, K padded] from `matrix`, padding of columns dropped."""
    sizes = "columns = Unsqueeze(attr.num_out, [0])"
    if not has_gate:
        return f"""{sizes}
    depth = Slice(Shape(matrix), [3], [4])
    kept = Slice(Reshape(matrix, Concat([0, -1], depth, axis=0)), [0], columns, [1])
    """
    return f"""{sizes}
    half_columns = columns / 2
    depth = Slice(Shape(matrix), [3], [4])
    turns = Reshape(matrix, Concat([0, 0, 2, {COLUMNS // 2}], depth, axis=0))
    gates, ups = Split(Transpose(turns, perm=[2, 0, 1, 3, 4]), axis=0, num_outputs=2)
    flat_shape = Concat(num_ids1, [-1], depth, axis=0)
    up_own = Slice(Reshape(ups, flat_shape), [0], half_columns, [1])
    kept = Concat(Slice(Reshape(gates, flat_shape), [0], half_columns, [1]), up_own, axis=1)
    """


# One product of a matrix with a vector for each id, so that no row depends on their number.
_PRODUCT = """
    width = Shape(source, start=1, end=2)
    own = Slice(kept, [0], width, [2])
    product = Squeeze(own @ Unsqueeze(Slice(rounded, [0], width, [1]), [2]), [2])
    biased = product + chosen_bias
"""


def _body(form: str, has_gate: bool) -> str:
    matrix = (
        f"{_grid_matrix(form)}{ROUNDED}" if is_integer(form) else f"{_MATRIX[form]}\n    rounded = Identity(source)"
    )
    end = GATE if has_gate else "y = Identity(biased)"
    return "\n    ".join((_ROUTES, matrix, _columns(has_gate), _PRODUCT, end))


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
