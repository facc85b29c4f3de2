# SPDX-License-Identifier: Apache-2.0
"""Packed weights: what is unpacked are the weights, or the nearest that the form can hold."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from speccompile.ops.packing import FORMS, interleave_gate, pack, unpack, unpack_levels

SIZES = [(1, 1), (33, 70), (128, 96)]


def weight_of(num_in: int, num_out: int) -> np.ndarray:
    return np.random.default_rng(num_in).standard_normal((num_in, num_out)).astype(np.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_in", "num_out"), SIZES)
def test_unpacked_weights_are_the_weights(form: str, num_in: int, num_out: int) -> None:
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


def test_places_of_a_weight() -> None:
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
def test_levels_stay_in_range_where_float16_scales_are_coarse(form: str) -> None:
    for size in (1e-9, 3e-7, 1e-5, 1.0, 1e9):
        weight = weight_of(64, 32) * np.float32(size)
        packed = pack(weight, form)
        levels = unpack_levels(packed.weights, form)
        assert packed.scales is not None and np.isfinite(packed.scales).all()
        assert levels.min() >= (-127 if form == "Int8" else -8) and levels.max() <= (127 if form == "Int8" else 7)


def test_gate_and_up_stand_side_by_side_in_a_panel() -> None:
    weight = weight_of(3, 40)
    mixed = interleave_gate(weight)
    assert mixed.shape == (3, 64)
    assert np.array_equal(mixed[:, :16], weight[:, :16]) and np.array_equal(mixed[:, 16:32], weight[:, 20:36])
    assert np.array_equal(mixed[:, 32:36], weight[:, 16:20]) and np.array_equal(mixed[:, 48:52], weight[:, 36:])
    assert not mixed[:, 36:48].any() and not mixed[:, 52:].any()
