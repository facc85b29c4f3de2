# SPDX-License-Identifier: Apache-2.0
"""Bodies of packed linears against their twins under ONNX Runtime, on grids of all kinds."""

from typing import Any

import numpy as np
import pytest

from tests.plugins.cpu_lab import linear_case, linear_model, rows_for, run, session_of, twin_of

GRIDS: list[dict[str, Any]] = [
    {},
    {"unit": 16},
    {"group": 16, "dtype": "float32"},
    {"group": 64, "dtype": "float32"},
    {"group": 128, "unit": 16},
    {"group": 0, "dtype": "float32"},
]


@pytest.mark.parametrize("form", ["Int8", "Int4", "Int8Min", "Int4Min"])
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: "_".join(map(str, grid.values())) or "default")
@pytest.mark.parametrize(("num_in", "num_out"), [(1, 2), (70, 52), (290, 34)])
def test_a_body_computes_what_the_twin_does(form, grid, num_in, num_out):
    for name in (f"PackedLinear{form}", f"NormGatedPackedLinear{form}"):
        constants, attributes = linear_case(name, num_in, num_out, **grid)
        session, feeds = session_of(linear_model(name, constants, attributes), None), rows_for(name, 5, num_in)
        for got, wanted in zip(run(session, feeds), twin_of(name, {**constants, **feeds}, attributes), strict=True):
            assert got.shape == wanted.shape
            # The order of float32 sums alone: activations and weights have the same levels.
            np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-6 * np.abs(wanted).max())
        assert run(session, {n: a[:, :0].copy() for n, a in feeds.items()})[0].shape[:2] == (1, 0)
