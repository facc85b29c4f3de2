# SPDX-License-Identifier: Apache-2.0
"""Views of caches as ONNX Runtime's tensors: the memory itself, made once for every view."""

import numpy as np

from speccompile.backends.onnxruntime import bindings
from speccompile.backends.onnxruntime.bindings import CacheValues
from speccompile.backends.onnxruntime.buffers import BoundCache, CacheBuffers

SIZES = {"k_cache.0": (2, 4), "v_cache.0": (1, 8)}


def make_values() -> tuple[CacheBuffers, CacheValues]:
    buffers = CacheBuffers(SIZES, max_slots=3, max_rows=512)
    return buffers, CacheValues([BoundCache(name, buffers, index) for index, name in enumerate(SIZES)])


def test_values_are_the_slots_of_the_present_view():
    buffers, values = make_values()
    for rows in (100, 300):
        buffers.grow(rows)
        for first_slot, batch in ((0, 1), (0, 3), (1, 2)):
            for index, (value, (heads, width)) in enumerate(
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
