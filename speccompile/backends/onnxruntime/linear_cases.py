# SPDX-License-Identifier: Apache-2.0
"""Random packed weights of every form, and calls of the ops that read them for the self-test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from speccompile.ops.grid import Grid
from speccompile.ops.op import Op
from speccompile.ops.packed_linear import PACKED_LINEARS
from speccompile.ops.packed_rows import PACKED_ROWS
from speccompile.ops.packing import GROUP, Packed, gate_columns, has_minimums, is_int4, is_integer, pack, pack_grid

NUM_ROWS = 7  # more than one tile of rows in most instruction sets


def random_grid(form: str, num_in: int, num_out: int, seed: int, *, group: int, dtype: str) -> Grid:
    """Returns weights near a normal distribution's of 0.05 on a grid of an integer form.

    Args:
        group: inputs with one scale; 0: all.
        dtype: of scales and minimums, float16 or float32.
    """
    rng = np.random.default_rng(seed)
    bits = 4 if is_int4(form) else 8
    middle, group = 1 << (bits - 1), group or num_in
    dims = num_out, -(-num_in // group)
    scales = (rng.choice([-1, 1], dims) * rng.uniform(0.05, 0.15, dims) / middle).astype(dtype)
    minimums = (-middle * scales * rng.uniform(0.9, 1.1, dims)).astype(dtype) if has_minimums(form) else None
    levels = np.clip(rng.normal(middle, middle / 3, (num_out, num_in)), 0, 2 * middle - 1).astype(np.uint8)
    return Grid(levels, scales, group, bits, 0 if has_minimums(form) else middle, minimums)


def random_packed(
    form: str,
    num_in: int,
    num_out: int,
    seed: int,
    *,
    has_gate: bool = False,
    group: int = GROUP,
    unit: int = GROUP,
    dtype: str = "float16",
) -> Packed:
    """Returns random packed weights; `group`, `unit` and `dtype` say what grid an integer form has."""
    if not is_integer(form):
        weight = np.random.default_rng(seed).normal(0, 0.05, (num_in, num_out)).astype(np.float32)
        return pack(weight[:, gate_columns(num_out)] * (gate_columns(num_out) >= 0) if has_gate else weight, form)
    grid = random_grid(form, num_in, num_out, seed, group=group, dtype=dtype)
    got, packed = pack_grid(grid.take(gate_columns(num_out)) if has_gate else grid, unit=unit)
    assert got == form
    return packed


def form_of(op: Op) -> str:
    return op.name.replace("Linear", "Rows").rsplit("Rows", 1)[1]


# Every integer form is tried with these grids too.
OTHER_GRIDS: tuple[dict[str, Any], ...] = (
    {"group": 16, "dtype": "float32"},
    {"group": 96, "unit": 16},
    {"group": 0, "dtype": "float32"},
)


_Call = tuple[Op, dict[str, Any], dict[str, int | float]]


def row_cases(num_in: int = 70, num_out: int = 52) -> Iterator[_Call]:
    """Yields calls of every op that gathers rows of an embedding."""
    tokens = np.random.default_rng(0).integers(-num_out, num_out, (1, NUM_ROWS))
    for op in PACKED_ROWS:
        for grid in ({}, *(OTHER_GRIDS if is_integer(form_of(op)) else ())):
            packed = random_packed(form_of(op), num_in, num_out, 0, **grid)
            sizes = {"num_in": num_in, "num_out": num_out, "group": packed.group}
            attributes: dict[str, int | float] = {name: sizes[name] for name in op.attributes}
            yield op, {"tokens": tokens, **packed.constants}, attributes


def linear_cases(num_in: int = 70, num_out: int = 52) -> Iterator[_Call]:
    """Yields calls of every packed linear; the sizes need padding in every direction."""
    rng = np.random.default_rng(0)
    for op in PACKED_LINEARS:
        has_gate, form = "activation" in op.attributes, form_of(op)
        is_plain = is_integer(form) and op.name == f"PackedLinear{form}"
        for grid in ({}, *(OTHER_GRIDS if is_plain else ())):
            packed = random_packed(form, num_in, num_out, 0, has_gate=has_gate, **grid)
            given = {
                "x": rng.standard_normal((1, NUM_ROWS, num_in)).astype(np.float32),
                "residual": rng.standard_normal((1, NUM_ROWS, num_in)).astype(np.float32),
                "gamma": rng.standard_normal(num_in).astype(np.float32),
                **packed.constants,
                "bias": rng.standard_normal(num_out).astype(np.float32),
            }
            attributes = {**op.attributes, "num_in": num_in, "num_out": num_out, **packed.attributes}
            yield op, {t.name: given[t.name] for t in op.inputs}, attributes
