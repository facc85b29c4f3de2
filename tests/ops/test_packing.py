# SPDX-License-Identifier: Apache-2.0
"""Packed weights: what is unpacked are the weights, or the nearest that the form can hold."""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from speccompile.backends.onnxruntime.linear_cases import random_grid
from speccompile.ops.grid import Grid, common_kind, significant_bits
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
from tests.lab.graphs import open_session
from tests.plugins.cpu_lab import linear_case, linear_model, rows_for, run, twin_of

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


BODY_GRIDS: list[dict[str, Any]] = [
    {},
    {"unit": 16},
    {"group": 16, "dtype": "float32"},
    {"group": 64, "dtype": "float32"},
    {"group": 128, "unit": 16},
    {"group": 0, "dtype": "float32"},
]


@pytest.mark.parametrize("form", ["Int8", "Int4", "Int8Min", "Int4Min"])
@pytest.mark.parametrize("grid", BODY_GRIDS, ids=lambda grid: "_".join(map(str, grid.values())) or "default")
@pytest.mark.parametrize(("num_in", "num_out"), [(1, 2), (70, 52), (290, 34)])
def test_a_body_computes_what_the_twin_does(form, grid, num_in, num_out):
    for name in (f"PackedLinear{form}", f"NormGatedPackedLinear{form}"):
        constants, attributes = linear_case(name, num_in, num_out, **grid)
        session, feeds = open_session(linear_model(name, constants, attributes), None), rows_for(name, 5, num_in)
        for got, wanted in zip(run(session, feeds), twin_of(name, {**constants, **feeds}, attributes), strict=True):
            assert got.shape == wanted.shape
            # The order of float32 sums alone: activations and weights have the same levels.
            np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-6 * np.abs(wanted).max())
        assert run(session, {n: a[:, :0].copy() for n, a in feeds.items()})[0].shape[:2] == (1, 0)


NUM_IN = 96


def make(bits: int, zero: int | None, group: int, *, wide: bool, seed: int = 0, order: bool = False) -> Grid:
    """Random levels, also the outermost; scales of 11 bits, or of 18 where they are wide."""
    rng = np.random.default_rng(seed)
    levels = rng.integers(0, 1 << bits, (5, NUM_IN)).astype(np.uint8)
    levels[:, :2] = 0, (1 << bits) - 1
    shape = (5, -(-NUM_IN // group))
    scales = rng.uniform(0.01, 0.1, shape).astype(np.float16)
    if wide:
        scales = (scales.astype(np.float32) * rng.integers(33, 64, shape)).astype(np.float32)
    minimums = None if zero is not None else -rng.uniform(0, 1, shape).astype(scales.dtype)
    inputs = rng.permutation(NUM_IN).astype(np.int32) if order else None
    return Grid(levels, scales, group, bits, zero or 0, minimums, inputs)


KINDS_OF_GRIDS = {
    "4 bits": make(4, 8, 32, wide=False, seed=1),
    "2 bits": make(2, 2, 32, wide=False, seed=2),
    "4 bits, minimums": make(4, None, 32, wide=False, seed=3),
    "5 bits, minimums, float32": make(5, None, 16, wide=True, seed=4),
    "6 bits, float32": make(6, 32, 16, wide=True, seed=5),
    "8 bits, groups of 64": make(8, 128, 64, wide=False, seed=6),
    "8 bits, rows": make(8, 128, 1000, wide=False, seed=7),
}


@pytest.mark.parametrize(("first", "second"), [*itertools.combinations_with_replacement(KINDS_OF_GRIDS, 2)])
def test_a_common_kind_keeps_every_number(first, second):
    grids = [KINDS_OF_GRIDS[first], KINDS_OF_GRIDS[second]]
    kind = common_kind([grid.kind for grid in grids])
    assert kind is not None
    for grid in grids:
        held = grid.to(kind)
        assert held.kind.bits == kind.bits and held.levels.max() < 1 << kind.bits
        assert (held.minimums is not None) == kind.has_minimums and held.group == (kind.group or NUM_IN)
        np.testing.assert_array_equal(held.weight(), grid.weight())
    if first == second:
        assert kind == grids[0].kind


def test_grids_that_have_no_kind_in_common():
    """Orders differ; or a scale of 24 bits times a level, and a minimum, would be rounded twice."""
    ordered = make(4, 8, 32, wide=False, order=True)
    assert common_kind([ordered.kind, KINDS_OF_GRIDS["4 bits"].kind]) is None
    assert common_kind([ordered.kind, make(4, 8, 32, wide=False, seed=9, order=True).kind]) is None
    assert common_kind([ordered.kind, ordered.kind]) == ordered.kind
    fine = make(4, 8, 32, wide=True)
    fine = Grid(fine.levels, np.nextafter(fine.scales, np.float32(9)), 32, 4, 8)
    assert fine.kind.scale_bits == 24
    assert common_kind([fine.kind, KINDS_OF_GRIDS["8 bits, rows"].kind]) is not None
    assert common_kind([fine.kind, KINDS_OF_GRIDS["4 bits, minimums"].kind]) is None


@pytest.mark.parametrize(("value", "bits"), [(1.0, 1), (0.0, 1), (3.0, 2), (-2.5, 3), (1 + 2**-23, 24)])
def test_significant_bits(value, bits):
    assert significant_bits(np.array([[1.0, value]], np.float32)) == bits


def test_significant_bits_of_a_denormal():
    """Given by its bits: a thread that flushes denormals takes it for 0."""
    assert significant_bits(np.array([[1]], np.uint32).view(np.float32)) == 24


@pytest.mark.parametrize("name", KINDS_OF_GRIDS)
def test_outputs_are_taken_and_others_are_zeros(name):
    grid = KINDS_OF_GRIDS[name]
    taken = grid.take(np.array([3, -1, 0, 3])).weight()
    np.testing.assert_array_equal(taken, [grid.weight()[3], np.zeros(NUM_IN), grid.weight()[0], grid.weight()[3]])


def test_the_bytes_of_a_kind():
    assert KINDS_OF_GRIDS["4 bits"].kind.num_bytes(5, NUM_IN) == 5 * (NUM_IN // 2 + 3 * 2)
    assert KINDS_OF_GRIDS["5 bits, minimums, float32"].kind.num_bytes(5, NUM_IN) == 5 * (NUM_IN + 6 * 8)
    assert KINDS_OF_GRIDS["8 bits, rows"].kind.num_bytes(5, NUM_IN) == 5 * (NUM_IN + 2)
    assert str(KINDS_OF_GRIDS["4 bits, minimums"].kind) == "4 bits, float16 scale and minimum for 32 inputs"
    assert str(KINDS_OF_GRIDS["8 bits, rows"].kind) == "8 bits, float16 scale for all inputs"
