# SPDX-License-Identifier: Apache-2.0
"""Packed weights: what is unpacked are the weights, or the nearest that the form can hold."""

import ml_dtypes
import numpy as np
import pytest

from speccompile.backends.onnxruntime.linear_cases import random_grid
from speccompile.ops.grid import Grid
from speccompile.ops.packing import (
    gate_columns,
    grid_form,
    interleave_gate,
    pack,
    pack_grid,
    packed_dims,
    unpack,
    unpack_levels,
)

SIZES = [(1, 1), (33, 70), (128, 96)]


def weight_of(num_in: int, num_out: int) -> np.ndarray:
    return np.random.default_rng(num_in).standard_normal((num_in, num_out)).astype(np.float32)


@pytest.mark.parametrize("form", ["F32", "Bf16", "Int8", "Int4"])
@pytest.mark.parametrize(("num_in", "num_out"), SIZES)
def test_unpacked_weights_are_the_weights(form, num_in, num_out):
    weight = weight_of(num_in, num_out)
    if form == "Bf16":
        weight = weight.astype(ml_dtypes.bfloat16).astype(np.float32)
    got = unpack(pack(weight, form), form)
    assert got.shape[1] % 32 == 0 and not got[num_in:].any() and not got[:, num_out:].any()
    if form in ("F32", "Bf16"):
        assert np.array_equal(got[:num_in, :num_out], weight)
        return
    # Half a step of the grid, a little more where rounding the scale to float16 moved the largest level.
    steps = np.abs(weight).max() / (127 if form == "Int8" else 8)
    most = 0.53 if form == "Int8" else 1.05  # an Int4 grid has no level +8
    assert np.abs(got[:num_in, :num_out] - weight).max() <= most * steps


def test_places_of_a_weight():
    """One weight at a time, at the place that the layout names."""
    for k, n in ((0, 0), (5, 33), (37, 31), (63, 63)):
        weight = np.zeros((64, 64), np.float32)
        weight[k, n] = 2.0
        panel, column, group, inner = n // 32, n % 32, k // 32, k % 32
        assert pack(weight, "F32").weights[panel, k, column] == 2
        assert pack(weight, "Bf16").weights[panel, k // 2, column, k % 2] == 2
        eight = pack(weight, "Int8")
        assert eight.weights[panel, group, inner // 4, column, inner % 4] == 128 + 127
        assert eight.scales is not None and eight.scales[panel, group, column] == np.float16(2 / 127)
        assert (eight.weights == 128).sum() == weight.size - 1
        four = pack(weight, "Int4")
        byte = four.weights[panel, group, inner // 8, column, inner % 4]
        assert (byte >> 4 if inner % 8 >= 4 else byte & 15) == 8 - 8  # the largest magnitude has level -8
        assert four.scales is not None and four.scales[panel, group, column] == np.float16(-0.25)


@pytest.mark.parametrize("form", ["Int8", "Int4"])
def test_levels_stay_in_range_where_float16_scales_are_coarse(form):
    for size in (1e-9, 3e-7, 1e-5, 1.0, 1e9):
        weight = weight_of(64, 32) * np.float32(size)
        packed = pack(weight, form)
        levels = unpack_levels(packed.weights, form)
        assert packed.scales is not None and np.isfinite(packed.scales).all()
        assert levels.min() >= (-127 if form == "Int8" else -8) and levels.max() <= (127 if form == "Int8" else 7)


def test_gate_and_up_stand_side_by_side_in_a_panel():
    weight = weight_of(3, 40)
    mixed = interleave_gate(weight)
    assert mixed.shape == (3, 64)
    assert np.array_equal(mixed[:, :16], weight[:, :16]) and np.array_equal(mixed[:, 16:32], weight[:, 20:36])
    assert np.array_equal(mixed[:, 32:36], weight[:, 16:20]) and np.array_equal(mixed[:, 48:52], weight[:, 36:])
    assert not mixed[:, 36:48].any() and not mixed[:, 52:].any()


GRIDS = [
    ("float16", 32, 32),
    ("float32", 16, 16),
    ("float32", 64, 32),
    ("float16", 32, 16),
    ("float32", 128, 16),
    ("float16", 0, 32),
]


@pytest.mark.parametrize("form", ["Int8", "Int4", "Int8Min", "Int4Min"])
@pytest.mark.parametrize(("dtype", "group", "unit"), GRIDS)
@pytest.mark.parametrize(("num_in", "num_out"), [*SIZES, (5, 40), (290, 34)])
def test_a_grid_stays_as_it_is(form, dtype, group, unit, num_in, num_out):
    grid = random_grid(form, num_in, num_out, 0, group=group, dtype=dtype)
    got, packed = pack_grid(grid, unit=unit)
    assert got == form and packed.scales is not None and packed.scales.dtype == dtype
    weight = unpack(packed, form)[:num_in, :num_out]
    assert np.array_equal(weight.T.view(np.int32), grid.weight().view(np.int32))
    assert packed.weights.shape == packed_dims(num_in, num_out, form)
    assert packed.scales.shape == (-(-num_out // 32), -(-num_in // packed.group), 32)
    assert packed.group % packed.unit == 0 and packed.unit in (16, unit)
    assert set(packed.attributes) == {n for n, v in (("group", packed.group), ("unit", packed.unit)) if v != 32}


def _small_grid(bits: int, zero: int, *, has_minimums: bool = False, group: int = 32) -> Grid:
    levels = np.tile(np.arange(1 << bits, dtype=np.uint8), -(-64 // (1 << bits)))[:64][None].repeat(33, axis=0)
    scales = np.full((33, -(-levels.shape[1] // group)), 0.25, np.float32)
    return Grid(levels, scales, group, bits, zero, scales * -3 if has_minimums else None)


@pytest.mark.parametrize(
    ("bits", "zero", "has_minimums", "form"),
    [
        *[(2, 2, False, "Int4"), (3, 4, False, "Int4"), (4, 8, False, "Int4"), (4, 7, False, "Int8")],
        *[(5, 16, False, "Int8"), (6, 32, False, "Int8"), (8, 128, False, "Int8"), (7, 0, False, "Int8")],
        *[(2, 0, True, "Int4Min"), (4, 0, True, "Int4Min"), (5, 0, True, "Int8Min"), (8, 0, True, "Int8Min")],
        (8, 127, False, "Int8Min"),  # -127 to 128: no signed byte
        (8, 0, False, "Int8Min"),
    ],
)
def test_the_form_of_a_grid(bits, zero, has_minimums, form):
    grid = _small_grid(bits, zero, has_minimums=has_minimums)
    assert grid_form(grid) == form
    got, packed = pack_grid(grid)
    assert got == form and np.array_equal(unpack(packed, form)[:64, :33].T, grid.weight())


def test_outputs_of_a_grid_in_the_order_of_a_gate_are_those_of_the_weights():
    grid = random_grid("Int4Min", 70, 52, 0, group=32, dtype="float16")
    form, packed = pack_grid(grid.take(gate_columns(52)))
    assert np.array_equal(unpack(packed, form)[:70], interleave_gate(grid.weight().T))


def test_a_group_that_no_unit_divides_is_refused():
    with pytest.raises(ValueError, match="groups of 24; expected a multiple of 16, or all of a row"):
        pack_grid(_small_grid(4, 8, group=24))
