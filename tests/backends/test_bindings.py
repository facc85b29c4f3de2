# SPDX-License-Identifier: Apache-2.0
"""Bindings are made once for each combination of shapes, whatever the views do in between; void rows are never read."""

from typing import Any

import numpy as np
import pytest

from speccompile.backends.onnxruntime import bindings
from speccompile.core import specs
from tests.backends.test_engines import TOKENS, feed

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
