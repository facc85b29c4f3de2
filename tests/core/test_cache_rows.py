# SPDX-License-Identifier: Apache-2.0
"""Rows of caches change slots together with their number."""

import numpy as np
import pytest

from speccompile.core.proposer import CacheRows


class Engine:
    def __init__(self):
        self.calls = []

    def move_slot(self, source, dest, rows=None):
        self.calls.append(("move", source, dest, rows))

    def swap_slots(self, first, second, rows):
        self.calls.append(("swap", first, second, rows))


@pytest.mark.parametrize("make", [list, lambda lengths: np.array(lengths, dtype=np.int64)])
def test_lengths_go_with_rows(make):
    engine, lengths = Engine(), make([5, 2, 9])
    cache = CacheRows(engine, lengths)
    cache.move(2, 1)
    assert list(lengths) == [5, 9, 9]
    cache.swap(0, 2)
    assert list(lengths) == [9, 9, 5]
    cache.copy(2, 0, 3)
    cache.copy(2, 1, 7)  # more than there are
    assert list(lengths) == [3, 5, 5]
    assert engine.calls == [("move", 2, 1, 9), ("swap", 0, 2, 9), ("move", 2, 0, 3), ("move", 2, 1, 5)]
    assert all(type(rows) is int for *_, rows in engine.calls)
