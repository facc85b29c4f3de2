# SPDX-License-Identifier: Apache-2.0
"""Matrix products whose rows do not depend on how many there are, for the oracle.

A BLAS may sum a row in another order beside others (OpenBLAS on Haswell does), so the oracle multiplies row by row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from onnx.reference.op_run import OpRun


def matmul_rows(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Returns a @ b, each row of `a` multiplied by itself. `a`: [.., rows, inner]. `b`: [.., inner, columns]."""
    if a.ndim < 2 or b.ndim < 2:
        return np.asarray(a @ b)
    product: NDArray[Any] = np.matmul(a[..., :, None, :], b[..., None, :, :])[..., 0, :]
    return product


def row_ops() -> list[type[OpRun]]:
    """Returns MatMul and Gemm by rows, for `onnx.reference.ReferenceEvaluator(model, new_ops=...)`."""
    from onnx.reference.op_run import OpRun

    class MatMul(OpRun):
        op_domain = ""

        def _run(self, a: Any, b: Any) -> tuple[Any]:
            return (matmul_rows(a, b).astype(a.dtype, copy=False),)

    class Gemm(OpRun):
        op_domain = ""

        def _run(
            self, a: Any, b: Any, c: Any = None, alpha: float = 1, beta: float = 1, transA: int = 0, transB: int = 0
        ) -> tuple[Any]:
            product = alpha * matmul_rows(a.T if transA else a, b.T if transB else b)
            return ((product if c is None else product + beta * c).astype(a.dtype, copy=False),)

    return [MatMul, Gemm]
