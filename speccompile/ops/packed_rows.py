# SPDX-License-Identifier: Apache-2.0
"""Rows of an embedding from packed weights (`plugins/cpu/embedding.h`): PackedRows in the forms of `packed_linear`.

A row is a column of the weights [num_in, num_out], so a tied embedding needs no table of its own. A grid's rows are
rounded after the product and after the sum. Negative tokens count from the end; a token outside the vocabulary is an
error. The bodies gather from the packed weights as they are: nothing is unpacked at load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from speccompile.core.specs import TensorSpec
from speccompile.ops.op import Op
from speccompile.ops.packed_bodies import nibbles
from speccompile.ops.packed_linear import constant_specs
from speccompile.ops.packing import COLUMNS, FORMS, GROUP, ZEROS, Packed, has_minimums, is_int4, is_integer, unpack


def _twin(form: str) -> Callable[..., tuple[Any, ...]]:
    def twin(tokens: Any, *constants: Any, num_in: int, num_out: int, group: int = GROUP) -> tuple[Any, ...]:
        flat = np.where(tokens < 0, tokens + num_out, tokens).reshape(-1)
        if ((flat < 0) | (flat >= num_out)).any():
            raise IndexError(f"a token outside {-num_out} to {num_out - 1}")
        panels, columns = np.divmod(flat, COLUMNS)
        weights, scales, minimums = (*[constant[panels] for constant in constants], None, None)[:3]
        columns = columns + COLUMNS * np.arange(len(flat))
        rows = unpack(Packed(weights, scales, minimums, group), form)[:num_in, columns].T
        return (np.ascontiguousarray(rows, np.float32).reshape(*tokens.shape, num_in),)

    return twin


# Panel and column of each token [T, 1]; a token outside gets a panel that no gather finds.
_PLACES = f"""
    zero = Constant<value_ints = [0]>()
    one = Constant<value_ints = [1]>()
    last = Constant<value_ints = [-1]>()
    in_column = Constant<value_ints = [-1, 1]>()
    rows_in = Constant<value_int: int = @num_in>()
    rows1 = Unsqueeze(rows_in, zero)
    vocabulary = Constant<value_int: int = @num_out>()
    width = Constant<value_int = {COLUMNS}>()
    nowhere = Constant<value_int = {1 << 40}>()
    none = Constant<value_int = 0>()
    single = Constant<value_int = 1>()
    given = Reshape(tokens, in_column)
    from_end = Add(given, vocabulary)
    is_negative = Less(given, none)
    counted = Where(is_negative, from_end, given)
    is_small = Less(counted, none)
    is_large = GreaterOrEqual(counted, vocabulary)
    is_outside = Or(is_small, is_large)
    known_panels = Div(counted, width)
    panels = Where(is_outside, nowhere, known_panels)
    columns = Mod(counted, width)
    num_tokens = Shape<end = 1>(given)
    tokens_shape = Shape(tokens)
    rows_shape = Concat<axis = 0>(tokens_shape, rows1)
"""


def _gathered(source: str, name: str, count: str, inner: tuple[int, ...]) -> str:
    """Returns the statements for `name` [tokens, count, ...]: what `source` has at the tokens' panels and columns.

    Args:
        source: [panels, ..., 32, ...], `inner` dims before the 32 beside the first two, which `count` has all of.
        count: name of [1], how many entries there are within a column.
        inner: sizes of the dims between the second one and the 32.
    """
    size = inner[0] if inner else 1
    parts = ("panels", f"{name}_steps", *((f"{name}_inner",) if inner else ()), "columns")
    wide = "\n    ".join(
        f"{name}_wide{i} = Expand({part}, {name}_shape)\n    {name}_part{i} = Unsqueeze({name}_wide{i}, last)"
        for i, part in enumerate(parts)
    )
    return f"""
    {name}_count = Squeeze({count})
    {name}_places = Range(none, {name}_count, single)
    {name}_size = Constant<value_int = {size}>()
    {name}_steps = Div({name}_places, {name}_size)
    {name}_inner = Mod({name}_places, {name}_size)
    {name}_shape = Concat<axis = 0>(num_tokens, {count})
    {wide}
    {name}_at = Concat<axis = -1>({", ".join(f"{name}_part{i}" for i in range(len(parts)))})
    {name} = GatherND({source}, {name}_at)
    """


def _spread(name: str) -> str:
    return f"""
    {_gathered(name, f"group_{name}", "groups", ())}
    wide_{name} = Cast<to = 1>(group_{name})
    each_{name} = Unsqueeze(wide_{name}, last)
    times_{name} = Concat<axis = 0>(one, one, group1)
    groups_of_{name} = Expand(each_{name}, times_{name})
    all_{name} = Flatten<axis = 1>(groups_of_{name})
    own_{name} = Slice(all_{name}, zero, rows1, one)
    """


def _grid_rows(form: str) -> str:
    step = 8 if is_int4(form) else 4
    levels = f"{nibbles('chosen', 2)}\n    levels = Flatten<axis = 1>(halves)"
    total = "stepped = Mul(own_levels, own_scales)"
    if has_minimums(form):
        total += f"\n    {_spread('minimums')}\n    whole = Add(stepped, own_minimums)"
    else:
        total += "\n    whole = Identity(stepped)"
    return f"""
    group0 = Constant<value_int: int = @group>()
    group1 = Unsqueeze(group0, zero)
    before_group = Sub(group1, one)
    groups_end = Add(rows1, before_group)
    groups = Div(groups_end, group1)
    step = Constant<value_ints = [{step}]>()
    before_step = Constant<value_ints = [{step - 1}]>()
    places_end = Add(rows1, before_step)
    places = Div(places_end, step)
    {_gathered("weights", "chosen", "places", (GROUP // step,))}
    {levels if is_int4(form) else "levels = Flatten<axis = 1>(chosen)"}
    stored = Slice(levels, zero, rows1, one)
    wide_levels = Cast<to = 1>(stored)
    middle = Constant<value = float {{{float(ZEROS[form])}}}>()
    own_levels = Sub(wide_levels, middle)
    {_spread("scales")}
    {total}
    """


def _body(form: str) -> str:
    """Returns the statements: gather, widen, drop the padding."""
    if is_integer(form):
        parts = _grid_rows(form)
    elif form == "F32":
        parts = f"{_gathered('weights', 'whole', 'rows1', ())}"
    else:
        parts = f"""
    two = Constant<value_ints = [2]>()
    pairs_end = Add(rows1, one)
    pairs = Div(pairs_end, two)
    {_gathered("weights", "chosen", "pairs", ())}
    wide = Cast<to = 1>(chosen)
    flat = Flatten<axis = 1>(wide)
    whole = Slice(flat, zero, rows1, one)
    """
    return f"{_PLACES}\n    {parts}\n    rows = Reshape<allowzero = 1>(whole, rows_shape)"


def _make_op(form: str) -> Op:
    attributes: dict[str, int | float] = {"num_in": 0, "num_out": 0}
    return Op(
        rows_op_name(form),
        (TensorSpec("tokens", ("batch", "nodes"), "int64"), *constant_specs(form)),
        (TensorSpec("rows", ("batch", "nodes", "num_in"), "float32"),),
        _twin(form),
        _body(form),
        attributes=attributes | ({"group": GROUP} if is_integer(form) else {}),
    )


def rows_op_name(form: str) -> str:
    return f"PackedRows{form}"


PACKED_ROWS: tuple[Op, ...] = tuple(map(_make_op, FORMS))
