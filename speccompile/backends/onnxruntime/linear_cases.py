# SPDX-License-Identifier: Apache-2.0
"""Random packed weights of every form, and calls of the packed linears for the self-test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from speccompile.ops.grid import Grid
from speccompile.ops.op import Op
from speccompile.ops.packed_linear import PACKED_LINEARS
from speccompile.ops.packing import GROUP, Packed, gate_columns, has_minimums, is_int4, is_integer, pack, pack_grid

NUM_ROWS = 7  # more than one tile of rows in most instruction sets


def random_grid(form: str, num_in: int, num_out: int, seed: int, *, group: int, dtype: str) -> Grid:
    """Returns weights near a normal distribution's of 0.05 on a grid of an integer form.

    Args:
        form: of `packing.FORMS`.
        num_in: inputs of the linear.
        num_out: its outputs.
        seed: of the numbers.
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
    """Returns the form of an op with packed weights."""
    return op.name.rsplit("Linear", 1)[1]


def linear_cases(num_in: int = 70, num_out: int = 52) -> Iterator[tuple[Op, dict[str, Any], dict[str, int | float]]]:
    """Yields a call of every packed linear, and with minimums one of 16 and one of whole rows.

    The sizes need padding in every direction.
    """
    rng = np.random.default_rng(0)
    for op in PACKED_LINEARS:
        others: tuple[dict[str, Any], ...] = ()
        for grid in ({}, *(others if is_integer(form_of(op)) and op.name.startswith("PackedLinear") else ())):
            has_gate = "activation" in op.attributes
            packed = random_packed(form_of(op), num_in, num_out, 0, has_gate=has_gate, **grid)
            given = {
                "x": rng.standard_normal((1, NUM_ROWS, num_in)).astype(np.float32),
                "residual": rng.standard_normal((1, NUM_ROWS, num_in)).astype(np.float32),
                "gamma": rng.standard_normal(num_in).astype(np.float32),
                **packed.constants,
                "bias": rng.standard_normal(num_out).astype(np.float32),
            }
            attributes = {**op.attributes, "num_in": num_in, "num_out": num_out, **packed.attributes}
            yield op, {t.name: given[t.name] for t in op.inputs}, attributes
