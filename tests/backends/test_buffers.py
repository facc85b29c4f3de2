# SPDX-License-Identifier: Apache-2.0
"""Cache views grow, shrink and move without losing a row."""

import numpy as np
import pytest

from speccompile.backends.onnxruntime.buffers import CacheBuffers, bucket_rows


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1000, 1024, 1025, 5000, 32768])
def test_buckets_hold_their_rows_without_great_waste(rows):
    bucket = bucket_rows(rows, 1 << 20)
    assert rows <= bucket <= max(rows + 128, rows * 1.25)
    assert bucket_rows(bucket, 1 << 20) == bucket
    assert bucket_rows(rows, rows) == rows


def filled(rows: int) -> CacheBuffers:
    buffers = CacheBuffers({"k": (2, 3), "v": (1, 5)}, max_slots=3, max_rows=700)
    buffers.use(3)
    buffers.grow(rows)
    for index in range(2):
        view = buffers.view(index)
        view[...] = np.random.default_rng(index).standard_normal(view.shape)
    return buffers


def test_growing_keeps_every_row_of_every_slot_and_the_addresses():
    buffers = filled(100)
    before, addresses = [buffers.view(i).copy() for i in range(2)], [buffers.view(i).ctypes.data for i in range(2)]
    assert not buffers.grow(128)
    assert buffers.grow(300) and buffers.rows == 384
    for index in range(2):
        np.testing.assert_array_equal(buffers.view(index)[:, :, :128], before[index])
        assert buffers.view(index).ctypes.data == addresses[index]
    assert buffers.grow(700) and buffers.rows == 700


def test_shrinking_keeps_the_first_rows():
    buffers = filled(650)
    before = buffers.view(1).copy()
    assert buffers.shrink(130) and buffers.rows == 256
    np.testing.assert_array_equal(buffers.view(1), before[:, :, :256])
    assert not buffers.shrink(200)


def test_moving_a_slot_copies_all_its_rows_and_no_other():
    buffers = filled(128)
    before = buffers.view(0).copy()
    buffers.move_slot(2, 0)
    np.testing.assert_array_equal(buffers.view(0), before[[2, 1, 2]])


def test_moving_and_exchanging_some_rows_leaves_all_others():
    buffers = filled(128)
    before = [buffers.view(index).copy() for index in range(2)]
    buffers.move_slot(2, 0, 50)
    buffers.swap_slots(1, 2, 70)
    for index in range(2):
        wanted = before[index].copy()
        wanted[0, :, :50] = before[index][2, :, :50]
        wanted[[1, 2], :, :70] = before[index][[2, 1], :, :70]
        np.testing.assert_array_equal(buffers.view(index), wanted)


@pytest.mark.parametrize("num_used", [0, 1, 2])
def test_rows_of_slots_in_use_survive_changes_of_the_view_and_others_are_zero_when_they_are_used(num_used):
    buffers = filled(650)
    buffers.num_used = num_used  # the others are void
    before = [buffers.view(index).copy() for index in range(2)]
    buffers.shrink(130)
    for index in range(2):
        buffers.view(index)[num_used:] = np.nan
    buffers.grow(400)
    buffers.use(3)
    for index in range(2):
        view = buffers.view(index)
        np.testing.assert_array_equal(view[:num_used, :, :256], before[index][:num_used, :, :256])
        assert not view[num_used:].any() and not view[:, :, 256:].any()


def test_a_slot_is_used_once_something_is_moved_to_it():
    buffers = filled(128)
    buffers.num_used = 1
    before = buffers.view(0).copy()
    buffers.move_slot(0, 1)
    buffers.grow(200)
    np.testing.assert_array_equal(buffers.view(0)[:2, :, :128], before[[0, 0]])
    buffers.swap_slots(1, 2, 128)
    buffers.grow(300)
    np.testing.assert_array_equal(buffers.view(0)[2, :, :128], before[0])
