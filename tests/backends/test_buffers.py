# SPDX-License-Identifier: Apache-2.0
"""Cache views grow, shrink and move without losing a row; values and bindings of them are made once."""

from typing import Any

import numpy as np
import pytest

from speccompile.backends.onnxruntime import bindings
from speccompile.backends.onnxruntime.bindings import CacheValues
from speccompile.backends.onnxruntime.buffers import BoundCache, CacheBuffers, bucket_rows
from speccompile.core import specs
from tests.backends.test_engines import TOKENS, feed


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1000, 1024, 1025, 5000, 32768])
def test_buckets_hold_their_rows_without_great_waste(rows):
    bucket = bucket_rows(rows, 1 << 20)
    assert rows <= bucket <= max(rows + 128, rows * 1.25)
    assert bucket_rows(bucket, 1 << 20) == bucket
    assert bucket_rows(rows, rows) == rows


def filled(rows: int) -> CacheBuffers:
    buffers = CacheBuffers({"k": (2, 3, "float32"), "v": (1, 5, "float32")}, max_slots=3, max_rows=700)
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


SIZES = {"k_cache.0": (2, 4, "float32"), "v_cache.0": (1, 8, "float32")}


def make_values() -> tuple[CacheBuffers, CacheValues]:
    buffers = CacheBuffers(SIZES, max_slots=3, max_rows=512)
    return buffers, CacheValues([BoundCache(name, buffers, index) for index, name in enumerate(SIZES)])


def test_values_are_the_slots_of_the_present_view():
    buffers, values = make_values()
    for rows in (100, 300):
        buffers.grow(rows)
        for first_slot, batch in ((0, 1), (0, 3), (1, 2)):
            for index, (value, (heads, width, _)) in enumerate(
                zip(values.get(first_slot, batch), SIZES.values(), strict=True)
            ):
                assert tuple(value.shape()) == (batch, heads, buffers.rows, width)
                assert value.data_ptr() == buffers.view(index)[first_slot:].ctypes.data
                buffers.view(index)[first_slot, 0, 7] = rows + index
                assert (value.numpy()[0, 0, 7] == rows + index).all()


def test_they_are_made_once_for_every_view_and_bounded_in_number(monkeypatch):
    buffers, values = make_values()
    first = values.get(0, 2)
    assert values.get(0, 2) is first and values.get(0, 1) is not first
    buffers.grow(300)
    assert values.get(0, 2) is not first
    buffers.shrink(1)
    assert values.get(0, 2) is first
    monkeypatch.setattr(bindings, "MAX_BINDINGS", 4)
    for batch in (1, 2, 3):
        for first_slot in range(4 - batch):
            assert next(iter(values.get(first_slot, batch)[0].shape())) == batch
            assert len(values._held) <= 4
    assert np.array_equal(values.get(0, 2)[1].numpy(), buffers.view(1)[:2])


CHUNKS = [100, 4, 1, 1, 60, 4, 1]  # the view grows


def read_text(engine: Any) -> np.ndarray:
    """Returns the logits of a text that is read in chunks; the engine begins anew."""
    engine.reset()
    rows, start = [], 0
    for size in CHUNKS:
        rows.append(engine.run(feed(TOKENS[start : start + size], start))[specs.LOGITS][0].copy())
        start += size
    return np.concatenate(rows)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The nodes and rows of every binding that is made."""
    found, make = [], bindings.Binding.__init__

    def init(self: Any, io: Any, first_slot: int, num_nodes: int, views: Any, max_length: int | None) -> None:
        found.append((num_nodes, views[0][1]))
        make(self, io, first_slot, num_nodes, views, max_length)

    monkeypatch.setattr(bindings.Binding, "__init__", init)
    return found


def test_growing_and_shrinking_views_makes_no_binding_twice(open_engine, made):
    engine = open_engine(form="fp32")
    first = read_text(engine)
    wanted = {(100, 128), (4, 128), (1, 128), (60, 256), (4, 256), (1, 256)}
    assert len(made) == len(wanted) and set(made) == wanted
    for _ in range(3):
        np.testing.assert_array_equal(read_text(engine), first)
    assert len(made) == len(wanted)


@pytest.mark.parametrize("limit", ["MAX_BINDINGS", "MAX_BYTES"])
def test_beyond_a_limit_bindings_are_made_anew(open_engine, made, monkeypatch, limit):
    wanted, num = read_text(open_engine(form="fp32")), len(made)
    engine = open_engine(form="fp32")
    monkeypatch.setattr(bindings, limit, 2 if limit == "MAX_BINDINGS" else 1)
    for _ in range(2):
        np.testing.assert_array_equal(read_text(engine), wanted)
    assert len(made) >= 3 * num - 2 and len(engine._bindings) <= 2


def test_rows_that_an_earlier_run_left_are_not_read(open_engine):
    engine = open_engine(form="fp32")  # ONNX Runtime's Attention multiplies every row of the view
    wanted = read_text(engine)
    for flat in engine.caches._flat:
        flat[...] = np.nan
    np.testing.assert_array_equal(read_text(engine), wanted)
    engine.run(feed(TOKENS[:5], 0), first_slot=1)
    assert np.isfinite(engine.run(feed(TOKENS[:5], 0), first_slot=2)[specs.LOGITS]).all()


def test_a_path_is_kept_in_every_view(open_engine):
    """The same shapes of lengths and path in a view of 128 rows, in one of 256, and in the first one again."""
    engine = open_engine(form="fp32")
    for num in (100, 200, 90):
        engine.reset()
        engine.run(feed(TOKENS[:num], 0))
        before = {name: rows.copy() for name, rows in engine.read_caches(0, num).items()}
        engine.compact(np.array([num - 5]), np.array([[0, 2, 4]]))
        for name, rows in engine.read_caches(0, num).items():
            kept = before[name][:, [num - 5, num - 3, num - 1]]
            np.testing.assert_array_equal(rows[:, num - 5 : num - 2], kept)
            np.testing.assert_array_equal(rows[:, : num - 5], before[name][:, : num - 5])
            assert not np.array_equal(kept, before[name][:, num - 5 : num - 2])


def test_rows_of_whole_cache_lines_begin_at_one():
    buffers = CacheBuffers({"k": (3, 64, "float32"), "v": (1, 64, "int8")}, max_slots=2, max_rows=300)
    assert [buffers.view(index).ctypes.data % 64 for index in range(2)] == [0, 0]
