# SPDX-License-Identifier: Apache-2.0
"""LowRank: each slot's adapter alone changes its rows, by every executor, in bits that no other row decides."""

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from speccompile.ops.low_rank import low_rank
from tests.lab.graphs import open_session
from tests.ops.op_lab import model_of


def case_of(batch: int, nodes: int, rank: int, num_in: int = 33, num_out: int = 47) -> dict[str, np.ndarray]:
    """Slot i has adapter i modulo 4, of which 0 is zeros."""
    source = np.random.default_rng(rank)
    sizes = {
        "base": (batch, nodes, num_out),
        "x": (batch, nodes, num_in),
        "a": (4, rank, num_in),
        "b": (4, rank, num_out),
    }
    case = {name: source.standard_normal(size, np.float32) for name, size in sizes.items()}
    case["a"][0] = case["b"][0] = 0
    return {name: case[name] for name in ("base", "x")} | {
        "adapter": np.arange(batch) % 4,
        "a": case["a"],
        "b": case["b"],
    }


@pytest.mark.parametrize(("batch", "nodes", "rank"), [(1, 1, 1), (1, 5, 8), (5, 1, 3), (6, 4, 16)])
def test_rows_are_those_of_the_merged_weights(batch, nodes, rank):
    case = case_of(batch, nodes, rank)
    exact = {name: value.astype(np.float64) for name, value in case.items() if name != "adapter"}
    weights = np.einsum("nri,nro->nio", exact["a"], exact["b"])[case["adapter"]]
    wanted = exact["base"] + exact["x"] @ weights
    runs = [
        low_rank(**case),
        open_session(model_of("LowRank")).run(None, case),
        ReferenceEvaluator(model_of("LowRank")).run(None, case),
    ]
    for (got,) in runs:
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, wanted, atol=2e-4)  # sums of 33 * 16 products of size 1 in float32
        assert np.array_equal(got[case["adapter"] == 0], case["base"][case["adapter"] == 0])


@pytest.mark.parametrize("rank", [1, 8, 40])
def test_a_row_has_the_bits_that_it_has_alone(rank):
    case, session = case_of(6, 9, rank), open_session(model_of("LowRank"))
    [whole] = session.run(None, case)
    for slot in range(6):
        for node in (0, 8):
            rows = {name: case[name][slot : slot + 1, node : node + 1] for name in ("base", "x")}
            alone = {**case, **rows, "adapter": case["adapter"][slot : slot + 1]}
            assert np.array_equal(session.run(None, alone)[0][0, 0], whole[slot, node])


def test_an_adapter_that_there_is_not_is_refused():
    with pytest.raises(IndexError, match="an adapter outside 0 to 3"):
        low_rank(**{**case_of(2, 1, 2), "adapter": np.array([0, 4])})
