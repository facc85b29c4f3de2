# SPDX-License-Identifier: Apache-2.0
"""A row's product does not depend on the rows beside it, whatever kernels the BLAS has: the oracle needs that."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from speccompile.ops.row_products import matmul_rows

ROOT = Path(__file__).parents[2]
SIZES = ((48, 96), (96, 48), (64, 33), (7, 5), (160, 34))
HAS_AVX2 = Path("/proc/cpuinfo").exists() and " avx2" in Path("/proc/cpuinfo").read_text()
REFERENCE = "tests/runtime/test_recurrent_trees.py::test_the_reference_engine_scores_trees_with_the_same_texts"


def check_rows() -> None:
    from onnx import parser
    from onnx.reference import ReferenceEvaluator

    from speccompile.ops.row_products import row_ops

    rng = np.random.default_rng(0)
    for inner, columns in SIZES:
        a, b = rng.normal(size=(17, inner)).astype(np.float32), rng.normal(size=(inner, columns)).astype(np.float32)
        heads = rng.normal(size=(2, 3, 9, inner)).astype(np.float32), rng.normal(size=(2, 3, inner, columns))
        texts = ("MatMul(a, b)", "Gemm<transB = 1, alpha = 0.5>(a, bt, c)")
        for text in texts:
            graph = f"(float[n, k] a, float[k, m] b, float[m, k] bt, float[m] c) => (float[n, m] y) {{ y = {text} }}"
            model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {graph}')
            evaluator = ReferenceEvaluator(model, new_ops=row_ops())
            feeds = {"b": b, "bt": np.ascontiguousarray(b.T), "c": b[0]}
            whole = evaluator.run(None, {"a": a, **feeds})[0]
            right = a @ b if text.startswith("MatMul") else 0.5 * (a @ b) + b[0]
            np.testing.assert_allclose(whole, right, rtol=1e-4, atol=1e-4)  # float32 sums of up to 160 terms
            for num in (1, 2, 3, 4, 8, 16):
                np.testing.assert_array_equal(evaluator.run(None, {"a": a[:num], **feeds})[0], whole[:num])
        whole = matmul_rows(*heads)
        np.testing.assert_allclose(whole, heads[0] @ heads[1], rtol=1e-4, atol=1e-4)
        for num in (1, 2, 5):
            np.testing.assert_array_equal(matmul_rows(heads[0][:, :, :num], heads[1]), whole[:, :, :num])


def test_rows_have_their_own_bits():
    check_rows()


def run_child(*arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "OPENBLAS_CORETYPE": "Haswell", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=variables, capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.live
@pytest.mark.skipif(not HAS_AVX2, reason="kernels of Haswell need AVX2")
def test_rows_have_their_own_bits_with_kernels_that_look_at_their_number():
    child = run_child("-c", "from tests.ops.test_row_products import check_rows; check_rows()")
    assert child.returncode == 0, child.stderr


@pytest.mark.live
@pytest.mark.skipif(not HAS_AVX2, reason="kernels of Haswell need AVX2")
def test_the_reference_engine_scores_trees_with_such_kernels():
    child = run_child("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", REFERENCE)
    assert child.returncode == 0 and "1 passed" in child.stdout, child.stdout + child.stderr
