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
    rows1 = Unsqueeze(attr.num_in, [0])
    given = Reshape(tokens, [-1, 1])
    counted = Where(given < 0, given + attr.num_out, given)
    panels = Where((counted < 0) | (counted >= attr.num_out), {1 << 40}, counted / {COLUMNS})
    columns = counted % {COLUMNS}
    num_tokens = Shape(given, end=1)
    rows_shape = Concat(Shape(tokens), rows1, axis=0)
"""


def _gathered(source: str, name: str, count: str, inner: tuple[int, ...]) -> str:
    """Returns the statements for `name` [tokens, count, ...]: what `source` has at the tokens' panels and columns.

    `source` is [panels, ..., 32, ...] with `inner` dims before the 32, besides the first two; `count` names [1], the
    number of entries within a column.
    """
    size = inner[0] if inner else 1
    parts = ("panels", f"{name}_steps", *((f"{name}_inner",) if inner else ()), "columns")
    index = ", ".join(f"Unsqueeze(Expand({part}, {name}_shape), [-1])" for part in parts)
    return f"""
    {name}_places = Range(0, Squeeze({count}), 1)
    {name}_steps = {name}_places / {size}
    {name}_inner = {name}_places % {size}
    {name}_shape = Concat(num_tokens, {count}, axis=0)
    {name} = GatherND({source}, Concat({index}, axis=-1))
    """


def _spread(name: str) -> str:
    return f"""
    {_gathered(name, f"group_{name}", "groups", ())}
    times_{name} = Concat([1, 1], group1, axis=0)
    all_{name} = Flatten(Expand(Unsqueeze(float32(group_{name}), [-1]), times_{name}), axis=1)
    own_{name} = Slice(all_{name}, [0], rows1, [1])
    """


def _grid_rows(form: str) -> str:
    step = 8 if is_int4(form) else 4
    levels = f"{nibbles('chosen', 2)}\n    levels = Flatten(halves, axis=1)"
    total = "whole = own_levels * own_scales"
    if has_minimums(form):
        total = f"{_spread('minimums')}\n    {total} + own_minimums"
    return f"""
    group1 = Unsqueeze(attr.group, [0])
    groups = (rows1 + (group1 - [1])) / group1
    places = (rows1 + [{step - 1}]) / [{step}]
    {_gathered("weights", "chosen", "places", (GROUP // step,))}
    {levels if is_int4(form) else "levels = Flatten(chosen, axis=1)"}
    own_levels = float32(Slice(levels, [0], rows1, [1])) - {float(ZEROS[form])}
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
    pairs = (rows1 + [1]) / [2]
    {_gathered("weights", "chosen", "pairs", ())}
    whole = Slice(Flatten(float32(chosen), axis=1), [0], rows1, [1])
    """
    return f"{_PLACES}\n    {parts}\n    rows = Reshape(whole, rows_shape, allowzero=1)"


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
