# SPDX-License-Identifier: Apache-2.0
"""FiniteToken: rows that are not finite are detected by every executor, beside rows that are."""

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from speccompile.ops.finite_token import finite_token
from tests.lab.graphs import open_session
from tests.ops.op_lab import model_of
from tests.ops.tensorrt.lab import body_model

VALUES = {"nan": np.nan, "inf": np.inf, "both": np.array([np.inf, -np.inf]), "beyond": 1e19, "masked": -np.inf}


def case_of(vocab: int, value: object) -> dict[str, np.ndarray]:
    """Four slots of three rows; the second and the last have one row with the value."""
    logits = np.random.default_rng(vocab).normal(size=(4, 3, vocab)).astype(np.float32) * 30
    at = [0, vocab - 1] if np.size(value) > 1 else [vocab // 2]
    logits[1, 2, at] = logits[3, 0, at] = value
    return {"logits": logits, "next_token": np.array([0, 1, 2, 3])}


@pytest.mark.parametrize("vocab", [5, 64, 1000])
@pytest.mark.parametrize("name", VALUES)
def test_slots_with_such_a_row_get_no_token(vocab, name):
    case = case_of(vocab, VALUES[name])
    wanted = [0, 1, 2, 3] if name == "masked" else [0, -1, 2, -1]
    runs = [
        finite_token(**case),
        open_session(model_of("FiniteToken")).run(None, case),
        ReferenceEvaluator(body_model("FiniteToken", {"vocab": vocab})).run(None, case),
    ]
    for (got,) in runs:
        assert got.dtype == np.int64 and got.tolist() == wanted


def test_sums_of_half_precision_logits_do_not_overflow():
    logits = np.full((1, 1, 5000), 30, np.float16)  # their sum is beyond float16
    assert finite_token(logits, np.array([7]))[0].tolist() == [7]
    dtypes = {"logits": "float16"}
    [got] = ReferenceEvaluator(body_model("FiniteToken", {"vocab": 5000}, dtypes=dtypes)).run(
        None, {"logits": logits, "next_token": np.array([7])}
    )
    assert got.tolist() == [7]
