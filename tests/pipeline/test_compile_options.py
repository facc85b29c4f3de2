# SPDX-License-Identifier: Apache-2.0
"""The options with which a graph is compiled."""

from types import SimpleNamespace

import pytest

from speccompile.bundle.graphs import compile_options


@pytest.mark.parametrize(("rows", "nodes"), [(1024, 16), (100, 3), (24, 7)])
def test_cache_rows_hold_a_padded_step_and_keep_slots_aligned(rows, nodes):
    engine = SimpleNamespace(max_draft_nodes=nodes, max_batch_size=4, options=None)
    options = compile_options(SimpleNamespace(engine=engine, dtype="float16"), rows)
    assert rows + nodes + 1 <= options.max_rows < rows + nodes + 9
    assert 2 * options.max_rows * 16 % 256 == 0  # a head of 16 halves is the narrowest


def test_a_graph_without_caches_has_no_rows():
    engine = SimpleNamespace(max_draft_nodes=4, max_batch_size=4, options=None)
    assert compile_options(SimpleNamespace(engine=engine, dtype="float16"), 0).max_rows == 0
